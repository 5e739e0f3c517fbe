"""The stages of ZeRO are rules: what each device holds, and the same update."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl

BATCH = {
    "x": np.random.default_rng(0).standard_normal((16, 32), dtype=np.float32),
    "y": np.random.default_rng(1).standard_normal((16, 32), dtype=np.float32),
}
KERNELS = 2 * 32 * 64 * 4
NAMED = nnx.initializers.lecun_normal()


class MLP(nnx.Module):
    def __init__(self, rngs):
        def kernel(*names):
            return nnx.with_partitioning(NAMED, names)

        self.up = nnx.Linear(32, 64, use_bias=False, kernel_init=kernel("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(
            64, 32, use_bias=False, kernel_init=kernel("mlp", "embed"), rngs=rngs
        )

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


def loss_fn(model, batch, rng):
    return jax.numpy.mean((model(batch["x"]) - batch["y"]) ** 2)


def reports(preset, mesh):
    """The report of a state, and of the step of it."""
    with sl.use(sl.make_mesh(mesh), sl.rules.preset(preset)):
        optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
        state = sl.abstract_state(MLP, optimizer)
        step = sl.make_train_step(loss_fn, microbatches=2)
    return sl.explain(state), sl.explain(step, state, BATCH)


@pytest.mark.mesh
def test_stages_split_more_and_more():
    held = {name: reports(name, "fsdp=8")[0] for name in ("zero1", "zero2", "standard")}
    params = {name: report.bytes_per_device("params") for name, report in held.items()}
    assert params == {"zero1": KERNELS, "zero2": KERNELS, "standard": KERNELS // 8}
    moments = {name: report.bytes_per_device("opt_state") for name, report in held.items()}
    assert set(moments.values()) == {KERNELS // 8}


def test_stage_one_and_two_gather_parameters_once_a_step():
    for preset in ("zero1", "zero2"):
        _, report = reports(preset, "fsdp=8")
        gathered = [c for c in report.collectives if c.kind == "all-gather"]
        assert sum(c.total_bytes for c in gathered) == KERNELS
        assert not any(c.in_loop for c in gathered)


def test_stage_two_reduces_across_groups_only_what_a_device_keeps():
    """Groups of 4 that split the state, and sum once for both microbatches."""

    def reduced(preset):
        _, report = reports(preset, "data=2,fsdp=4")
        # The norm and the loss may travel along: a few bytes.
        totals = report.totals(at_least_bytes=1024)
        found = {t.mesh_axes: t.bytes // 1024 * 1024 for t in totals}
        return {axes: n for axes, n in found.items() if "data" in axes}

    # Once a step where the traced loss proves that this is equal, else in each of two microbatches.
    assert reduced("zero1") in ({("data",): KERNELS}, {("data", "fsdp"): 2 * KERNELS})
    assert reduced("zero2") in ({("data",): KERNELS // 4}, {("data",): 2 * KERNELS // 4})


def test_an_override_reaches_the_tables_that_agreed():
    rules = sl.rules.ZERO1.override(mlp=None, embed=["fsdp", None], paths={"x": ("embed",)})
    assert dict(rules.params)["mlp"] == ((),)
    assert dict(rules.of("opt_state").params)["mlp"] == ((),)
    assert dict(rules.params)["embed"] == (("fsdp",), ())
    # Stage 1 replicates what the optimizer state splits: only the parameters' own rule changes.
    assert dict(rules.of("opt_state").params)["embed"] == (("fsdp",),)
    assert rules.of("gradients") is rules
    assert rules.of("opt_state").paths == (("x", ("embed",)),)
