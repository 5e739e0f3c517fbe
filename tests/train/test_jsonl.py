"""Lines of JSON, whatever numbers are in them."""

import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.log.durable_log import decode, encode

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FLOATS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc", min_size=1), inner),
    max_leaves=10,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1), VALUES))
def test_every_value_comes_back(row):
    line = encode(row)
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(line, parse_constant=refuse)
    # NaN is no equal of its own, and says who it is by its text.
    assert repr(decode(line)) == repr(row)


def test_nonfinite_numbers_within_lists_are_named_by_their_path():
    row = {"samples": [[1, 2], [3, math.inf]], "loss": {"worst": jnp.float32(math.nan)}}
    assert encode(row) == (
        b'{"samples": [[1, 2], [3, null]], "loss": {"worst": null}, '
        b'"nonfinite": {"samples/1/1": "inf", "loss/worst": "nan"}}\n'
    )


def test_arrays_of_one_number_are_numbers_and_the_rest_is_text():
    row = {
        "a": np.int64(3), "b": jnp.float32(0.5), "c": jnp.int32(4), "d": pathlib.Path("x"),
        "e": np.float64(2.5), "f": np.array(7),
    }  # fmt: skip
    assert decode(encode(row)) == {"a": 3, "b": 0.5, "c": 4, "d": "x", "e": 2.5, "f": 7}
    assert decode(encode({**row, "nan": math.nan}))["c"] == 4
