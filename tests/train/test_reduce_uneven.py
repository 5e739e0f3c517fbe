"""How many microbatches a group takes, and where its rows lie."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.errors import ModelError
from shardlib.losses.microbatch import split
from shardlib.train.reduce.uneven import arrange_batch, balance


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3))
def test_every_group_finds_its_rows_in_its_shard(counts, per_microbatch):
    total, most = sum(counts) * per_microbatch, max(counts)
    batch = np.arange(total)
    arranged = arrange_batch({"x": batch}, counts)["x"]
    shards = arranged.reshape(len(counts), most * per_microbatch)
    found, first = [], 0
    for shard, count in zip(shards, counts, strict=True):
        own = batch[first : first + count * per_microbatch]
        parts = np.asarray(split(shard, most))[:count]
        # The same microbatches as of a group that has these rows only.
        np.testing.assert_array_equal(parts, split(own, count))
        found += parts.reshape(-1).tolist()
        first += len(own)
    assert sorted(found) == batch.tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=3), st.integers(0, 6))
def test_no_other_counts_end_earlier(seconds, more):
    total = len(seconds) + more
    counts = balance(seconds, total)
    assert sum(counts) == total
    assert min(counts) >= 1
    last = max(np.multiply(counts, seconds))
    others = itertools.product(range(1, total + 1), repeat=len(seconds))
    best = min(max(np.multiply(other, seconds)) for other in others if sum(other) == total)
    assert last == pytest.approx(best, rel=1e-12)


def test_times_that_give_no_balance():
    with pytest.raises(ModelError, match=r"1 microbatches are too few for 2 groups.*\n  Use 2"):
        balance((1.0, 2.0), 1)
    with pytest.raises(ModelError, match=r"1.0, 0.0 seconds .* positive and finite.\n  Measure"):
        balance((1.0, 0.0), 4)
