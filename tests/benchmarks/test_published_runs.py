"""Records of many spellings, and what is done where they are silent."""

import dataclasses
import json
import re

import pytest

from published import Unusable, read, read_file
from published.case import chip_of, convention_of
from published.mesh import MINIMAL
from published.software import software_of
from shardlib.cost.layout import Layout
from shardlib.cost.workload import EVERY_SECOND, FULL, FULL_EAGER, NONE, SELECTIVE, Remat

DIMS = {
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 8,
    "d_ff": 14336,
    "vocab": 128256,
    "head_dim": 128,
    "glu": True,
}
ROW = {
    "id": "a-1",
    "family": "a",
    "framework": "MaxText (JAX)",
    "hardware": "TPU v5p",
    "chips": 64,
    "model": "8b",
    "dims": DIMS,
    "seq_len": 4096,
    "global_batch_seqs": 256,
    "per_chip_batch_seqs": 4,
    "mesh": {"ici_fsdp": 64},
    "remat": "full",
    "precision": "bf16",
    "step_time_s": 8.0,
}


def case(**changes):
    return read({k: v for k, v in (ROW | changes).items() if v is not None}, {"llama3.1-8b": DIMS})


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("TPU v5e", "v5e"),
        ("TPU v5p-128", "v5p"),
        ("TPU v6e (Trillium)", "v6e"),
        ("TPU7x (Ironwood)", "tpu7x"),
        ("a100_40gb", "a100-40"),
        ("A100-80GB SXM", "a100-80"),
        ("A100", "a100-80"),
        ("DGX-H100", "h100"),
        ("8x V100-16GB (AWS p3.16xlarge)", "v100-32"),
    ],
)
def test_chips(hardware, name):
    assert chip_of({"hardware": hardware}, []).name == name


@pytest.mark.parametrize("hardware", ["GH200", "TPU v2", "A100 PCIe", None])
def test_other_hardware(hardware):
    with pytest.raises(Unusable, match=re.escape("is not a chip of hardware.chips")):
        chip_of({"hardware": hardware}, [])


def test_what_a_record_says_of_its_chips():
    chip = chip_of({"hardware": "H100 SXM 96GB HBM2e 2.4TB/s 500W, 400Gb/s RDMA per GPU"}, [])
    assert chip.memory_bytes == 96e9
    assert chip.memory_bytes_per_second == 2.4e12
    assert chip.bf16_flops == pytest.approx(989.5e12 * (500 / 700) ** 0.5)


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"mesh": {"ici_fsdp": 16, "ici_tensor": 4}}, {"fsdp": 16, "tensor": 4}),
        ({"mesh": "fsdp16 x tp4"}, {"fsdp": 16, "tensor": 4}),
        ({"mesh": "fsdp; layer_input on device"}, {"fsdp": 64}),
        ({"mesh": "ep4"}, {"data": 16, "expert": 4}),
        ({"mesh": None}, {"fsdp": 64}),
        ({"mesh": {"tp": 8, "pp": 2, "vp": 4, "dp": 4}}, {"stage": 2, "data": 4, "tensor": 8}),
        ({"mesh": {"tp": 8, "fsdp": 0}}, {"data": 8, "tensor": 8}),
        ({"mesh": {"model_parallel": 16, "dp": 4}}, {"stage": 2, "data": 4, "tensor": 8}),
        ({"mesh": {"ici_fsdp": 32, "dcn_data": 2}}, {"data": 2, "fsdp": 32}),
        ({"mesh": "fsdp", "slices": 2}, {"data": 2, "fsdp": 32}),
    ],
)
def test_meshes(changes, layout):
    found = case(**changes).layout
    wanted = Layout(**layout)
    assert [getattr(found, a) for a in ("stage", "data", "fsdp", "expert", "tensor")] == [
        getattr(wanted, a) for a in ("stage", "data", "fsdp", "expert", "tensor")
    ]
    assert found.num_devices == 64


def test_a_mesh_of_another_number_of_devices():
    with pytest.raises(Unusable, match="does not fill its 64 devices"):
        case(mesh={"tp": 3})


