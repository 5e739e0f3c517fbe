"""Specs that do not fit what they are of raise, and name it: nothing is cut off or left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.errors import PartitionError, RuleError

ODD, EVEN = np.ones((7, 8), np.float32), np.ones((8, 8), np.float32)


def call(mesh, *args, specs, out=None, fn=lambda x, *_: jax.tree.map(lambda v: v * 2, x)):
    with sl.use(mesh, sl.rules.STANDARD):
        return jax.jit(sl.partitioned(fn, specs, out))(*args)


@pytest.mark.parametrize(
    ("x", "spec", "says"),
    [
        (ODD, P("data"), r"P\('data',\): 2 devices do not divide dim 0 of \(7, 8\)"),
        (EVEN, P("dato"), r"names 'dato', the mesh has data, .* Did you mean 'data'\?"),
        (EVEN, P("data", "data"), "names 'data' twice"),
        (EVEN, P(None, None, "data"), r"shape \(8, 8\), which has fewer dims"),
        (EVEN, P(P.UNCONSTRAINED), "leaves a dim open"),
        (EVEN, "data", "is 'data', not a PartitionSpec or None"),
    ],
)
def test_what_does_not_fit_is_named(mesh, x, spec, says):
    for name, options in (("in_specs[0]", {"specs": (spec,)}), ("out_specs", {"out": spec})):
        with pytest.raises(RuleError, match=says) as error:
            call(mesh, x, **{"specs": (None,), **options})
        assert str(error.value).startswith(f"{name} ")
        assert "\n  Name axes of the mesh" in str(error.value)


def test_all_that_do_not_fit_are_named_by_path(mesh):
    tree = {"kernel": ODD, "bias": ODD[0], "rows": ODD}
    with pytest.raises(RuleError) as error:
        call(mesh, tree, specs=({"kernel": P("data"), "bias": P("tensor"), "rows": P("fsdp")},))
    lines = str(error.value).splitlines()
    assert [line.partition(" is ")[0] for line in lines[:-1]] == [
        "in_specs[0] of 'kernel'",
        "in_specs[0] of 'rows'",
    ]


@pytest.mark.parametrize("specs", [(P(),), P("data"), None])
def test_each_argument_has_an_entry(mesh, specs):
    with pytest.raises(RuleError, match=r"(?s)number of arguments is 2.*Give a tuple"):
        call(mesh, EVEN, EVEN, specs=specs)


def test_a_tree_of_another_structure(mesh):
    with pytest.raises(RuleError, match=r"(?s)in_specs\[0\] does not fit .*'a'.*Give one Part"):
        call(mesh, {"a": EVEN}, specs=({"b": P("data")},))


def test_numbers_and_empty_parts_are_arguments_too(mesh):
    found = call(
        mesh,
        {"a": EVEN, "b": None},
        2.0,
        specs=({"a": P("data"), "b": None}, None),
        fn=lambda tree, factor: tree["a"] * factor,
    )
    np.testing.assert_array_equal(found, EVEN * 2)
    assert found.sharding.spec == P("data")


def test_a_constraint_that_devices_do_not_divide(mesh):
    def constrained(x):
        return lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("data")))

    with pytest.raises(PartitionError, match=r"constraint of an array \(7, 8\).*test_specs.py"):
        call(mesh, jnp.asarray(ODD), specs=(None,), fn=constrained)
