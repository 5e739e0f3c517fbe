"""Where every leaf lives: sources of logical axes, optimizer state, models in memory."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.functional import functional
from shardlib.mesh import abstract_mesh
from shardlib.paths import named_leaves
from shardlib.sharding.partition import place, place_optimizer, shard

RULES = sl.AxisRules(
    params={"embed": "fsdp", "mlp": "tensor", "norm": None},
    activations={"*": None},
    paths={"b/**": ("mlp", "embed"), "**/kernel": ("embed", "mlp"), "**/free": ()},
    auto=sl.rules.Auto("fsdp", min_elements=64),
)
UNNAMED = dataclasses.replace(RULES, paths=())
MESH = abstract_mesh("fsdp=4,tensor=2", 8)
NO_FSDP = abstract_mesh("tensor=8", 8)


def leaf(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def only(tree, axes=None, rules=RULES, mesh=MESH):
    (placement,) = place(tree, axes or {}, rules, mesh).values()
    return placement


class TestSources:
    """Path patterns in their order, then metadata, then auto."""

    def test_metadata_stands_where_no_pattern_matches(self):
        found = only({"b": {"w": leaf(8, 8)}}, {"b/w": ("norm", "embed")}, UNNAMED)
        assert (found.origin, found.spec) == ("metadata", P(None, "fsdp"))
        assert found.logical_axes == ("norm", "embed")

    def test_the_first_pattern_that_matches_comes_before_metadata(self):
        found = only({"b": {"kernel": leaf(8, 8)}}, {"b/kernel": ("norm", "embed")})
        assert found.spec == P("tensor", "fsdp")
        assert found.origin == "path b/**, in place of metadata ('norm', 'embed')"
        found = only({"c": {"kernel": leaf(8, 8)}})
        assert (found.origin, found.spec) == ("path **/kernel", P("fsdp", "tensor"))

    def test_a_pattern_without_axes_replicates_any_rank(self):
        for shape in ((), (64,), (64, 64, 64)):
            found = only({"c": {"free": leaf(*shape)}})
            assert found.spec == P(*[None] * len(shape))
            assert found.asked_for

    def test_new_patterns_of_an_override_come_before_the_old(self):
        rules = RULES.override(paths={"b/kernel": ("norm", None)})
        assert only({"b": {"kernel": leaf(8, 8)}}, rules=rules).spec == P(None, None)

    @pytest.mark.parametrize(
        ("shape", "mesh", "auto", "spec", "note", "asked_for"),
        [
            ((8, 24, 16), MESH, 64, P(None, "fsdp", None), "largest dim that divides", True),
            ((30, 8, 12), MESH, 64, P(None, None, "fsdp"), "largest dim that divides", True),
            ((8, 7), MESH, 64, P(None, None), "smaller than 64 elements", True),
            ((64, 64), MESH, None, P(None, None), "the rules replicate parameters", True),
            ((64, 64), NO_FSDP, 64, P(None, None), "fsdp has size 1 in this mesh", False),
            ((9, 11), MESH, 64, P(None, None), "fsdp=4 divides none of its dims", False),
        ],
    )
    def test_auto_is_last(self, shape, mesh, auto, spec, note, asked_for):
        axis = sl.rules.Auto("fsdp", min_elements=auto) if auto else sl.rules.Auto(None)
        found = only({"c": {"w": leaf(*shape)}}, None, dataclasses.replace(RULES, auto=axis), mesh)
        assert (found.spec, found.note, found.asked_for) == (spec, note, asked_for)
        assert (found.origin, found.logical_axes) == ("auto", None)


def test_all_faults_are_told_with_each_remedy_once():
    rules = dataclasses.replace(RULES, auto=None)
    tree = {"a": {"kernel": leaf(6, 8)}, "d": {"kernel": leaf(10, 8)}}
    tree |= {"b": {"w": leaf(8, 6, 2)}, "c": leaf(3)}
    with pytest.raises(sl.ShardlibError) as caught:
        place(tree, {}, rules, MESH)
    lines = str(caught.value).splitlines()
    starts = (
        "a/kernel: ",
        "d/kernel: ",
        "  Change the dim",
        "b/w: ",
        "  Give one",
        "c: ",
        "  Anno",
    )
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
    assert "fsdp=4 does not divide 10" in lines[1]


def test_counts_shards_and_bytes():
    found = only({"c": {"kernel": leaf(8, 6, dtype=jnp.bfloat16)}})
    assert (found.shards({"fsdp": 4, "tensor": 2}), found.num_bytes) == (8, 96)
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert only({"key": key}).num_bytes == 8


PARAMS = {
    "embed": {"table": (64, 32)},
    "layers": {"up": {"kernel": (3, 32, 48)}, "down": {"kernel": (3, 48, 32), "bias": (3, 32)}},
    "scale": (),
}
AXES = {
    "embed/table": ("mlp", "embed"),
    "layers/up/kernel": (None, "embed", "mlp"),
    "layers/down/kernel": (None, "mlp", "embed"),
    "layers/down/bias": (None, "norm"),
    "scale": (),
}


def params():
    return jax.tree.map(lambda s: leaf(*s), PARAMS, is_leaf=lambda x: isinstance(x, tuple))


def label(path, _):
    return "decay" if path[-1].key == "kernel" else "plain"


def labels(tree):
    return jax.tree_util.tree_map_with_path(label, tree)


def kernels(tree):
    return jax.tree.map(lambda name: name == "decay", labels(tree))


# For each optimizer: how many of its leaves are as large as a parameter.
OPTIMIZERS = {
    "adamw": (optax.adamw(1e-3), 10),
    "masked": (optax.chain(optax.masked(optax.trace(0.9), kernels), optax.sgd(0.1)), 2),
    "multi_transform": (
        optax.multi_transform({"decay": optax.adamw(1e-3), "plain": optax.sgd(0.1, 0.9)}, labels),
        2 * 2 + 3,
    ),
    "ema": (optax.chain(optax.adam(1e-3), optax.ema(0.99)), 15),
    "injected": (optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), 10),
    "multi_steps": (optax.MultiSteps(optax.adam(1e-3), 4), 15),
}


@pytest.mark.parametrize(("optimizer", "count"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state_goes_where_its_parameters_are(optimizer, count):
    placed = place(params(), AXES, UNNAMED, MESH)
    opt_state = jax.eval_shape(optimizer.init, params())
    found = place_optimizer(opt_state, placed)
    leaves = named_leaves(opt_state)
    assert list(found) == list(leaves)
    like_params = 0
    for path, placement in found.items():
        assert placement.shape == leaves[path].shape
        owner = next((p for n, p in placed.items() if f"/{path}".endswith(f"/{n}")), None)
        if owner is None:
            assert placement.shape == ()
            assert placement.asked_for
            continue
        like_params += 1
        assert placement.origin == f"of {owner.path}"
        assert (placement.spec, placement.logical_axes) == (owner.spec, owner.logical_axes)
    assert like_params == count


def test_factored_statistics_keep_the_dims_that_they_have():
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=16)
    found = place_optimizer(
        jax.eval_shape(optimizer.init, params()), place(params(), AXES, UNNAMED, MESH)
    )
    specs = {path.split("/", 1)[1]: (p.shape, p.spec) for path, p in found.items() if "/v" in path}
    # v_row lacks the largest dim, v_col the second largest; the others are placeholders.
    assert {path: spec for path, spec in specs.items() if spec != ((1,), P(None))} == {
        "v_row/embed/table": ((32,), P("fsdp")),
        "v_col/embed/table": ((64,), P("tensor")),
        "v_row/layers/up/kernel": ((3, 32), P(None, "fsdp")),
        "v_col/layers/up/kernel": ((3, 48), P(None, "tensor")),
        "v_row/layers/down/kernel": ((3, 32), P(None, "fsdp")),
        "v_col/layers/down/kernel": ((3, 48), P(None, "tensor")),
        "v/layers/down/bias": ((3, 32), P(None, None)),
        "v/scale": ((), P()),
    }
    assert all(p.asked_for for p in found.values())


def test_a_nested_parameter_is_not_taken_for_one_of_the_same_name():
    tree = {"kernel": leaf(8, 8), "inner": {"kernel": leaf(8, 8)}}
    axes = {"kernel": ("embed", None), "inner/kernel": (None, "embed")}
    opt_state = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, tree)
    found = place_optimizer(opt_state, place(tree, axes, UNNAMED, MESH))
    assert {path: p.spec for path, p in found.items()} == {
        "0/trace/inner/kernel": P(None, "fsdp"),
        "0/trace/kernel": P("fsdp", None),
    }


def test_optimizer_state_of_no_parameter_is_reported():
    """A flattened optimizer holds one vector of everything, which no parameter's place fits."""
    optimizer = optax.flatten(optax.adam(1e-3))

    def make(rngs):
        return nnx.Linear(64, 128, rngs=rngs)

    mesh = sl.make_mesh("fsdp=8")
    state = sl.abstract_state(make, optimizer, mesh=mesh, rules=sl.rules.FSDP)
    faults = sl.explain(state).faults(threshold_bytes=1024)
    assert [str(fault) for fault in faults] == [
        f"0/{moment} (32.5 KiB) is replicated: not a parameter's shape" for moment in ("mu", "nu")
    ]


