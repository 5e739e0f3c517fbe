"""Operations and buffers are named by part of the model, pass and the user's line."""

import contextlib
import importlib
import re
from pathlib import Path

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardlib
from shardlib.explain.analysis.collectives import read_program
from shardlib.explain.analysis.memory import memory_report
from shardlib.explain.hlo import provenance
from shardlib.explain.hlo.provenance import Where, is_library, where_of, where_of_equation
from shardlib.explain.hlo.stacks import Frame, Stacks
from shardlib.explain.hlo.text import parse
from shardlib.nn.stack import scan_layers, stack_layers

WIDTH, ROWS, LAYERS = 64, 32, 3


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mlp = MLP(rngs)

    def __call__(self, x):
        return x + self.mlp(x)


class Net(nnx.Module):
    def __init__(self, scanned, remat, rngs):
        self.remat = remat
        self.layers = stack_layers(Block, LAYERS, rngs) if scanned else None
        self.blocks = None if scanned else nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        if self.blocks is None:
            remat = "full" if self.remat else "none"
            x, _ = scan_layers(lambda layer, x, _: (layer(x), None), self.layers, x, remat=remat)
        else:
            for block in self.blocks:
                x = nnx.remat(lambda block, x: block(x))(block, x) if self.remat else block(x)
        return project(self.head, x)


