"""Lines as XLA writes them for TPUs, for several slices of them, for GPUs and for CPUs."""

import pytest

from shardlib.explain.analysis.collectives import read_program
from shardlib.explain.hlo.layouts import device_bytes, padded_bytes
from shardlib.explain.hlo.text import parse

# Cut from a step on two slices of eight chips, data=2 over the slices, fsdp=8 within.
TWO_SLICES = """HloModule jit_step, is_scheduled=true, entry_computation_layout=\
{(f32[8]{0:T(256)})->f32[8]{0:T(256)}}, num_partitions=8

%body.1 (arg: (s32[], bf16[64,8,128])) -> (s32[], bf16[64,8,128]) {
  %arg = (s32[]{:T(128)}, bf16[64,8,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %dot.1 = bf16[64,8,128]{2,1,0:T(8,128)(2,1)} fusion(%arg), kind=kOutput, calls=%dot, \
metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=2}
  %bitcast.610 = bf16[64,8,128]{2,1,0:T(8,128)(2,1)} bitcast(%dot.1)
  %after-all.27 = token[] after-all(), frontend_attributes={MegascaleRendezvousKeyName=\
"all-reduce.32_0"}
  %send.27 = (bf16[64,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) send(%bitcast.610, \
%after-all.27), channel_id=2, is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous=\
"all-reduce.32_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:7}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %send-done.27 = token[] send-done(%send.27), channel_id=2, is_host_transfer=true
  %recv.27 = (bf16[64,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) recv(%after-all.27), \
channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name=\
"xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.32_0",\
_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:7}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv-done.27 = (bf16[64,8,128]{2,1,0:T(8,128)(2,1)}, token[]) recv-done(%recv.27), channel_id=1
  %ar.1 = bf16[64,8,128]{2,1,0:T(8,128)(2,1)} all-reduce(%bitcast.610), channel_id=7, \
replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add
  ROOT %out = (s32[]{:T(128)}, bf16[64,8,128]{2,1,0:T(8,128)(2,1)}) tuple(%arg, %ar.1)
}

%cond.1 (arg.1: (s32[], bf16[64,8,128])) -> pred[] {
  %four = s32[]{:T(128)} constant(4)
  ROOT %lt = pred[]{:T(512)} compare(%i, %four), direction=LT
}

ENTRY %main (p0: f32[8]) -> f32[8] {
  %p0 = f32[8]{0:T(256)} parameter(0)
  %while.1 = (s32[]{:T(128)}, bf16[64,8,128]{2,1,0:T(8,128)(2,1)}) while(%init), \
condition=%cond.1, body=%body.1
  %send.9 = (f32[16]{0:T(256)}, u32[], token[]) send(%p0, %tok), channel_id=11, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="to_host"}
  %gathered = (f32[4]{0:T(256)}, u32[], token[]) send(%p0, %tok.2), channel_id=12, \
frontend_attributes={_xla_host_transfer_rendezvous="all-gather.1_0",\
_xla_megascale_transfer_type="ALL_GATHER"}
  %gathered.2 = (f32[8]{0:T(256)}, u32[], token[]) recv(%tok.2), channel_id=13, \
frontend_attributes={_xla_host_transfer_rendezvous="all-gather.1_0",\
_xla_megascale_transfer_type="ALL_GATHER"}
  ROOT %r = f32[8]{0:T(256)} copy(%p0)
}

FileNames
1 "model.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
2 {file_location_id=1 parent_frame_id=2}
"""


def test_what_slices_send_each_other_goes_over_the_axes_that_cross_them():
    report = read_program(TWO_SLICES, {"data": 2, "fsdp": 8})
    payload = 64 * 8 * 128 * 2
    between = [c for c in report.collectives if c.between_slices]
    assert [(c.kind, c.mesh_axes, c.bytes, c.count, c.group_size) for c in between] == [
        ("all-reduce", ("data",), payload, 4, 2),
        ("all-gather", ("data",), 32, 1, 2),
    ]
    # Half of the buffer goes each way between two slices, in a reduce-scatter and an all-gather.
    assert between[0].sent_bytes == 4 * payload
    # The send has no name of its own: it has that of what it sends.
    assert (between[0].op_name, between[0].source) == (
        "jit(step)/transpose(jvp())/dot_general",
        "model.py:7",
    )
    (within,) = [c for c in report.collectives if not c.between_slices]
    assert (within.kind, within.mesh_axes, within.group_size) == ("all-reduce", ("fsdp",), 8)


def test_what_nothing_is_known_of_is_flagged_and_counted():
    report = read_program(TWO_SLICES, {"data": 2, "fsdp": 8})
    assert report.unread == {"send": 1}
    assert report.unread_bytes == 64
    sent = sum(c.sent_bytes for c in report.collectives) + 64
    assert report.unattributed_share == pytest.approx(64 / sent)
    assert list(report.unknowns()) == ["not read: 1 send, 64 B sent"]


