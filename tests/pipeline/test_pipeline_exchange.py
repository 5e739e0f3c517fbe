"""Chunks travel between where they are stored and where they run, each by the shortest way."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardlib as sl
from shardlib.sharding.manual import manual
from shardlib.train.pipeline.exchange import rounds, to_run, to_store


@pytest.mark.parametrize(
    ("stages", "chunks"), list(itertools.product((2, 3, 4, 6, 8), (2, 3, 4, 6)))
)
def test_every_chunk_reaches_its_stage_in_as_many_rounds_as_chunks(stages, chunks):
    held = {}
    for stored, run, pairs in rounds(stages, chunks):
        assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == list(range(stages))
        for source, target in pairs:
            held[target, int(run[target])] = chunks * source + int(stored[source])
    assert len(rounds(stages, chunks)) == chunks
    assert held == {(k % stages, k // stages): k for k in range(stages * chunks)}


@pytest.mark.parametrize(("stages", "chunks"), [(4, 2), (2, 4)])
def test_there_and_back(stages, chunks):
    """Two layers in a chunk; the numbers are those of the layers."""
    layers = np.arange(2 * stages * chunks, dtype=np.float32)[:, None]
    over = PartitionSpec("stage")

    def both(leaf):
        there = to_run({"x": leaf}, "stage", stages, chunks)
        return there["x"], to_store(there, "stage", stages, chunks)["x"]

    mesh = sl.make_mesh(f"stage={stages}", devices=jax.devices()[:stages])
    with sl.use(mesh, sl.rules.STANDARD):
        there, back = jax.jit(manual(both, ("stage",), (over,), (over, over)))(layers)
    chunk = np.arange(stages * chunks).reshape(chunks, stages).T.reshape(-1)
    np.testing.assert_array_equal(there[:, 0], (2 * chunk[:, None] + np.arange(2)).reshape(-1))
    np.testing.assert_array_equal(back, layers)