def project(head, x):
    return head(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        hidden = nn.relu(nn.Dense(4 * WIDTH, use_bias=False, name="up")(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(hidden), None


class LinenNet(nn.Module):
    scanned: bool
    remat: bool

    @nn.compact
    def __call__(self, x):
        block = nn.remat(LinenBlock) if self.remat else LinenBlock
        if self.scanned:
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(block, length=LAYERS, **options)(name="layers")(x, None)
        else:
            for number in range(LAYERS):
                x, _ = block(name=f"layers_{number}")(x)
        return nn.Dense(2 * WIDTH, use_bias=False, name="head")(x)


def nnx_model(scanned, remat):
    graph, state = nnx.split(nnx.eval_shape(lambda: Net(scanned, remat, nnx.Rngs(0))))
    state = nnx.to_pure_dict(state)
    return state, lambda state, x: nnx.merge(graph, state)(x)


def linen_model(scanned, remat):
    model = LinenNet(scanned, remat)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), x), model.apply


PARTS = {
    (nnx_model, True): {"layers[*]/mlp/up", "layers[*]/mlp/down", "head"},
    (nnx_model, False): {"blocks/*/mlp/up", "blocks/*/mlp/down", "head"},
    (linen_model, True): {"layers[*]/up", "layers[*]/down", "head"},
    (linen_model, False): {
        *(f"layers_{n}/{part}" for n in range(LAYERS) for part in ("up", "down")),
        "head",
    },
}


@pytest.fixture(params=["cpu", pytest.param("v5e", marks=pytest.mark.aot)])
def devices(request):
    if request.param == "cpu":
        return jax.devices()[:8]
    return request.getfixturevalue("tpu_devices")("v5e:2x4")


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_each_matmul_and_buffer_names_its_module_pass_and_line(make, scanned, remat, devices):
    params, apply = make(scanned, remat)

    def step(params, x):
        gradients = jax.grad(lambda params: jnp.mean(jnp.square(apply(params, x))))(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients)

    mesh = Mesh(devices, ("data",))

    def placed(leaf, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    x = placed(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), "data")
    text = jax.jit(step).lower(jax.tree.map(placed, params), x).compile().as_text()
    module = parse(text)
    found = [
        where_of(module, one)
        for instructions in module.computations.values()
        for one in instructions
        if one.op_name.endswith("dot_general")
    ]
    assert {where.model_path for where in found} == PARTS[make, scanned]
    passes = {where.phase for where in found if where.model_path != "head"}
    assert passes <= {"forward", "backward", "recompute"}
    assert "backward" in passes
    # XLA merges the recomputation of unrolled layers with the forward pass.
    assert ("recompute" in passes) == remat or (remat and not scanned)
    assert all(where.source.startswith(f"{__file__}:") for where in found)
    report = memory_report(module, {}, {})
    kept = [b for b in report.largest if b.phase]
    assert kept
    assert all(b.source.startswith(f"{__file__}:") for b in kept)
    assert not [label for label, _ in report.timeline if "jit(" in label or "jvp(" in label]
    sums = [c for c in read_program(module, mesh).collectives if c.bytes > WIDTH * WIDTH]
    assert sums
    assert all(c.phase == "backward" and c.model_path for c in sums)


METADATA = 'metadata={{op_name="{}" source_file="model.py" source_line={}}}'
TEXT = f"""HloModule jit_step, num_partitions=8

%all-reduce-scatter (p: f32[64]) -> f32[8] {{
  %p = f32[64]{{0}} parameter(0)
  %summed = f32[64]{{0}} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, to_apply=%add
  ROOT %cut = f32[8]{{0}} dynamic-slice(%summed, %i), dynamic_slice_sizes={{8}}
}}

ENTRY %main (w: f32[8]) -> f32[64] {{
  %w = f32[8]{{0}} parameter(0), metadata={{op_name="params['w']"}}
  %start = (f32[8]{{0}}, f32[64]{{0}}) all-gather-start(%w), channel_id=2, \
replica_groups=[1,8]<=[8], use_global_device_ids=true, dimensions={{0}}
  %done = f32[64]{{0}} all-gather-done(%start)
  %used = f32[64]{{0}} negate(%done), {METADATA.format("jit(step)/jvp(Net)/block_0/mlp/neg", 7)}
  %late = f32[64]{{0}} negate(%used), {METADATA.format("jit(step)/mul", 8)}
  %scattered = f32[8]{{0}} fusion(%late), kind=kCustom, calls=%all-reduce-scatter, \
{METADATA.format("jit(step)/transpose(jvp(Net))/while/body/attention/jit(silu)/ij,jk->ik/dot", 9)}
  %copied = f32[64]{{0}} copy(%p.1)
  ROOT %last = f32[64]{{0}} all-reduce(%copied), channel_id=3, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, to_apply=%add
}}
"""


@pytest.mark.parametrize(
    ("name", "place"),
    [
        # An argument gives the name, and its first reader the line.
        ("start", ("params['w']", "model.py:7", "Net/block_0/mlp", "")),
        # The origin of an instruction in a fusion is that of the fusion.
        (
            "summed",
            (
                "jit(step)/transpose(jvp(Net))/while/body/attention/jit(silu)/ij,jk->ik/dot",
                "model.py:9",
                "Net/attention",
                "backward",
            ),
        ),
        ("last", ("", "", "", "")),
    ],
)
def test_what_the_compiler_adds_comes_from_what_is_around_it(name, place):
    (collective,) = (c for c in read_program(TEXT, {"fsdp": 8}).collectives if c.name == name)
    c = collective
    assert (c.op_name, c.source, c.model_path, c.phase) == place


def test_the_metadata_of_a_kernel_span_lines():
    text = """HloModule m

ENTRY %main (p: f32[4]) -> f32[4] {
  ROOT %k = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block\\": 256}"
}}, metadata={op_name="jit(f)/pallas_call" source_file="model.py" source_line=3}
}
"""
    module = parse(text)
    (kernel,) = module.computations["main"]
    assert where_of(module, kernel).source == "model.py:3"


@pytest.mark.parametrize("module", [jax, flax, optax, shardlib, contextlib, importlib])
def test_the_files_of_libraries_and_of_python_are_not_the_users(module):
    assert is_library(module.__file__)


def test_a_library_is_one_wherever_it_lies(tmp_path, monkeypatch):
    folder = tmp_path / "dist-packages" / "haiku"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "dist-packages")
    provenance._directories.cache_clear()
    is_library.cache_clear()
    try:
        assert is_library(str(folder / "linear.py"))
        assert not is_library(str(tmp_path / "dist-packages" / "models" / "llama.py"))
        assert not is_library(str(tmp_path / "dist-packages" / "haiku_models.py"))
    finally:
        provenance._directories.cache_clear()
        is_library.cache_clear()


