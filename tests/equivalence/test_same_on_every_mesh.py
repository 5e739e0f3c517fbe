"""Losses, gradients, parameters, optimizer and model state on every mesh are one device's, and the
compiled step holds the collectives that its strategy implies, and no others.

XLA for CPU has no reduce-scatter: there it is an all-reduce whose result is cut.
"""

import itertools
import math
import re

import jax
import pytest
from cases import CASES, WAYS
from problems import BATCH, LENGTH, PROBLEMS

from shardlib.explain.analysis.collectives import read_program
from shardlib.mesh import STANDARD_AXES
from shardlib.testing import assert_collectives

# A case of each axis, of those that are quickly compiled; `mesh` has the rest.
QUICK = {
    "transformer fsdp=8",
}
# Slow, or what other cases cover too: see the tests below.
SOAK = {
    "moe stage=4,expert=2 4 microbatches 3 of 14 layers dense",
    "moe expert=2,tensor=4 sequence",
    "resnet data=8",
    "resnet data=2,fsdp=4 zero2",
    "resnet data=2x2,fsdp=2",
    "unet data=8",
    "unet tensor=8",
    "unet fsdp=4,tensor=2 2 microbatches",
    "unet data=2,context=2,tensor=2 sequence",
    "unet data=2x2,fsdp=2 zero2",
    "transformer fsdp=8 zero2",
    "transformer data=2,fsdp=4",
    "transformer data=2,context=4 gathered",
    "transformer fsdp=4,tensor=2 2 microbatches",
    "transformer stage=2,tensor=4 4 microbatches interleaved",
    "transformer stage=2,fsdp=2,tensor=2 4 microbatches",
    "transformer data=2,context=2,tensor=2 sequence",
    "transformer data=2x2,tensor=2",
    "transformer data=2x2,fsdp=2 no dropout, hops",
    "transformer stage=2x1,data=2,fsdp=2 2 microbatches",
    # Stages of unequally many layers have tests of their own, of a smaller model.
    "transformer stage=4,fsdp=2 4 microbatches zero2, 7 layers",
    "transformer data=4,tensor=2",
    "transformer data=4,context=2",
    "transformer context=4,tensor=2",
    "transformer stage=2,data=4 2 microbatches",
    "transformer stage=4,fsdp=2 4 microbatches",
    "transformer stage=4,context=2 4 microbatches",
    "transformer data=2,context=2,tensor=2",
    "transformer stage=2,data=2,tensor=2 2 microbatches gpipe",
    "transformer stage=2,data=2x2 2 microbatches no dropout, hops, 7 layers",
    "moe expert=4,fsdp=2",
    "moe data=2,expert=4",
    "moe expert=4,context=2 no dropout",
    "moe expert=4,context=2 no dropout, capacity",
    # Tokens beyond a capacity have tests of their own, of one layer.
    "moe expert=4,fsdp=2 no dropout, capacity",
    "moe expert=4,tensor=2",
    "moe stage=2,expert=2,tensor=2 2 microbatches interleaved",
    "transformer fsdp=2,tensor=4 sequence",
    "transformer stage=4,expert=2 4 microbatches interleaved",
    "transformer stage=2,fsdp=2,tensor=2 4 microbatches 30 steps",
    "transformer stage=2,context=2,tensor=2 2 microbatches",
}
USUAL = [case for case in CASES if str(case) not in SOAK]


def _quick_or_mesh(name):
    return () if name in QUICK else pytest.mark.mesh


def _marks(name):
    return pytest.mark.soak if name in SOAK else _quick_or_mesh(name)


# Numbers (losses, norms, counts) travel alone or combined; what is told apart is arrays.
_ARRAY = re.compile(r"\w+\[(\d[\d,]*)\]")

LAYERS, EMBED = (getattr(PROBLEMS["transformer"].config, n) for n in ("num_layers", "embed_dim"))

EXPECTED = {
    # Each gradient is summed once.
    "transformer data=8 30 steps": {("all-reduce", "data")},
    # Parameters are gathered for use, gradients cut as they are summed; norms are held whole.
    "transformer fsdp=8": {
        ("all-gather", "fsdp"),
        ("reduce-scatter", "fsdp"),
        ("all-reduce", "fsdp"),
    },
    # The end of each branch is summed, forward and backward. Devices that share a key-value head
    # add up its gradients, which come together once a step.
    "transformer tensor=8": {("all-reduce", "tensor"), ("all-gather", "tensor")},
    # Keys and values go around a ring; gradients are summed.
    "transformer context=8": {("collective-permute", "context"), ("all-reduce", "context")},
    # To a dense model the axis is one of data.
    "transformer expert=8": {("all-reduce", "expert")},
    "transformer stage=8 4 microbatches gpipe": {
        ("collective-permute", "stage"),
        ("all-reduce", "stage"),
    },
    # Gathers before attention and MLP, reduce-scatters behind them.
    "transformer tensor=8 sequence": {
        ("all-gather", "tensor"),
        ("reduce-scatter", "tensor"),
        ("all-reduce", "tensor"),
    },
    # Gradients are summed, and each device's share of the update is gathered.
    "transformer fsdp=8 zero1": {("all-reduce", "fsdp"), ("all-gather", "fsdp")},
    "transformer context=4,tensor=2 ulysses": {
        ("all-to-all", "context"),
        ("all-gather", "context"),
        ("all-reduce", "context"),
        ("all-reduce", "tensor"),
    },
    # Routers are gathered, and the counts of the tokens that travel.
    "moe expert=8": {("all-to-all", "expert"), ("all-reduce", "expert"), ("all-gather", "expert")},
    "resnet data=8": {("all-reduce", "data")},
    "resnet fsdp=8": {("all-gather", "fsdp"), ("reduce-scatter", "fsdp"), ("all-reduce", "fsdp")},
    "unet fsdp=8": {("all-gather", "fsdp"), ("reduce-scatter", "fsdp"), ("all-reduce", "fsdp")},
}


