"""Tables read both ways: their tensors are views of ours, joined, counted and split into shards."""

import string

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.errors import ModelError
from shardlib.hf.tensor_table import Parameter, TensorTable, rows
from shardlib.hf.tiled_copy import copy


def written(layout, params):
    def fill(view, path, at):
        view[...] = params[path][at]

    specs = {name: (shape, params[path].dtype) for name, shape, path in layout.tensors()}
    return {name: values.copy() for name, values in layout.write(fill, specs)}


def read(layout, path, tensors, index=None):
    whole = tuple(slice(0, size) for size in layout.params[path].shape)
    return layout.read(path, index or whole, tensors.__getitem__)


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_a_transposed_projection_with_heads():
    params = {"query": Parameter(("layers", "embed", "heads", "head_dim"), (2, 3, 4, 5))}
    layout = TensorTable(rows("query  h.{layers}.q.weight  heads*head_dim embed"), params)
    ours = numbers(2, 3, 4, 5)
    theirs = written(layout, {"query": ours})
    assert list(theirs) == ["h.0.q.weight", "h.1.q.weight"]
    np.testing.assert_array_equal(theirs["h.1.q.weight"], ours[1].reshape(3, 20).T)
    np.testing.assert_array_equal(read(layout, "query", theirs), ours)


@pytest.mark.parametrize(
    ("dim", "joined"),
    [
        ("+heads*dim", lambda a, b: np.concatenate([a.reshape(6), b.reshape(6)])),
        ("heads*+dim", lambda a, b: np.concatenate([a, b], 1).reshape(12)),
        ("heads*dim*+", lambda a, b: np.stack([a, b], -1).reshape(12)),
    ],
    ids=["one after the other", "within each head", "alternating"],
)
def test_parts_of_one_tensor(dim, joined):
    parameter = Parameter(("heads", "dim"), (2, 3))
    layout = TensorTable(rows(f"a  w  {dim}\nb  w  {dim}"), {"a": parameter, "b": parameter})
    ours = {"a": numbers(2, 3), "b": -numbers(2, 3)}
    theirs = written(layout, ours)
    np.testing.assert_array_equal(theirs["w"], joined(ours["a"], ours["b"]))
    for path in ours:
        np.testing.assert_array_equal(read(layout, path, theirs), ours[path])


def test_parts_of_unequal_sizes_and_layers_that_are_numbered_on():
    params = {
        "q": Parameter(("layers", "heads", "dim"), (2, 4, 3)),
        "k": Parameter(("layers", "kv", "dim"), (2, 2, 3)),
    }
    layout = TensorTable(rows("q  h.{layers+5}  +heads*dim\nk  h.{layers+5}  +kv*dim"), params)
    ours = {"q": numbers(2, 4, 3), "k": -numbers(2, 2, 3)}
    theirs = written(layout, ours)
    assert {name: x.shape for name, x in theirs.items()} == {"h.5": (18,), "h.6": (18,)}
    assert {name: shape for name, shape, _ in layout.tensors()} == {
        "h.5": (18,),
        "h.6": (18,),
    }
    np.testing.assert_array_equal(theirs["h.6"][12:], ours["k"][1].reshape(6))
    np.testing.assert_array_equal(read(layout, "k", theirs), ours["k"])


@st.composite
def tables(draw):
    """A parameter with counted axes, and their dims: any product of any order of the others."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    axes = tuple(string.ascii_lowercase[: len(sizes)])
    num_counted = draw(st.integers(0, len(axes) - 1))
    order = draw(st.permutations(axes[num_counted:]))
    cuts = [draw(st.booleans()) for _ in order[1:]]
    dims = order[0] + "".join(
        (" " if cut else "*") + axis for cut, axis in zip(cuts, order[1:], strict=True)
    )
    name = "w" + "".join(f".{{{axis}}}" for axis in axes[:num_counted])
    return Parameter(axes, tuple(sizes)), f"p  {name}  {dims}"


@settings(deadline=None)
@given(tables(), st.data())
def test_any_shard_of_any_table_is_a_slice_of_the_whole(table, data):
    parameter, text = table
    layout = TensorTable(rows(text), {"p": parameter})
    ours = numbers(*parameter.shape)
    theirs = written(layout, {"p": ours})
    assert {name: x.shape for name, x in theirs.items()} == {
        name: shape for name, shape, _ in layout.tensors()
    }
    index = []
    for size in parameter.shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, size))))
    shard = read(layout, "p", theirs, tuple(index))
    np.testing.assert_array_equal(shard, ours[tuple(index)])


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 7, 300]), max_size=4).filter(lambda n: np.prod(n) < 10**6),
    st.sampled_from([np.uint8, ml_dtypes.bfloat16, np.float32, np.complex128]),
    st.data(),
)
def test_copies_of_transposed_arrays(shape, dtype, data):
    orders = [data.draw(st.permutations(range(len(shape)))) for _ in range(2)]
    out, values = (
        np.zeros([shape[dim] for dim in order], dtype).transpose(np.argsort(order).astype(int))
        for order in orders
    )
    values[...] = np.random.default_rng(0).integers(0, 100, shape)
    copy(out, values)
    np.testing.assert_array_equal(out, values)


def test_a_parameter_without_a_row_is_refused():
    params = {"a": Parameter(("x",), (2,)), "b": Parameter(("x",), (2,))}
    with pytest.raises(ModelError, match=r"no row for b\.\n  Add"):
        TensorTable(rows("a  w  x\nc  v  x"), params)
