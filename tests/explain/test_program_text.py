"""Collectives read out of lines of GPU and TPU programs, in every spelling of their groups."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.explain.analysis.collectives import collectives, read_program
from shardlib.explain.hlo.text import array_bytes, parse

GPU = """HloModule jit_step, is_scheduled=true, num_partitions=16

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%wrapped (p: f32[128]) -> f32[8] {
  %p = f32[128]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p), channel_id=9, replica_groups=[1,16]<=[16], \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %ag = (bf16[8]{0}, bf16[32]{0}) all-gather-start(%x), channel_id=1, replica_groups=\
mesh['axis_0'=4,'axis_1'=4], device_ids=([4,4]T(1,0)) {'axis_1'}, dimensions={0}, \
use_global_device_ids=true, metadata={op_name="jit(step)/gather" source_file="model.py" \
source_line=7}, backend_config={"collective_backend_config":{"is_sync":false}}
  %agd = bf16[32]{0} all-gather-done(%ag)
  %ags = ((f32[2]{0}, f32[4]{0}), (f32[8]{0}, f32[16]{0})) all-gather-start(%x, %y), channel_id=2, \
replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}, dimensions={0}, \
use_global_device_ids=true
  %cp = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%z), channel_id=3, \
source_target_pairs={{0,4},{4,8},{8,12},{12,0}}
  %ars = (f32[2]{0}, f32[3]{0}) all-reduce-start(%a, %b), channel_id=4, \
replica_groups=[4,4]<=[4,4]T(1,0), use_global_device_ids=true, to_apply=%add
  %new-operation = future[8] frobnicate(%a, {weird}), thing=<[=
  %odd = f32[4]{0} all-reduce(%a), channel_id=5, replica_groups={{0,5},{1,4},{2,3},{6,7},{8,9},\
{10,11},{12,13},{14,15}}, use_global_device_ids=true, to_apply=%add
  %strange = f32[4]{0} all-reduce(%a), channel_id=6, replica_groups=some[new]form, \
use_global_device_ids=true, to_apply=%add
  ROOT %r = (s32[], f32[8]{0}) tuple(%i, %o)
}

%cond (t.1: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p0: f32[128]) -> f32[8] {
  %p0 = f32[128]{0} parameter(0)
  %rss = ((f32[128]{0}), f32[8]{0}, s32[]) async-start(%p0), calls=%wrapped
  %rsu = ((f32[128]{0}), f32[8]{0}, s32[]) async-update(%rss), calls=%wrapped
  %rsd = f32[8]{0} async-done(%rsu), calls=%wrapped
  %loop = (s32[], /*index=1*/f32[8]{0}) while(%init), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"5"},"note":"{,"}
  %snd = (f32[8]{0}, u32[], token[]) send(%rsd, %tok), channel_id=11
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def test_the_gpu_dialect():
    report = read_program(GPU, {"fsdp": 4, "tensor": 4})
    found = {
        c.name: (c.kind, c.mesh_axes, c.bytes, c.shapes, c.count, c.in_loop)
        for c in report.collectives
    }
    assert found == {
        "rs": ("reduce-scatter", ("fsdp", "tensor"), 512, ("f32[8]",), 1, False),
        "ag": ("all-gather", ("fsdp",), 64, ("bf16[32]",), 5, True),
        "ags": ("all-gather", ("tensor",), 96, ("f32[8]", "f32[16]"), 5, True),
        "cp": ("collective-permute", ("fsdp",), 16, ("f32[4]",), 5, True),
        "ars": ("all-reduce", ("fsdp",), 20, ("f32[2]", "f32[3]"), 5, True),
        "odd": ("all-reduce", None, 16, ("f32[4]",), 5, True),
        "strange": ("all-reduce", None, 16, ("f32[4]",), 5, True),
    }
    assert report.unread == {"send": 1}
    (gather,) = [c for c in report.collectives if c.name == "ag"]
    assert (gather.op_name, gather.source) == ("jit(step)/gather", "model.py:7")
    table, *lines = report.parts()
    assert table.rows[3] == ("all-reduce", "?", "2", "10", "160 B")
    assert lines == [
        "follows no mesh axes: all-reduce f32[4] x 5, 80 B sent",
        "follows no mesh axes: all-reduce f32[4] x 5, 160 B sent",
        "not read: 1 send, 32 B sent",
    ]


