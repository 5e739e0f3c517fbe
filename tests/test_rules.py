import math

import jax
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib import rules as presets
from shardlib.errors import RuleError
from shardlib.functional import functional
from shardlib.mesh import abstract_mesh
from shardlib.rules import FSDP, STANDARD, AxisRules
from shardlib.sharding.partition import place

MESH = {"data": 2, "fsdp": 4, "tensor": 2}


def rules(**params):
    return AxisRules(params=params, activations={})


def spec(table, axes, shape, mesh=MESH):
    return table.spec(axes, shape, mesh)


def test_a_rule_is_an_axis_a_product_none_or_alternatives():
    table = rules(a="fsdp", b=("data", "tensor"), c="data+tensor", d=None, e=["tensor", None])
    assert spec(table, ("a", "b"), (8, 8)) == P("fsdp", ("data", "tensor"))
    assert spec(table, ("c", "d"), (8, 8)) == P(("data", "tensor"), None)
    assert spec(table, ("e",), (8,)) == P("tensor")
    assert spec(table, ("e",), (7,)) == P(None)


def test_axes_are_taken_in_order_of_the_table_not_of_the_dims():
    table = rules(second="fsdp", first=["fsdp", "tensor"])
    assert spec(table, ("first", "second"), (8, 8)) == P("tensor", "fsdp")


def test_a_mesh_axis_of_size_one_shards_nothing_and_yields_to_the_next_alternative():
    table = rules(a=["tensor", "fsdp"], b="expert", c="context+data")
    mesh = {"fsdp": 4, "tensor": 1, "data": 2}
    assert table.spec(("a", "b", "c"), (8, 8, 8), mesh) == P("fsdp", None, "data")


def test_an_absent_alternative_does_not_hide_one_that_does_not_divide():
    with pytest.raises(RuleError, match="fsdp=4 does not divide 6; context has size 1"):
        spec(rules(embed=["fsdp", "context"]), ("embed",), (6,))
    assert spec(rules(embed=["fsdp", "context", None]), ("embed",), (6,)) == P(None)


def test_refused_alternatives_are_kept_with_the_reason():
    table = rules(a="fsdp", b=["fsdp", "tensor", None])
    choice = table.resolve(("a", "b"), (8, 7), MESH).choices[1]
    assert choice.mesh_axes == ()
    assert [r.reason for r in choice.refused] == [
        "mesh axis 'fsdp' already shards dim 0",
        "tensor=2 does not divide 7",
    ]


STAGES = {"stage": 4, "fsdp": 2, "tensor": 2}


def test_stage_shards_another_dim_where_it_does_not_divide_the_layers():
    axes = ("layers", "embed", "mlp")
    found = STANDARD.resolve(axes, (6, 16, 32), STAGES)
    assert found.spec == P(None, "fsdp", ("tensor", "stage"))
    assert found.choices[0].moved_to == 2
    assert not found.choices[0].fell_back
    assert spec(STANDARD, axes, (6, 16, 12), STAGES) == P(None, ("fsdp", "stage"), "tensor")
    assert spec(STANDARD, axes, (8, 16, 32), STAGES) == P("stage", "fsdp", "tensor")
    # A small parameter is whole; no list of alternatives asks for another dim.
    assert spec(STANDARD, ("layers", "norm"), (6, 6), STAGES) == P(None, None)
    listed = STANDARD.override(layers=["stage", None])
    assert spec(listed, axes, (6, 16, 32), STAGES) == P(None, "fsdp", "tensor")


@pytest.mark.parametrize("shape", [(3, 16), (6, 2**14 + 1)], ids=["too few layers", "no dim fits"])
def test_layers_that_stage_cannot_cut_are_refused(shape):
    with pytest.raises(RuleError, match=f"'layers' .*stage=4 does not divide {shape[0]}"):
        spec(STANDARD, ("layers", "norm"), shape, STAGES)


def test_every_fault_of_a_tensor_is_told_at_once():
    fault = r"'embed' .*fsdp=4 does not divide 6.\n  Change .*\nlogical axis 'mpl' .*'mlp'\?\n  Add"
    with pytest.raises(RuleError, match=fault):
        spec(rules(embed="fsdp", mlp="tensor"), ("embed", "mpl"), (6, 8))


def test_a_misspelt_mesh_axis_is_refused_before_any_tensor():
    mesh = sl.make_mesh("data=2,fsdp=4")
    fault = r"'mlp' -> 'tenser' .* does not exist. Did you mean 'tensor'\?\n  Name .*\(data, fsdp"
    with pytest.raises(RuleError, match=fault), sl.use(mesh, STANDARD.override(mlp="tenser")):
        pass


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (3, "is 3, which is not a mesh axis"),
        (("x", "x"), r"is \('x', 'x'\), which names a mesh axis twice"),
        ([], "has no alternatives"),
    ],
)
def test_malformed_rules(value, fault):
    with pytest.raises(RuleError, match=rf"the rule for 'a' \(params\) {fault}"):
        rules(a=value)


def test_override_changes_one_table_and_keeps_the_order():
    changed = STANDARD.override(
        embed=None, activations={"embed": "tensor"}, paths={"**/w": ("mlp",)}
    )
    assert changed.spec(("embed",), (8,), MESH) == P(None)
    assert changed.spec(("embed",), (8,), MESH, "activations") == P("tensor")
    assert [name for name, _ in changed.params] == [name for name, _ in STANDARD.params]
    assert changed.paths == (("**/w", ("mlp",)),)
    assert STANDARD.override() == STANDARD
    assert hash(STANDARD.override()) == hash(STANDARD)