def test_real_updates_stay_in_place():
    """What XLA gets is what was planned, for every optimizer at once."""
    mesh = sl.make_mesh("fsdp=4,tensor=2")

    def make(rngs):
        init = nnx.with_metadata(
            nnx.initializers.normal(), out_sharding=("embed", "mlp"), eager_sharding=False
        )
        return nnx.Linear(32, 48, kernel_init=init, use_bias=False, rngs=rngs)

    def loss(model, batch, rng):
        return jnp.mean(model(batch["x"]) ** 2)

    names = ("adamw", "masked", "multi_transform", "ema")
    optimizer = optax.chain(
        *(OPTIMIZERS[name][0] for name in names), optax.adafactor(1e-3, min_dim_size_to_factor=16)
    )
    state = sl.init_state(make, optimizer, mesh=mesh, rules=sl.rules.STANDARD)
    before = {path: x.sharding for path, x in named_leaves(state).items()}
    state, _ = sl.make_train_step(loss)(state, {"x": np.ones((8, 32), np.float32)})
    assert {path: x.sharding for path, x in named_leaves(state).items()} == before
    specs = {path: s.spec for path, s in before.items() if path.endswith("kernel")}
    sharded = [path for path, spec in specs.items() if spec == P("fsdp", "tensor")]
    assert len(sharded) == 1 + 2 + 1 + 2 + 3
    factored = {path: spec for path, spec in specs.items() if "v_" in path}
    assert set(factored.values()) == {P("fsdp"), P("tensor")}