TPU = """HloModule jit_step, num_partitions=8

%all-reduce-scatter.1.clone (p: bf16[64,128]) -> bf16[8,128] {
  %p = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %ar = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, to_apply=%add
  ROOT %ds = bf16[8,128]{1,0:T(8,128)(2,1)} dynamic-slice(%ar, %i, %z), dynamic_slice_sizes={8,128}
}

%async_collective_fusion.start (p.1: f32[4]) -> f32[32] {
  ROOT %ag.1 = f32[32]{0:T(256)} all-gather(%p.1), channel_id=2, replica_groups=[1,8]<=[8], \
dimensions={0}, use_global_device_ids=true
}

%async_collective_fusion.done (p.2: f32[4]) -> f32[32] {
  ROOT %ag.2 = f32[32]{0:T(256)} all-gather(%p.2), channel_id=2, replica_groups=[1,8]<=[8], \
dimensions={0}, use_global_device_ids=true
}

%cond_fusion (i: s32[], n: s32[]) -> pred[] {
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%cond (t: (s32[], f32[4])) -> pred[] {
  %n = s32[]{:T(128)} constant(12)
  ROOT %done = pred[]{:T(512)} fusion(%i, %n), kind=kLoop, calls=%cond_fusion
}

%body (t.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %start = f32[32]{0:T(256)} fusion(%w), kind=kCustom, calls=%async_collective_fusion.start
  %end = f32[32]{0:T(256)} fusion(%start), kind=kCustom, calls=%async_collective_fusion.done
  %all-reduce-scatter.1 = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%g), kind=kCustom, \
calls=%all-reduce-scatter.1.clone, metadata={op_name="jit(step)/transpose"}
  ROOT %r = (s32[]{:T(128)}, f32[4]{0:T(256)}) tuple(%i, %o)
}

%endless (t.2: (s32[])) -> pred[] {
  ROOT %go = pred[] custom-call(%x), custom_call_target="stop"
}

%other (t.3: (s32[])) -> (s32[]) {
  %a2a = f32[8]{0} all-to-all(%x), channel_id=4, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

ENTRY %main (p0: f32[4]) -> f32[4] {
  %loop = (s32[]{:T(128)}, f32[4]{0:T(256)}) while(%init), condition=%cond, body=%body
  %unknown = (s32[]) while(%x), condition=%endless, body=%other
  %plain.1 = f32[] all-reduce(%l), channel_id=6, replica_groups={{0}}, to_apply=%add
  %plain.2 = f32[] all-reduce(%l), replica_groups={}, to_apply=%add
  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1
}
"""


def test_the_tpu_dialect():
    report = read_program(TPU, {"fsdp": 8})
    found = {
        c.name: (c.kind, c.mesh_axes, c.bytes, c.count, c.trips_known) for c in report.collectives
    }
    assert found == {
        "ar": ("reduce-scatter", ("fsdp",), 64 * 128 * 2, 12, True),
        "ag.1": ("all-gather", ("fsdp",), 128, 12, True),
        "a2a": ("all-to-all", ("fsdp",), 32, 1, False),
        "plain.1": ("all-reduce", ("fsdp",), 4, 1, True),
        "plain.2": ("all-reduce", (), 4, 1, True),
    }
    assert "some loops have unknown trip counts and count once" in str(report)


