"""Devices along mesh axes that cut the batch, and no parameter, serve sequences of their own."""

import dataclasses

import jax
import numpy as np
import pytest
from small_decoder import made
from test_engine import prompts

import shardlib as sl
from shardlib.engine import Engine, Sampling
from shardlib.explain import read_program

SAMPLINGS = [
    Sampling(max_tokens=12 + n, temperature=0.6 * (n % 2), seed=n, logprobs=2) for n in range(12)
]


def on(mesh, **options):
    served = made(**options)
    devices = jax.devices()[: int(np.prod([int(axis.split("=")[1]) for axis in mesh.split(",")]))]
    mesh = sl.make_mesh(mesh, devices=devices)
    model = sl.shard(served.model, mesh, sl.rules.STANDARD)
    with sl.use(mesh, sl.rules.STANDARD) as scope:
        return dataclasses.replace(served, model=model, scope=scope)


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("mesh", "groups"),
    [("data=2,tensor=2", 2), ("data=4", 4), ("fsdp=2,data=2", 2), ("tensor=4", 1)],
)
def test_answers_are_those_of_one_device(served, mesh, groups):
    asked = prompts(12, seed=1)
    right = Engine(served, context=128).generate(asked, SAMPLINGS)
    engine = Engine(on(mesh), context=128, slots=8, pages=20 * groups, chunk=32, speculate=3)
    found = engine.generate(asked, SAMPLINGS)
    assert [answer.ids for answer in found] == [answer.ids for answer in right]
    for ours, theirs in zip(found, right, strict=True):
        np.testing.assert_allclose(
            [token.logprob for token in ours.tokens],
            [token.logprob for token in theirs.tokens],
            atol=1e-5,
        )
    stats = engine.stats()
    assert engine._sizes.groups == groups
    assert (stats.pages, stats.pages_used, stats.num_running) == (20 * groups, 0, 0)
    assert stats.num_compiled <= 3


@pytest.mark.mesh
def test_groups_work_side_by_side(served):
    """Each group reads its own rows and pages, and no key crosses to another group."""
    engine = Engine(on("data=4"), context=64, slots=8, chunk=64)
    requests = [engine.submit([n, n + 1], max_tokens=8) for n in range(8)]
    engine.step()
    assert sorted(request.sequence.group for request in requests) == [0, 0, 1, 1, 2, 2, 3, 3]
    step = engine.scheduler.plan()
    lowered = engine._programs.program().lower(
        engine._params, engine._state, engine._arranger.arrays(step)
    )
    compiled = lowered.compile()
    key = engine._state.pages[0].key
    assert key.addressable_shards[0].data.shape == (2, 1, *key.shape[2:])
    # What the host reads leaves its group, and a bit of whether anything is drawn or ranked.
    _, result = lowered.out_info
    most = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(result)) + 64
    report = read_program(compiled, {"data": 4})
    assert sum(one.bytes * one.count for one in report.collectives) <= most, report
