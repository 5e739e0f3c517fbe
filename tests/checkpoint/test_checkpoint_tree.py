"""Names of leaves: any pytree to plain dicts and back, and what cannot be named."""

import collections
import dataclasses
import typing

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import traverse_util
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.checkpoint.tree import check_leaves, flatten
from shardlib.errors import CheckpointError


class Pair(typing.NamedTuple):
    first: typing.Any
    second: typing.Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    content: typing.Any
    label: str = dataclasses.field(default="", metadata={"static": True})


KEYS = st.text(
    st.characters(exclude_categories=("C", "Z"), exclude_characters="./"), min_size=1, max_size=6
)
LEAVES = st.integers(-(2**31), 2**31).map(float)


def _containers(children):
    return st.one_of(
        st.dictionaries(KEYS, children, min_size=1, max_size=4),
        st.lists(children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3).map(tuple),
        st.builds(Pair, children, st.none() | children),
        st.builds(Box, children),
        st.just(optax.EmptyState()),
        st.none(),
    )


TREES = st.dictionaries(KEYS, st.recursive(LEAVES, _containers, max_leaves=12), max_size=4)


@given(TREES)
@settings(max_examples=200, deadline=None)
def test_round_trip_of_any_tree(tree):
    leaves = flatten(tree)
    assert list(leaves.values()) == jax.tree.leaves(tree)
    assert (
        traverse_util.flatten_dict(traverse_util.unflatten_dict(leaves, sep="/"), sep="/") == leaves
    )


@given(TREES, st.sampled_from("./"), st.text(max_size=3))
@settings(max_examples=50, deadline=None)
def test_a_separator_in_a_key_is_refused_wherever_it_is(tree, mark, text):
    for faulty in ({**tree, text + mark: 1.0}, {"outer": [tree, {mark + text: 1.0}]}):
        with pytest.raises(CheckpointError, match="keys of the tree cannot be stored"):
            flatten(faulty)


def test_all_keys_that_cannot_be_stored_are_listed():
    tree = {
        "a.b": 1,
        "a": {"b": 1, "c/d": 2, "": 3, "e\n": 4},
        "m": collections.OrderedDict([(1, 5), ("1", 6)]),
        "n": collections.OrderedDict([(1, 5), ("1", {"x": 6})]),
    }
    with pytest.raises(CheckpointError, match=r"(?s)an empty key below a.*'c/d' below a.*Rename"):
        flatten(tree)


def test_leaves_that_are_no_numbers_are_listed():
    leaves = {
        "a": jnp.ones(2),
        "b": "text",
        "c": object(),
        "d": jnp.zeros(1, jnp.uint4),
        "e": 2**70,
    }
    with pytest.raises(CheckpointError) as caught:
        check_leaves(leaves)
    found = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]]
    assert found == ["b", "c", "d", "e"]