def spellings(sizes, subset):
    """Returns the groups along `subset` of mesh axes as XLA may write them."""
    shape = tuple(sizes.values())
    dims = [list(sizes).index(name) for name in subset]
    order = [d for d in range(len(shape)) if d not in dims] + dims
    members = math.prod(shape[d] for d in dims)
    ids = np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(-1, members)
    listed = ",".join("{" + ",".join(map(str, row)) + "}" for row in ids.tolist())
    mesh = ",".join(f"'axis_{i}'={size}" for i, size in enumerate(shape))
    axes = ",".join(f"'axis_{d}'" for d in dims)
    iota = f"[{len(ids)},{members}]<=[{','.join(map(str, shape))}]T({','.join(map(str, order))})"
    # The same axes as coarse and fine parts of one axis that holds all devices.
    parts = [f"'a':({math.prod(shape[:d])}){shape[d]}" for d in dims]
    one = f"mesh['a'={math.prod(shape)}] {{{','.join(parts)}}}"
    return [f"{{{listed}}}", iota, f"mesh[{mesh}] {{{axes}}}", one if len(dims) == 1 else iota]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_every_spelling_of_every_subset_of_axes(shape, data):
    sizes = {f"x{i}": size for i, size in enumerate(shape)}
    subset = data.draw(
        st.sampled_from(
            [
                *itertools.chain.from_iterable(
                    itertools.combinations(sizes, n) for n in range(1, len(sizes) + 1)
                )
            ]
        )
    )
    expected = tuple(name for name in subset if sizes[name] > 1)
    for text in spellings(sizes, subset):
        program = (
            "ENTRY %main (p: f32[2]) -> f32[2] {\n"
            "  ROOT %r = f32[2]{0} all-reduce(%p), channel_id=1, "
            f"replica_groups={text}, use_global_device_ids=true, to_apply=%add\n}}\n"
        )
        (found,) = collectives(program, sizes)
        assert found.mesh_axes == expected, text


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("s4[5]{0:E(4)}", 3),
        ("bf16[2,3]{1,0:T(8,128)(2,1)}", 12),
        ("(f8e4m3fn[4]{0}, c64[2], token[])", 20),
        ("f32[<=8,2]", 64),
        ("opaque[]", 0),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert array_bytes(shape) == size


def test_text_that_is_no_program():
    assert collectives("", {"data": 2}) == []
    module = parse("nonsense\n  %x = \n  %y = f32[2] add(%a\nENTRY %e () -> f32[] {\n  %z = ]\n}")
    assert module.entry == "e"
    assert module.computations == {"e": ()}


FOLDED = """HloModule jit_step, num_partitions=8

%cut (p.1: f32[64,8], i.1: s32[]) -> f32[8,8] {
  %p.1 = f32[64,8]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %part = f32[8,8]{1,0} dynamic-slice(%p.1, %i.1, %i.1), dynamic_slice_sizes={8,8}
  ROOT %twice = f32[8,8]{1,0} add(%part, %part)
}

%sum_and_cut (a.1: f32[64,8], b.1: f32[64,8], i.2: s32[]) -> bf16[8,8] {
  %a.1 = f32[64,8]{1,0} parameter(0)
  %b.1 = f32[64,8]{1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  %sum.1 = f32[64,8]{1,0} add(%a.1, %b.1)
  %narrow = bf16[64,8]{1,0} convert(%sum.1)
  ROOT %part.2 = bf16[8,8]{1,0} dynamic-slice(%narrow, %i.2, %i.2), dynamic_slice_sizes={8,8}
}

ENTRY %main (p0: f32[64,8]) -> f32[8,8] {
  %cut.me = f32[64,8]{1,0} all-reduce(%p0), channel_id=1, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, to_apply=%add
  %one = f32[8,8]{1,0} fusion(%cut.me, %i), kind=kLoop, calls=%cut, control-predecessors={%p0}
  %pair = (f32[64,8]{1,0}, f32[64,8]{1,0}) all-reduce(%p0, %p0), channel_id=2, \
replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add
  %a = f32[64,8]{1,0} get-tuple-element(%pair), index=0
  %b = f32[64,8]{1,0} get-tuple-element(%pair), index=1
  %two = bf16[8,8]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%sum_and_cut
  %kept = f32[64,8]{1,0} all-reduce(%p0), channel_id=3, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, to_apply=%add
  %three = f32[8,8]{1,0} fusion(%kept, %i), kind=kLoop, calls=%cut
  %norm = f32[] reduce(%kept, %zero), dimensions={0,1}, to_apply=%add
  %half = f32[64,8]{1,0} all-reduce(%p0), channel_id=4, replica_groups=[2,4]<=[8], \
use_global_device_ids=true, to_apply=%add
  ROOT %out = f32[8,8]{1,0} fusion(%half, %i), kind=kLoop, calls=%cut
}
"""