@pytest.fixture
def comparison(compare):
    """Returns the comparison of the case of that name."""
    cases = {str(case): case for case in CASES}
    return lambda name: compare(cases[name], keep=True)


@pytest.fixture
def program(comparison):
    """Returns what the step of a case sends: collectives of arrays, its shapes of parameters."""

    def read(name):
        found = comparison(name)
        sent = read_program(found.compiled, found.mesh).collectives
        state = found.compiled.in_avals[0][0]
        return [c for c in sent if arrays(c)], [
            tuple(x.shape) for x in jax.tree.leaves(state.params)
        ]

    return read


def arrays(collective):
    """The arrays that a collective carries, as shapes; single numbers left out."""
    found = (_ARRAY.fullmatch(shape) for shape in collective.shapes)
    return [tuple(map(int, match[1].split(","))) for match in found if match]


def elements(sent):
    return sum(c.count * sum(math.prod(shape) for shape in arrays(c)) for c in sent)


def per_layer(sent, *, backward):
    """All-reduces inside of the loop over layers, forward or backward."""
    inside = [c for c in sent if c.in_loop and c.kind == "all-reduce"]
    return [c for c in inside if ("transpose" in c.op_name) is backward]


@pytest.fixture
def found(comparison, case):
    # The first one also trains on one device, which no test alone has to answer for.
    return comparison(case)


@pytest.mark.parametrize("case", [pytest.param(x, marks=_marks(x)) for x in EXPECTED])
def test_a_step_sends_what_its_strategy_implies(found, case):
    assert_collectives(found.compiled, EXPECTED[case], mesh=found.mesh)


@pytest.mark.mesh
def test_data_reduces_every_gradient_once(program):
    sent, shapes = program("transformer data=8 30 steps")
    assert elements(sent) == sum(map(math.prod, shapes))


def test_fsdp_gathers_parameters_and_reduces_gradients(program):
    sent, shapes = program("transformer fsdp=8")
    gathered = [c for c in sent if c.kind == "all-gather"]
    # Parameters alone: neither a batch nor logits, and of the stacked layers one at a time.
    stacked = {shape[1:] for shape in shapes if shape[0] == LAYERS}
    of_a_layer = stacked | {(1, *shape) for shape in stacked}
    assert {shape for c in gathered for shape in arrays(c)} <= {*shapes} | of_a_layer
    assert {c.count for c in gathered if c.in_loop} == {LAYERS}
    # Each at most once forward and once backward, and each gradient reduced once.
    size = sum(map(math.prod, shapes))
    assert elements(gathered) <= 2 * size
    assert elements([c for c in sent if c.kind == "all-reduce"]) == size


@pytest.mark.mesh
def test_tensor_reduces_twice_a_layer_each_way(program):
    sent, _ = program("transformer tensor=8")
    for backward in (False, True):
        inside = per_layer(sent, backward=backward)
        residual = [c for c in inside if arrays(c)[0] == (BATCH, LENGTH, EMBED)]
        assert len(residual) == 2
        assert {c.count for c in residual} == {LAYERS}


@pytest.mark.mesh
@pytest.mark.parametrize("model", ["resnet", "unet"])
def test_convolutions_under_fsdp_gather_kernels_alone(program, model):
    sent, shapes = program(f"{model} fsdp=8")
    of_a_layer = {(1, *shape[1:]) for shape in shapes} | {shape[1:] for shape in shapes}
    gathered = {shape for c in sent if c.kind == "all-gather" for shape in arrays(c)}
    assert gathered <= {*shapes} | of_a_layer


MARKED = [pytest.param(case, marks=_marks(str(case)), id=str(case)) for case in CASES]


def test_the_quick_cases_are_there():
    assert {str(case) for case in CASES} >= QUICK | SOAK


@pytest.mark.parametrize("case", MARKED)
def test_equal_to_one_device(compare, case):
    comparison = compare(case)
    assert not comparison.deviations, str(comparison)


def _meshes(cases, *models):
    return {frozenset(case.axes.items()) for case in cases if case.model in models}


def test_the_cases_cover_every_axis_and_every_pair():
    assert {math.prod(case.axes.values()) for case in CASES} == {8}
    assert len(_meshes(CASES, "transformer")) >= 20
    split = [{axis for axis, _ in mesh} for mesh in _meshes(USUAL, "transformer", "moe")]
    # ResNet has neither stages nor tensor, context or expert parallelism of its own.
    assert all({axis} in split for axis in STANDARD_AXES)
    for pair in itertools.combinations(STANDARD_AXES, 2):
        assert any({*pair} <= axes for axes in split), pair
    for model, mesh in (
        ("transformer", {"stage": 2, "fsdp": 2, "tensor": 2}),
        ("transformer", {"data": 2, "context": 2, "tensor": 2}),
        ("moe", {"expert": 4, "fsdp": 2}),
    ):
        assert frozenset(mesh.items()) in _meshes(CASES, model)
    for model in ("transformer", "moe"):
        assert any("x" in case.mesh for case in USUAL if case.model == model)
    assert any((case.model, case.mesh) == ("transformer", "data=2x4") for case in USUAL)


def test_the_cases_cover_every_word():
    covered = {word for case in USUAL for word in case.words.split(", ") if word}
    assert covered == {*WAYS} - {"3 of 14 layers dense", "7 layers", "capacity"}
    assert len({*map(str, CASES)}) == len(CASES)