def test_an_axis_may_lie_partly_within_a_slice():
    report = read_program(TWO_SLICES, {"data": 4, "fsdp": 4})
    axes = {(c.kind, c.between_slices): c.mesh_axes for c in report.collectives}
    # Two of the four along `data` are in each slice; a group of all eight is both axes there.
    assert axes["all-reduce", True] == ("data",)
    assert axes["all-reduce", False] == ("data", "fsdp")


GPU_SENDS = """HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (p0: f32[16]) -> f32[16] {
  %p0 = f32[16]{0} parameter(0)
  %after-all = token[] after-all()
  %recv = (f32[16]{0}, u32[], token[]) recv(%after-all), channel_id=1, frontend_attributes={\
_xla_send_recv_source_target_pairs="{{0,2},{1,3}}"}
  %send = (f32[16]{0}, u32[], token[]) send(%p0, %after-all), channel_id=1, frontend_attributes={\
_xla_send_recv_source_target_pairs="{{0,2},{1,3}}"}, metadata={op_name="jit(step)/ppermute" \
source_file="ring.py" source_line=3}
  %recv-done = (f32[16]{0}, token[]) recv-done(%recv), channel_id=1
  ROOT %out = f32[16]{0} get-tuple-element(%recv-done), index=0
}
"""


def test_a_permutation_of_a_gpu_written_as_send_and_recv():
    report = read_program(GPU_SENDS, {"stage": 2, "data": 2})
    (found,) = report.collectives
    assert (found.kind, found.mesh_axes, found.bytes) == ("collective-permute", ("stage",), 64)
    assert (found.op_name, found.source) == ("jit(step)/ppermute", "ring.py:3")
    assert (report.unread, report.unattributed_share) == ({}, 0.0)


CPU = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), \
{1}: (0, {}, must-alias) }, num_partitions=4

%region (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%parallel_body (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %early = f32[8,4]{1,0} negate(%p)
  ROOT %all-reduce.3 = f32[8,4]{1,0} all-reduce(%early), channel_id=1, replica_groups={{0,1},{2,3}}\
, use_global_device_ids=true, to_apply=%region, metadata={op_name="jit(step)/psum" \
source_file="m.py" source_line=2}
  %late = f32[8,4]{1,0} negate(%p)
}

ENTRY %main (x.1: f32[8,4], y.1: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %y.1 = f32[8,4]{1,0} parameter(1)
  %x.1 = f32[8,4]{1,0} parameter(0), metadata={op_name="state['x']"}
  %call = f32[8,4]{1,0} call(%x.1), to_apply=%parallel_body
  %call.2 = f32[8,4]{1,0} call(%call), to_apply=%parallel_body
  ROOT %tuple = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%call.2, %y.1)
}
"""


def test_the_cpu_dialect():
    (found,) = read_program(CPU, {"data": 2, "tensor": 2}).collectives
    assert (found.kind, found.mesh_axes, found.count) == ("all-reduce", ("tensor",), 2)
    module = parse(CPU)
    assert module.donations() == [((0,), 1, ()), ((1,), 0, ())]
    assert not module.is_tiled
    assert [i.name for i in module.computations["parallel_body"] if i.root] == ["all-reduce.3"]
    names = {i.name: i.op_name for i in module.computations["main"]}
    assert names["x.1"] == "state['x']"


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        ("f32[4096]{0:T(1024)}", 4096 * 4),
        ("f32[]{:T(128)}", 128 * 4),
        ("bf16[100,200]{1,0:T(8,128)(2,1)}", 104 * 256 * 2),
        # The layout decides which dims are the fast ones.
        ("bf16[100,200]{0,1:T(8,128)(2,1)}", 200 * 128 * 2),
        ("f32[3,5,7]{2,1,0:T(8,128)}", 3 * 8 * 128 * 4),
        ("pred[2,512]{1,0:T(4,128)(4,1)}", 4 * 512),
        ("f32[7]{0:T(8,128)}", 8 * 128 * 4),
        ("f32[0,5]{1,0:T(8,128)}", 0),
        ("f32[3,5]{1,0}", 60),
        ("f32[3,5]", 60),
        ("f32[3,5]{1,0:unheard(of)}", 60),
    ],
)
def test_tiles_pad_the_fast_dims(shape, padded):
    assert padded_bytes(shape) == padded


def test_only_what_lies_in_the_devices_own_memory_counts():
    on_chip = "f32[256]{0:T(256)S(1)}"
    assert device_bytes(on_chip, tiled=True) == 0
    assert device_bytes("f32[256]{0:S(5)}", tiled=False) == 0  # The hosts' memory.
    assert device_bytes("f32[256]{0:S(1)}", tiled=False) == 1024  # Collective memory of a GPU.