@pytest.mark.parametrize(
    ("text", "framework", "remat"),
    [
        ("none", "MaxText", NONE),
        ("full", "MaxText", FULL),
        ("full recompute, no SP", "Megatron-LM", FULL_EAGER),
        ("selective attn recompute + sequence parallel", "Megatron-LM", SELECTIVE),
        ("selective (op)", "torchtitan", EVERY_SECOND),
        ("minimal", "MaxText", MINIMAL),
        ("custom: layer_input,q,k,v", "MaxText", Remat(frozenset({"qkv"}))),
    ],
)
def test_rematerialisation(text, framework, remat):
    assert case(remat=text, framework=framework).job.remat == remat


def test_rematerialisation_on_the_host():
    found = case(remat="custom: layer_input,out_proj offload").job.remat
    assert found == Remat(frozenset({"out"}), frozenset({"out", "input"}))


def test_what_is_assumed_is_listed():
    found = case(remat=None, mesh=None)
    assert found.assumed == (
        "mesh: fsdp over all devices",
        "rematerialisation: the least that fits",
    )
    assert found.job.remat == NONE
    small = case(remat=None, hardware="TPU v5e")
    assert small.job.remat != NONE


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        ({"step_time_s": 8.0, "tokens_per_s_per_chip": 1.0}, 8.0),
        ({"tokens_per_s_per_chip": 4096.0}, 4.0),
        ({"seqs_per_s": 64.0}, 4.0),
        ({"tflops_per_chip": 200.0}, 4.08),
        ({"mfu": 200.0 / 459}, 4.08),
    ],
)
def test_what_was_measured(measured, seconds):
    found = case(**({"step_time_s": None} | measured))
    # 6 x 7.5e9 + 12 x 32 x 4096 x 4096 = 51.5e9 FLOPs a token, 16,384 tokens a chip.
    assert found.seconds == pytest.approx(seconds, rel=0.04)
    if "tflops_per_chip" in measured:
        assert found.tflops_per_chip == pytest.approx(200.0)


def test_conventions():
    assert convention_of({"remat": "full; hardware flops"}) == "hardware"
    assert convention_of({"flop_convention": "3*(2*n) (non-causal)"}) == "full"
    assert convention_of({"check": {"closest": "causal"}}) == "causal"
    assert convention_of({}) == "full"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dims": None}, "it gives no dims, and none are known for the model it names"),
        ({"seq_len": None}, "it gives no seq_len"),
        ({"global_batch_seqs": None, "per_chip_batch_seqs": None}, "it gives no batch"),
        ({"step_time_s": None}, "it gives no step time, rate or TFLOP/s"),
        (
            {"precision": "fp8", "hardware": "A100-80GB SXM"},
            "its precision, 'fp8', is not available on",
        ),
        ({"source": "a table of LoRA runs"}, "it trains LoRA without giving the rank"),
        ({"dims": {"d_model": 4096}}, "its dims cannot be read: KeyError('n_layers')"),
    ],
)
def test_what_a_record_may_not_lack(changes, reason):
    with pytest.raises(Unusable, match=re.escape(reason)):
        case(**changes)


def test_dims_by_the_name_of_the_model():
    found = case(dims=None, model="Llama3_8B")
    assert found.job.model == case().job.model
    assert found.assumed == ("dims by the model's name",)


def test_eight_bit_rows_are_marked():
    assert case(precision="float8", hardware="H100 SXM").eight_bit
    assert not case(precision="bf16 compute, fp32 weights default").eight_bit


def test_software_by_what_it_says():
    assert software_of({"framework": "Megatron-LM"}).attention == "unfused"
    assert software_of({"framework": "torchtitan"}).fusion == "eager"
    assert software_of({"framework": "torchtitan", "compile": True}).fusion == "compiled"
    assert software_of({"framework": "torchtitan", "caveat": "async TP"}).overlap_tensor
    assert software_of({"framework": "of next year"}) == software_of({})


def test_a_file_of_strange_rows_is_read_to_its_end(tmp_path):
    rows = [ROW, {}, {"id": "b"}, 7, ROW | {"chips": "many"}, ROW | {"dims": DIMS | {"vocab": "x"}}]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(rows))
    cases, left_out = read_file(path)
    assert [found.id for found in cases] == ["a-1"]
    assert [name for name, _ in left_out] == ["row 1", "b", "row 3", "a-1", "a-1"]
    assert left_out[0][1] == "its hardware, None, is not a chip of hardware.chips"
    path.write_text(
        json.dumps(
            {"rows": [ROW | {"dims": None, "model": "x"}], "model_dims": {"dims": {"x": DIMS}}}
        )
    )
    assert dataclasses.replace(read_file(path)[0][0], model_name="8b", assumed=()) == case()
