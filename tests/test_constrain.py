"""The active mesh and rules, and the placement of activations by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.sharding.constrain import active, active_or, constrain, use

RULES = sl.AxisRules(
    params={"embed": "fsdp"},
    activations={"batch": "data+fsdp", "embed": "tensor", "length": None},
)


def mesh(spec="data=2,fsdp=2,tensor=2", **options):
    return sl.make_mesh(spec, **options)


def test_does_nothing_outside_of_use():
    x = jnp.ones((3, 5))
    assert constrain(x, "anything", "at all", "and more") is x
    assert active() is None


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_places_inside_of_jit(axis_types):
    here = mesh(axis_types=axis_types)

    @jax.jit
    def double(x):
        with use(here, RULES):
            return constrain(2 * x, "batch", "length", "embed")

    x = np.arange(4 * 3 * 6, dtype=np.float32).reshape(4, 3, 6)
    with jax.set_mesh(here):
        y = double(x)
    assert y.sharding.is_equivalent_to(
        jax.sharding.NamedSharding(here, P(("data", "fsdp"), None, "tensor")), 3
    )
    np.testing.assert_array_equal(y, 2 * x)


def test_places_eagerly_and_under_vmap_and_grad():
    with use(mesh(), RULES):
        y = constrain(jnp.ones((4, 6)), "batch", "embed")
        assert y.sharding.spec == P(("data", "fsdp"), "tensor")
        z = jax.jit(jax.vmap(lambda row: constrain(row, "batch", "embed")))(jnp.ones((3, 4, 6)))
        assert z.shape == (3, 4, 6)
        gradient = jax.grad(lambda x: constrain(x, "batch", "embed").sum())(jnp.ones((4, 6)))
        np.testing.assert_array_equal(gradient, np.ones((4, 6)))


@pytest.mark.parametrize(
    ("axes", "shape", "parts"),
    [
        (("batch",), (4, 6), ["('batch',) name 1 dim", "has 2.\n  Give one name, or None"]),
        (
            ("batch", "embd"),
            (4, 6),
            ["'embd' (dim 1", "'embed'?\n  Add one, for example activations={'embd': None}"],
        ),
        (
            ("batch", "embed"),
            (6, 5),
            [
                "data+fsdp=4 does not divide 6.\n",
                "allow replication: activations={'batch': ['data+fsdp', None]}.\n",
                "tensor=2 does not divide 5.\n",
                "allow replication: activations={'embed': ['tensor', None]}.",
            ],
        ),
    ],
)
def test_refuses(axes, shape, parts):
    with use(mesh(), RULES), pytest.raises(sl.ShardlibError) as caught:
        jax.jit(lambda x: constrain(x, *axes))(jnp.ones(shape))
    assert [part for part in parts if part not in str(caught.value)] == []


def test_use_nests_and_ends():
    outer, inner = mesh("data=8"), mesh("data=4,fsdp=2")
    with use(outer, RULES) as scope:
        assert scope is active()
        with use(inner, sl.rules.FSDP):
            assert active().mesh is inner
        assert active() is scope
        with pytest.raises(ZeroDivisionError), use(inner, RULES):
            raise ZeroDivisionError
        assert active() is scope
    assert active() is None


def test_use_checks_the_rules():
    rules = sl.AxisRules(params={"embed": "fdsp"}, activations={"batch": "dat"})
    with pytest.raises(sl.ShardlibError) as caught, use(mesh("data=8"), rules):
        raise AssertionError("entered")
    for part in ("'embed' -> 'fdsp' (params)", "'batch' -> 'dat' (activations)", "'data'?"):
        assert part in str(caught.value)
    assert active() is None


def test_what_is_given_comes_before_what_is_active():
    given = mesh("fsdp=8")
    with use(mesh("data=8"), RULES):
        assert active_or(given, None).mesh is given
        assert active_or(given, None).rules is RULES
        assert active_or(None, sl.rules.FSDP).rules is sl.rules.FSDP


@pytest.mark.parametrize(
    ("here", "rules", "missing"),
    [(False, True, "mesh"), (True, False, "rules"), (False, False, "mesh and rules")],
)
def test_asks_for_what_is_missing(here, rules, missing):
    fault = rf"no active {missing}, which shardlib needs .*\n  Call this inside `with sl.use"
    with pytest.raises(sl.ShardlibError, match=fault):
        active_or(mesh() if here else None, RULES if rules else None)


@pytest.mark.parametrize(
    ("mesh", "rules", "fault"),
    [
        ("data=8", sl.rules.STANDARD, r"mesh is 'data=8', not a jax.*\n  Make one, as in sl.make"),
        (None, "zero1", r"rules are 'zero1', not an AxisRules\.\n  Give a preset, such as sl"),
    ],
)
def test_names_in_place_of_a_mesh_and_rules(mesh, rules, fault):
    mesh = mesh or sl.make_mesh("data=8")
    with pytest.raises(sl.ShardlibError, match=fault), sl.use(mesh, rules):
        pass