class Model:
    def __call__(self, x):
        def inner(y):
            return jax.nn.softmax(y)  # inner

        return inner(x)


def test_an_operation_is_placed_by_its_function_and_not_by_its_line():
    lines = Path(__file__).read_text().splitlines()
    line = 1 + lines.index("            return jax.nn.softmax(y)  # inner")
    function = "test_provenance.py:Model.__call__.inner"
    expected = Where("jit(__call__)/exp", f"{__file__}:{line}", function)
    traced = jax.jit(Model().__call__).trace(jax.numpy.ones(4))
    (equation,) = [e for e in traced.jaxpr.eqns if e.primitive.name == "exp"]
    assert where_of_equation(equation, "jit(__call__)/exp") == expected
    module = parse(traced.lower().compile().as_text())
    found = [i for each in module.computations.values() for i in each if i.opcode == "exponential"]
    where = where_of(module, found[0])
    assert where == expected._replace(model_path="Model")
    assert where.place() == f"Model exp in {function}"


def test_a_program_without_stacks_tells_the_file():
    (instruction,) = (module := parse(TEXT.replace("%copied", "%used"))).computations["main"][3:4]
    where = where_of(module, instruction)
    assert (where.source, where.function) == ("model.py:7", "model.py")
    assert re.fullmatch(r"Net/block_0/mlp neg \(forward\) in model.py", where.place())
    assert Where().place("all-reduce") == "all-reduce"


FUNCTIONS = {
    1: "main", 2: "call.<locals>.<lambda>", 3: "make.<locals>.step", 4: "loss",
    5: "Model.__call__", 6: "scan_body", 7: "Block.__call__",
}  # fmt: skip


def stacks(*parents, shift=0):
    """Frame n is a call of function n, in line 10 n, by frame `parents[n - 1]`; 0 for nobody."""
    numbers = range(1, len(parents) + 1)
    return Stacks(
        {
            "FileNames": {1: "model.py"},
            "FunctionNames": FUNCTIONS,
            "FileLocations": {
                n: f"file_name_id=1 function_name_id={n} line={10 * n} column=3" for n in numbers
            },
            "StackFrames": {
                n: f"file_location_id={n} parent_frame_id={parent + shift}"
                for n, parent in zip(numbers, parents, strict=True)
            },
        }
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_a_stack_is_told_from_the_inside_out(shift):
    found = stacks(0, 1, 2, shift=shift)
    assert list(found.frames(3)) == [
        Frame("model.py", 30, "make.<locals>.step", 3, 3),
        Frame("model.py", 20, "call.<locals>.<lambda>", 2, 3),
        Frame("model.py", 10, "main", 1, 3),
    ]
    assert list(found.frames(9)) == list(found.frames(-1)) == []


@pytest.mark.parametrize(
    ("parents", "traced", "outside"),
    [
        # One stack leads to the traced function, in which it branches.
        ((0, 1, 2, 3, 3), "step", {1, 2}),
        # The whole model is called by one line of the traced function.
        ((0, 1, 2, 3, 4), "step", {1, 2}),
        # The stack branches before, into the function and what was traced of it apart.
        ((0, 1, 2, 3, 2), "step", {1, 2}),
        # The innermost function of that name counts, as there are many lambdas.
        ((0, 1, 2, 3, 3), "<lambda>", {1}),
        # The body of a loop that was traced before has no callers.
        ((0, 1, 2, 3, 0, 5, 6), "step", {1, 2}),
        # If nothing has the name, the shared part of all stacks is outside.
        ((0, 1, 2, 2), "partial", {1, 2}),
    ],
)
def test_what_called_the_traced_function_is_outside(parents, traced, outside):
    assert stacks(*parents).outside(traced) == outside