def kind_of_model(kind):
    """The same parameters, annotated in each of the ways that there are."""
    normal = jax.nn.initializers.normal()
    if kind == "nnx":
        init = nnx.with_metadata(normal, out_sharding=("embed", "mlp"), eager_sharding=False)
        return lambda rngs: nnx.Linear(32, 48, kernel_init=init, use_bias=False, rngs=rngs), {}
    if kind == "nnx with_partitioning":
        init = nnx.with_partitioning(normal, ("embed", "mlp"))
        return lambda rngs: nnx.Linear(32, 48, kernel_init=init, use_bias=False, rngs=rngs), {}
    boxed = {
        "linen logical": linen.with_logical_partitioning(normal, ("embed", "mlp")),
        "linen": linen.with_partitioning(normal, ("embed", "mlp")),
        "paths": normal,
    }[kind]
    return linen.Dense(48, kernel_init=boxed, use_bias=False), {"inputs": (leaf(1, 32),)}


@pytest.mark.parametrize(
    "kind", ["nnx", "nnx with_partitioning", "linen logical", "linen", "paths"]
)
def test_every_way_to_name_axes_gives_the_same_place(kind):
    make, options = kind_of_model(kind)
    rules = dataclasses.replace(RULES if kind == "paths" else UNNAMED, auto=None)
    state = sl.abstract_state(make, optax.adam(1e-3), mesh=MESH, rules=rules, **options)
    assert state.params["kernel"].sharding.spec == P("fsdp", "tensor")
    origin = state.definition.params["kernel"].origin
    assert origin == ("path **/kernel" if kind == "paths" else "metadata")


def test_nnx_statistics_without_names_are_replicated():
    mesh, rules = sl.make_mesh("fsdp=8"), sl.AxisRules(params={}, activations={}, paths={"**": ()})
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    shard(model, mesh, dataclasses.replace(rules, auto=None))
    assert model.mean[...].sharding.is_fully_replicated
    assert functional(lambda rngs: nnx.BatchNorm(8, rngs=rngs)).axes["mean"] is None


def test_shard_moves_nothing_when_a_leaf_cannot_be_placed():
    tree = {"a": jnp.ones((8, 8)), "b": jnp.ones((3, 5))}
    rules = RULES.override(paths={"*": ("embed", None)})
    with pytest.raises(sl.ShardlibError, match="b: logical axis 'embed'"):
        shard(tree, sl.make_mesh("fsdp=8"), rules)
    assert tree["a"].sharding.is_fully_replicated
    assert len(tree["a"].devices()) == 1


def test_shard_leaves_random_streams_alone():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    shard(model, sl.make_mesh("fsdp=8"), RULES)
    assert (model(jnp.ones((4, 4))) == 0).any()


MESHES = ("data=8", "fsdp=8", "fsdp=4,tensor=2", "tensor=4,fsdp=2", "data=2,fsdp=2,tensor=2")
FREE = sl.AxisRules(
    params={"mlp": ["tensor", None], "embed": ["fsdp", "data", None]}, activations={}
)


@pytest.mark.mesh
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_resharding_keeps_every_value(data):
    """From any mesh onto any other: the values, and the pieces that the plan says."""
    shape = tuple(data.draw(st.lists(st.integers(1, 16), max_size=3)))
    names = data.draw(st.permutations(["mlp", "embed", None]))[: len(shape)]
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int8", "bool"]))
    values = jnp.arange(math.prod(shape)).reshape(shape).astype(dtype)
    path_rules = FREE.override(paths={"x": names}) if names else FREE.override(paths={"x": ()})
    array = {"x": values}
    for name in data.draw(st.lists(st.sampled_from(MESHES), min_size=1, max_size=3)):
        mesh = sl.make_mesh(name)
        array = shard(array, mesh, path_rules)
        placement = only({"x": values}, rules=path_rules, mesh=mesh)
        pieces = {str(s.index) for s in array["x"].addressable_shards}
        assert len(pieces) == placement.shards(dict(mesh.shape))
        assert array["x"].dtype == values.dtype
        np.testing.assert_array_equal(array["x"], values)
