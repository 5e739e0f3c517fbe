"""Steps of the engine compiled for TPUs and GPUs that are not there."""

import dataclasses
import math
from typing import Any

import jax
import pytest

import shardlib as sl
from shardlib.config import from_dict
from shardlib.engine.abstract import abstract_step
from shardlib.engine.sizes import engine_sizes
from shardlib.explain.analysis.collectives import Collective, read_program
from shardlib.explain.aot.topology import devices_of
from shardlib.hardware import parse_cluster
from shardlib.registry import family, sizes
from shardlib.rules.presets import SERVE
from shardlib.sharding.constrain import Scope

SLOTS, LANES = 32, 8
ROWS = {LANES: SLOTS + LANES * 32, 0: SLOTS}
FAST = {"xla_tpu_no_crash_on_oom": True, "optimization_level": 9}
DRAWN_BYTES = 2048
"""Of a row: the token, its log probability and the 20 likeliest that each device found."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step, and the bytes that a device holds."""

    compiled: Any
    config: Any
    cache_bytes: int
    weight_bytes: int
    collectives: tuple[Collective, ...]
    num_devices: int
    platform: str

    def of(self, kind, *, in_loop):
        return [c for c in self.collectives if c.kind == kind and c.in_loop == in_loop]


def held(tree):
    """Returns the bytes of arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def compiled(
    model, cluster, mesh, lanes, weights=None, *, context=2048, attention="auto", **changes
):
    if "h100" in cluster:
        pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    name, fields = sizes()[model]
    made = family(name)
    config = from_dict(made.config, {**fields, **changes}, model)
    devices = devices_of(parse_cluster(cluster))
    scope = Scope(sl.make_mesh(mesh, devices=devices), SERVE)
    of_engine = engine_sizes(
        slots=SLOTS, context=context, pages=None, page_size=16, chunk=LANES * 32, lane=32,
        max_length=made.decoding.max_length(config), deterministic=False, attention=attention,
    )  # fmt: skip
    step = abstract_step(made, config, scope, of_engine, num_lanes=lanes, weights=weights)
    options = FAST if devices[0].platform == "tpu" else None
    program = step.lower().compile(compiler_options=options)
    found = read_program(program, scope.mesh).collectives
    of_device = held(step.state.pages), held(step.params)
    return Program(program, config, *of_device, tuple(found), len(devices), devices[0].platform)


def check(program, lanes):
    """Checks that the cache is updated in place, and that the step sends what its rules imply."""
    config, rows = program.config, ROWS[lanes]
    memory = program.compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= program.cache_bytes
    # Neither its keys nor its values are copied.
    assert memory.temp_size_in_bytes < program.cache_bytes / 3
    stream = 2 * rows * config.embed_dim
    sums = program.of("all-reduce", in_loop=True)
    # Attention and MLP of each layer end in a sum.
    assert [(c.bytes, c.count, c.mesh_axes) for c in sums] == [
        (stream, config.num_layers, ("tensor",))
    ] * 2
    assert {c.kind for c in program.collectives if c.in_loop} == {"all-reduce"}
    rest = [c for c in program.collectives if not c.in_loop]
    # The embeddings are summed, and logits go from parts of the vocabulary to rows.
    assert [c.bytes for c in rest if c.bytes == stream and c.kind == "all-reduce"] == [stream]
    # Those of all rows if a prompt wants its log probabilities.
    turned = program.of("all-to-all", in_loop=False)
    share = 2 * config.vocab_size / program.num_devices
    assert sorted(c.bytes for c in turned) == [(SLOTS + lanes) * share, rows * share]
    others = [c for c in rest if c not in turned and c.bytes != stream]
    assert sum(c.bytes for c in others) < DRAWN_BYTES * rows


@pytest.mark.aot
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("lanes", "kv_heads"), [(LANES, 8), (0, 8), (LANES, 4)], ids=["mixed", "decode", "few heads"]
)
def test_a_step_of_a_tpu_updates_its_cache_in_place_and_sends_two_sums_a_layer(lanes, kv_heads):
    sizes = {"num_layers": 2, "vocab_size": 8192, "num_kv_heads": kv_heads}
    program = compiled("llama3-8b", "v5e-8", "tensor=8", lanes, **sizes)
    check(program, lanes)
    assert "ragged_paged_attention" in program.compiled.as_text()
    # Fewer heads than devices: each device holds the one that it needs.
    positions = 16 * (1 + SLOTS * 2048 // 16)
    assert program.cache_bytes == 2 * positions * 2 * 128 * 2


@pytest.mark.aot
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("model", "mesh", "kernel"),
    [
        ("gemma2-2b", "tensor=8", True),
        ("gemma2-2b", "tensor=2,data=4", False),
        ("gemma2-27b", "tensor=4,data=2", True),
        ("gpt-oss-20b", "tensor=8", False),
        ("llama2-7b", "tensor=2,data=4", True),
    ],
    ids=["softcap and windows", "two heads of 256", "four heads", "sinks", "many heads"],
)
def test_what_the_kernel_of_tpus_does_not_read_is_left_to_xla(model, mesh, kernel):
    # XLA compiles no product of the experts in 16 bits with another precision.
    with jax.default_matmul_precision("default"):
        program = compiled(model, "v5e-8", mesh, LANES, num_layers=2, vocab_size=8192)
    assert ("ragged_paged_attention" in program.compiled.as_text()) == kernel


@pytest.mark.soak
def test_tpus_read_by_xla_where_they_are_asked_to():
    sizes = {"num_layers": 2, "vocab_size": 8192}
    program = compiled("llama3-8b", "v5e-8", "tensor=8", LANES, attention="xla", **sizes)
    assert "ragged_paged_attention" not in program.compiled.as_text()
    check(program, LANES)


@pytest.mark.soak
def test_gpus_read_pages_by_cudnn_where_they_are_asked_to():
    program = compiled(
        "llama3-8b", "8xh100", "tensor=8", LANES, num_layers=2, vocab_size=8192, attention="cudnn"
    )
    assert "__cudnn$fmha" in program.compiled.as_text()
    assert program.compiled.memory_analysis().alias_size_in_bytes >= program.cache_bytes


WHOLE = {
    "llama3-8b": ("v5e-8 tensor=8", "v5p-8 tensor=4", "v5p-16 tensor=8", "8xh100 tensor=8"),
    "llama3-70b": ("v5e-8 tensor=8 int8", "v5p-8 tensor=4", "v5p-16 tensor=8", "8xh100 tensor=8"),
}


@pytest.mark.soak
@pytest.mark.parametrize("lanes", ROWS)
@pytest.mark.parametrize(
    ("model", "place"), [(model, place) for model, places in WHOLE.items() for place in places]
)
def test_whole_models_are_served_on(model, place, lanes):
    cluster, mesh, *weights = place.split()
    program = compiled(model, cluster, mesh, lanes, *weights)
    check(program, lanes)
    is_read_in_place = "ragged_paged_attention" in program.compiled.as_text()
    assert is_read_in_place == (program.platform == "tpu")
    memory = program.compiled.memory_analysis()
    print(
        f"{model} {place} lanes={lanes}: weights {program.weight_bytes / 1e9:.2f} GB, cache "
        f"{program.cache_bytes / 1e9:.2f}, temporaries {memory.temp_size_in_bytes / 1e9:.3f}"
    )
