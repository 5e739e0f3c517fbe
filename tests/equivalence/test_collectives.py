"""The compiled step holds the collectives that its strategy implies, and no others.

XLA for CPU has no reduce-scatter: there it is an all-reduce whose result is cut.
"""

import math
import re

import jax
import pytest

from shardlib.explain.program import collectives

# Numbers (losses, norms, counts) travel alone or combined; what is told apart is arrays.
_ARRAY = re.compile(r"\w+\[(\d[\d,]*)\]")
LAYERS = 2


@pytest.fixture
def program(run):
    """Returns what the step of a task sends on a mesh, and its parameters."""

    def read(mesh, name="transformer"):
        result = run(name, mesh, 1)
        sent = collectives(result.program, result.mesh)
        return [c for c in sent if arrays(c)], result.first.params

    return read


def arrays(collective):
    """The arrays that a collective carries, as shapes; single numbers left out."""
    found = (_ARRAY.fullmatch(shape) for shape in collective.shapes)
    return [tuple(map(int, match[1].split(","))) for match in found if match]


def kinds(sent):
    return {(c.kind, c.mesh_axes) for c in sent}


def elements(sent):
    return sum(c.count * sum(math.prod(shape) for shape in arrays(c)) for c in sent)


def num_params(params):
    return sum(x.size for x in jax.tree.leaves(params))


def per_layer(sent, *, backward):
    """All-reduces inside of the loop over layers, forward or backward."""
    inside = [c for c in sent if c.in_loop and c.kind == "all-reduce"]
    return [c for c in inside if ("transpose" in c.op_name) is backward]


def test_data_reduces_every_gradient_once(program):
    sent, params = program("data=8")
    assert kinds(sent) == {("all-reduce", ("data",))}
    assert elements(sent) == num_params(params)


def test_fsdp_gathers_parameters_and_reduces_gradients(program):
    sent, params = program("fsdp=8")
    assert kinds(sent) == {("all-gather", ("fsdp",)), ("all-reduce", ("fsdp",))}
    gathered = [c for c in sent if c.kind == "all-gather"]
    whole = {tuple(x.shape) for x in jax.tree.leaves(params)}
    of_a_layer = {shape[1:] for shape in whole if shape[0] == LAYERS}
    # Parameters alone: neither a batch nor logits, and of the stacked layers one at a time.
    assert {shape for c in gathered for shape in arrays(c)} <= whole | of_a_layer
    assert all(c.count == LAYERS for c in gathered if c.in_loop)
    # Each at most once forward and once backward, and each gradient reduced once.
    assert elements(gathered) <= 2 * num_params(params)
    assert elements([c for c in sent if c.kind == "all-reduce"]) == num_params(params)


def test_tensor_reduces_twice_a_layer_each_way(program):
    sent, _ = program("tensor=8")
    assert kinds(sent) == {("all-reduce", ("tensor",))}
    for backward in (False, True):
        inside = per_layer(sent, backward=backward)
        assert len(inside) == 2
        assert {c.count for c in inside} == {LAYERS}


def test_combined_axes_send_what_each_implies(program, transformer):
    sent, params = program("data=2,fsdp=2,tensor=2")
    gathered = [c for c in sent if c.kind == "all-gather"]
    assert {c.mesh_axes for c in gathered} == {("fsdp",)}
    reduced = {c.mesh_axes for c in sent if c.kind == "all-reduce"}
    assert reduced == {("data",), ("fsdp",), ("data", "fsdp"), ("tensor",)}
    assert {c.kind for c in sent} == {"all-gather", "all-reduce"}
    batch, length = transformer.batches[0]["tokens"].shape
    shapes = {shape for c in gathered for shape in arrays(c)}
    assert not {shape for shape in shapes if shape[:2] in {(batch, length), (batch // 2, length)}}
    tensor = [c for c in sent if c.mesh_axes == ("tensor",)]
    assert [len(per_layer(tensor, backward=b)) for b in (False, True)] == [2, 2]
    assert elements(gathered) <= 2 * num_params(params) / 2


def test_resnet_reduces_gradients_and_batch_statistics(program):
    sent, params = program("data=8", "resnet")
    assert kinds(sent) == {("all-reduce", ("data",))}
    kernels = [x.size for x in jax.tree.leaves(params) if x.ndim > 1]
    assert elements([c for c in sent if max(map(len, arrays(c))) > 1]) >= sum(kernels)


def test_resnet_under_fsdp_gathers_kernels_alone(program):
    sent, params = program("fsdp=8", "resnet")
    assert kinds(sent) == {("all-gather", ("fsdp",)), ("all-reduce", ("fsdp",))}
    gathered = {shape for c in sent if c.kind == "all-gather" for shape in arrays(c)}
    assert gathered <= {tuple(x.shape) for x in jax.tree.leaves(params)}