def test_presets_have_names():
    assert presets.preset("FSDP") is FSDP
    with pytest.raises(RuleError, match=r"no rules are called 'fdsp'. Did you mean 'fsdp'\?"):
        presets.preset("fdsp")


def test_standard_places_a_transformer_as_megatron_and_zero_do():
    assert STANDARD.spec(("vocab", "embed"), (64, 8), MESH) == P("tensor", "fsdp")
    assert STANDARD.spec(("layers", "embed", "mlp"), (3, 8, 8), MESH) == P(None, "fsdp", "tensor")
    assert STANDARD.spec(("batch", "length", "embed"), (8, 4, 8), MESH, "activations") == P(
        ("data", "fsdp"), None, None
    )
    assert STANDARD.spec(("embed", "kv_heads", "head_dim"), (8, 1, 4), MESH) == P(
        "fsdp", None, None
    )


_AXES = ("data", "fsdp", "tensor", "context")
_alternative = st.one_of(
    st.none(), st.lists(st.sampled_from(_AXES), min_size=1, max_size=2, unique=True).map(tuple)
)
_tables = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(_alternative, min_size=1, max_size=3), min_size=1
)
_meshes = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 4]) for axis in _AXES})


@st.composite
def _tensors(draw, names):
    axes = draw(st.lists(st.sampled_from([*names, None]), max_size=4))
    return tuple(axes), tuple(draw(st.sampled_from([1, 2, 3, 4, 8, 12])) for _ in axes)


def _flat(partition_spec):
    return [
        name
        for entry in partition_spec
        if entry is not None
        for name in ((entry,) if isinstance(entry, str) else entry)
    ]


@given(data=st.data(), table=_tables, mesh=_meshes)
def test_no_mesh_axis_twice_and_every_dim_divides(data, table, mesh):
    axes, shape = data.draw(_tensors(list(table)))
    resolution = AxisRules(params=table, activations={}).resolve(axes, shape, mesh)
    names = _flat(resolution.spec)
    assert len(names) == len(set(names))
    assert all(mesh[name] > 1 for name in names)
    for entry, size in zip(resolution.spec, shape, strict=False):
        assert size % math.prod(mesh[name] for name in _flat([entry])) == 0


@given(data=st.data(), table=_tables, mesh=_meshes)
def test_the_first_alternative_that_fits_wins(data, table, mesh):
    axes, shape = data.draw(_tensors(list(table)))
    resolution = AxisRules(params=table, activations={}).resolve(axes, shape, mesh)
    for choice in resolution.choices:
        if choice.logical_axis is None:
            continue
        tried = [a or () for a in table[choice.logical_axis]][: len(choice.refused) + 1]
        assert [r.alternative for r in choice.refused] == tried[: len(choice.refused)]
        if len(tried) > len(choice.refused):
            assert choice.mesh_axes == tuple(n for n in tried[-1] if mesh[n] > 1)


@given(data=st.data(), table=_tables, mesh=_meshes, seed=st.randoms())
def test_the_order_of_unrelated_rules_does_not_matter(data, table, mesh, seed):
    axes, shape = data.draw(_tensors(list(table)))
    related = [name for name in table if name in axes]
    others = [name for name in table if name not in axes]
    seed.shuffle(others)
    slots = sorted(seed.randrange(len(related) + 1) for _ in others)
    order = list(related)
    for slot, name in reversed(list(zip(slots, others, strict=True))):
        order.insert(slot, name)
    shuffled = AxisRules(params={name: table[name] for name in order}, activations={})
    expected = AxisRules(params=table, activations={}).resolve(axes, shape, mesh)
    assert shuffled.resolve(axes, shape, mesh).spec == expected.spec


@settings(max_examples=15, deadline=None)
@given(data=st.data(), table=_tables, mesh=_meshes)
def test_nnx_linen_and_plain_trees_resolve_equally(data, table, mesh):
    axes, shape = data.draw(_tensors(list(table)).filter(lambda t: t[0]))
    table = AxisRules(
        params={name: [*value, None] for name, value in table.items()}, activations={}
    )
    zeros = jax.nn.initializers.zeros

    class Linen(linen.Module):
        @linen.compact
        def __call__(self):
            return self.param("w", linen.with_logical_partitioning(zeros, axes), shape)

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(zeros(rngs.params(), shape), out_sharding=axes)

    mesh = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    linen_axes = Linen().init(jax.random.key(0))["params"]["w"].names
    leaf = {"w": jax.ShapeDtypeStruct(shape, "float32")}
    found = {
        place(leaf, {"w": names}, table, mesh)["w"].spec
        for names in (linen_axes, functional(Nnx).axes["w"], axes)
    }
    assert found == {table.spec(axes, shape, mesh)}


def test_mesh_axes_that_no_rule_names():
    mesh = abstract_mesh("data=2,tnesor=4", 8)
    assert sl.rules.STANDARD.idle(mesh) == {"tnesor": 4}
    assert sl.rules.STANDARD.idle(abstract_mesh("data=8,own=1", 8)) == {}
    assert sl.rules.DATA.idle(abstract_mesh("data=2,fsdp=4", 8)) == {"fsdp": 4}
    assert sl.rules.ZERO1.idle(abstract_mesh("data=2,fsdp=4", 8)) == {}
    # Code of the user's own may split it by hand.
    sl.rules.STANDARD.check(mesh)
