"""Steps of models that know nothing of shardlib, compiled for TPUs and GPUs that are not there.

Each program is read twice: by the check of shardlib, and by a reader of these tests that shares
nothing with it and looks at the sums of every gradient.
"""

import dataclasses
import math
from typing import Any

import jax
import optax
import pytest
from gradient_sums import Reader

import shardlib as sl
from shardlib.explain.aot.topology import devices_of
from shardlib.explain.wrong_numbers import wrong_numbers
from shardlib.hardware import parse_cluster
from shardlib.paths import named_leaves
from unannotated import CASES

BATCH = ("data", "fsdp")
CLUSTERS = {
    "v5e-8": ("v5e:2x4", "data=2,fsdp=2,tensor=2"),
    "v5p-128": ("v5p:4x4x4", "data=4,fsdp=8,tensor=2"),
    "8xh100": (None, "data=2,fsdp=2,tensor=2"),
}
ROWS = 4
"""Of the batch, on each device."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step compiled ahead of time, and what it was made from."""

    compiled: Any
    jaxpr: Any
    mesh: Any
    state: Any

    @property
    def faults(self):
        return wrong_numbers(self.compiled, self.mesh, self.jaxpr)

    @property
    def text(self):
        return self.compiled.as_text()

    def sums(self):
        """Returns the axes of the sums of each gradient, by path."""
        reader = Reader(self.text, self.mesh.shape)
        return {path: reader.sums(output) for path, output in reader.moments().items()}


@pytest.fixture
def mesh_on(request):
    """`mesh_on("v5e-8")` returns a mesh of devices to compile for ahead of time."""

    def mesh(cluster):
        topology, sizes = CLUSTERS[cluster]
        if topology is None:
            pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
            return sl.make_mesh(sizes, devices=devices_of(parse_cluster(cluster)))
        return sl.make_mesh(sizes, devices=request.getfixturevalue("tpu_devices")(topology))

    return mesh


def compile_step(name, mesh, **options):
    case = CASES[name]
    with sl.use(mesh, case.rules):
        state = sl.abstract_state(case.model, optax.adamw(1e-3), inputs=case.inputs)
    step = sl.make_train_step(case.loss, **options)
    host = case.batch(ROWS * math.prod(mesh.shape[axis] for axis in BATCH))
    batch = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in host.items()}
    traced = step.program(state, batch).trace(state, batch)
    return Compiled(traced.lower().compile(), traced.jaxpr, mesh, state)


@pytest.mark.aot
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nothing_is_summed_twice_or_permuted(cluster, name, mesh_on):
    step = compile_step(name, mesh_on(cluster))
    assert "/shard_map/" in step.text  # placed by shardlib
    assert step.faults == ()
    assert "collective-permute" not in step.text
    # One sum over each axis of the batch, and over nothing else: idle axes hold copies.
    assert step.sums() == {path: {BATCH} for path in named_leaves(step.state.params)}


def test_both_readers_find_permuted_rows(mesh_on):
    """Fault A: XLA brings the rows of the batch into another order, and not back."""
    step = compile_step("dense", mesh_on("v5e-8"), constrain="user")
    assert {fault.code for fault in step.faults} == {"SL205"}
    assert "collective-permute" in step.text


@pytest.mark.mesh
def test_both_readers_find_a_sum_over_copies(mesh_on):
    """Fault B: XLA sums the gradient of a depthwise kernel over an axis that holds copies."""
    step = compile_step("convolutions", mesh_on("v5e-8"), constrain="user")
    assert [fault.code for fault in step.faults] == ["SL206"]
    sums = step.sums()
    assert sums.pop("depthwise/kernel") == {(*BATCH, "tensor")}
    assert sums.pop("head/kernel") == {BATCH}