def test_all_reduces_that_are_cut_or_added_up():
    report = read_program(FOLDED, {"data": 2, "tensor": 4})
    found = {c.name: (c.mesh_axes, c.group_size, c.fates) for c in report.collectives}
    assert found == {
        "cut.me": (("data", "tensor"), 8, ("sliced",)),
        "pair": (("data", "tensor"), 8, ("sliced", "added")),
        # Read as a whole too, or cut in more parts than devices that reduce it.
        "kept": (("data", "tensor"), 8, ("whole",)),
        "half": (("tensor",), 4, ("whole",)),
    }
    bytes_of_one = 64 * 8 * 4
    sent = {
        c.name: (c.sent_bytes / bytes_of_one, c.folded_bytes / bytes_of_one)
        for c in report.collectives
    }
    assert sent == {
        "cut.me": (2 * 7 / 8, 7 / 8),
        "pair": (2 * 2 * 7 / 8, 7 / 8),
        "kept": (2 * 7 / 8, 2 * 7 / 8),
        "half": (2 * 3 / 4, 2 * 3 / 4),
    }


def test_groups_along_a_part_of_an_axis_are_that_axis():
    text = "replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"
    program = (
        "ENTRY %main (p: f32[2]) -> f32[2] {\n"
        f"  ROOT %r = f32[2]{{0}} all-reduce(%p), channel_id=1, {text}, to_apply=%add\n}}\n"
    )
    (found,) = collectives(program, {"tensor": 8})
    assert (found.mesh_axes, found.group_size) == (("tensor",), 4)


def test_a_ragged_exchange_sends_no_more_than_is_offered():
    program = (
        "ENTRY %main (p: f32[2]) -> f32[2] {\n"
        "  %rows = f32[16,4]{1,0} parameter(0)\n"
        "  %room = f32[64,4]{1,0} broadcast(%zero), dimensions={}\n"
        "  ROOT %r = f32[64,4]{1,0} ragged-all-to-all(%rows, %room, %a, %b, %c, %d), channel_id=1, "
        "replica_groups={{0,1,2,3}}\n}\n"
    )
    (found,) = collectives(program, {"expert": 4})
    assert (found.bytes, found.shapes) == (16 * 4 * 4, ("f32[64,4]",))
    assert found.sent_bytes == 3 / 4 * 16 * 4 * 4


BRANCHES = """HloModule jit_step, num_partitions=4

%idle (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} parameter(0)
}

%few (x: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  ROOT %cp = f32[8]{0} collective-permute(%x.1), channel_id=1, source_target_pairs={{0,1}}
}

%all (x: f32[8]) -> f32[8] {
  %x.2 = f32[8]{0} parameter(0)
  ROOT %cp.1 = f32[8]{0} collective-permute(%x.2), channel_id=2, \
source_target_pairs={{0,1},{1,2},{2,3}}
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %y = f32[8]{0} get-tuple-element(%t), index=1
  %sent = f32[8]{0} conditional(%i, %y, %y, %y), branch_computations={%idle, %few, %all}, \
metadata={op_name="jit(step)/while/body/NAME/cond"}
  ROOT %next = (s32[], f32[8]{0}) tuple(%i, %sent)
}

ENTRY %main (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %loop = (s32[], f32[8]{0}) while(%t.1), condition=%missing, body=%body, \
backend_config={"known_trip_count":{"n":"20"}}
}
"""


@pytest.mark.parametrize(("scope", "counts"), [("branch_counts_3_1_6", [2, 12]), ("x", [20, 20])])
def test_a_scope_says_how_often_the_branches_of_a_conditional_are_taken(scope, counts):
    found = collectives(BRANCHES.replace("NAME", scope), {"stage": 4})
    assert [(c.count, c.senders, c.mesh_axes) for c in found] == [
        (counts[0], 1, ("stage",)),
        (counts[1], 3, ("stage",)),
    ]
