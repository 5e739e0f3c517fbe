"""Rows in another order, read once each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.data import ArrangedSource, TextData, open_data


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(" ".join(str(n) for n in range(4000)))
    config = TextData(path=str(path), tokenizer="bytes", sequence_length=16, eval_fraction=0.0)
    return open_data(config, global_batch=8, seed=0, split="train")


class Counting:
    """A source that remembers what was read of it."""

    def __init__(self, source):
        self.source, self.ranges = source, []

    def __getattr__(self, name):
        return getattr(self.source, name)

    def read(self, step, start, stop):
        self.ranges.append((start, stop))
        return self.source.read(step, start, stop)


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.integers(0, 7), min_size=1, max_size=16), data=st.data())
def test_row_r_is_row_rows_r(source, rows, data):
    counting = Counting(source)
    arranged = ArrangedSource(counting, np.array(rows))
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    found, whole = arranged.read(3, start, stop), source.read(3, 0, 8)
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array[rows[start:stop]])
    read = [row for a, b in counting.ranges for row in range(a, b)]
    assert read == sorted(set(rows[start:stop]))


def test_it_stands_for_its_source(source):
    arranged = ArrangedSource(source, np.arange(12) % 8)
    assert arranged.global_batch == 12
    assert arranged.element_spec()["tokens"].shape == (12, 16)
    assert (arranged.spec, arranged.fingerprint) == (source.spec, source.fingerprint)
    assert arranged.num_steps == source.num_steps
