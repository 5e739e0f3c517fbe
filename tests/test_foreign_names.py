"""Models with names of their own: helped from outside, or taken for the mesh axes that they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.paths import named_leaves

STEPS = 4
X = jax.ShapeDtypeStruct((4, 16), jnp.float32)


def batch():
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    return {"x": x, "y": np.tanh(x)}


def loss_fn(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train(make, mesh, rules, **options):
    mesh = sl.make_mesh(mesh, devices=jax.devices()[: 1 if mesh == "data=1" else 8])
    with sl.use(mesh, rules):
        state = sl.init_state(make, optax.sgd(0.1), **options)
        step, losses = sl.make_train_step(loss_fn), []
        for _ in range(STEPS):
            state, metrics = step(state, batch())
            losses.append(float(metrics["loss"]))
    return state, losses


def specs(state):
    return {path: tuple(x.sharding.spec) for path, x in named_leaves(state.params).items()}


def row(state, path):
    (found,) = (r for r in sl.explain(state).rows if r.section == "params" and r.path == path)
    return found


class Attention(linen.Module):
    """As in Flax's example lm1b: two names on kernels of three dims, one of them unknown here."""

    @linen.compact
    def __call__(self, x):
        init = linen.with_logical_partitioning(
            linen.initializers.lecun_normal(), ("embed", "joined_kv")
        )
        x = x[:, None] + linen.Embed(4, 16)(jnp.arange(4))[None]
        return linen.MultiHeadDotProductAttention(4, kernel_init=init)(x, x).mean(1)


@pytest.mark.mesh
def test_wrong_names_of_linen_are_overridden():
    paths = {
        "**/out/kernel": ("heads", "head_dim", "embed"),
        "**/kernel": ("embed", "heads", "head_dim"),
    }
    with pytest.raises(sl.ShardlibError, match="MultiHeadDotProductAttention_0/query/kernel: log"):
        train(Attention(), "fsdp=4,tensor=2", sl.rules.STANDARD, inputs=(X,))
    rules = sl.rules.STANDARD.override(paths=paths)
    state, losses = train(Attention(), "fsdp=4,tensor=2", rules, inputs=(X,))
    kernels = [spec for path, spec in specs(state).items() if path.endswith("kernel")]
    assert kernels == [
        ("fsdp", "tensor", None),
        ("tensor", None, "fsdp"),
        ("fsdp", "tensor", None),
        ("fsdp", "tensor", None),
    ]
    _, alone = train(Attention(), "data=1", rules, inputs=(X,))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


@pytest.mark.mesh
def test_rules_are_found_for_kernels_with_too_few_names():
    """One name is that of a dim which the devices do not divide."""
    rows = dict.fromkeys("xy", jax.ShapeDtypeStruct((32, 16), jnp.float32))
    options = {"loss": loss_fn, "batch": rows, "optimizer": optax.sgd(0.1), "inputs": (X,)}
    found = sl.find_rules(Attention(), on="8xh100", mesh="fsdp=4,tensor=2", **options)
    options = {"rules": found.rules, "inputs": (X,), "steps": 1}
    assert sl.testing.assert_equivalent(
        Attention(), loss_fn, batch(), "fsdp=4,tensor=2", **options
    ).comparisons


PATHS = {
    "query/kernel": ("embed", "heads", "head_dim"),
    "out/kernel": ("heads", "head_dim", "embed"),
}


class TestPathRulesComeFirst:
    def make(self):
        class Misnamed(nnx.Module):
            def __init__(self, rngs):
                def param(*shape, names):
                    value = 0.1 * jax.random.normal(rngs.params(), shape)
                    return nnx.Param(value, out_sharding=names, eager_sharding=False)

                self.query = nnx.Dict(kernel=param(16, 4, 8, names=("fused", "joined_kv")))
                self.out = nnx.Dict(kernel=param(4, 8, 16, names=("x", "y", "z")))

            def __call__(self, x):
                x = jnp.einsum("be,ehd->bhd", x, self.query.kernel[...])
                return jnp.einsum("bhd,hde->be", nnx.tanh(x), self.out.kernel[...])

        return Misnamed

    def test_a_misnamed_model_is_helped_from_outside(self):
        rules = sl.rules.STANDARD.override(paths=PATHS)
        state, losses = train(self.make(), "fsdp=4,tensor=2", rules)
        assert specs(state) == {
            "out/kernel": ("tensor", None, "fsdp"),
            "query/kernel": ("fsdp", "tensor", None),
        }
        _, alone = train(self.make(), "data=1", rules)
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
        assert losses[-1] < losses[0]

    def test_what_was_overridden_and_what_matches_nothing_is_told(self, caplog):
        paths = {**PATHS, "unused/*": ("embed",), "query/kernl": ("embed",)}
        mesh, rules = sl.make_mesh("fsdp=4,tensor=2"), sl.rules.STANDARD.override(paths=paths)
        state = sl.abstract_state(self.make(), optax.sgd(0.1), mesh=mesh, rules=rules)
        said = "path query/kernel, in place of metadata ('fused', 'joined_kv')"
        assert row(state, "query/kernel").origin == said
        assert sl.explain(state).unused_paths == ("unused/*", "query/kernl")
        sl.init_state(self.make(), optax.sgd(0.1), mesh=mesh, rules=rules)
        assert "'query/kernl' matches no parameter of Misnamed. Did you mean 'query/kernel'" in (
            caplog.text
        )

    def test_without_them_all_faults_are_told(self):
        with pytest.raises(sl.ShardlibError) as caught:
            train(self.make(), "fsdp=4,tensor=2", sl.rules.STANDARD)
        for part in ("query/kernel", "'joined_kv'", "3.\n  Give one name", "out/kernel", "'z'"):
            assert part in str(caught.value)

    def test_statistics_without_names_match_no_pattern(self):
        rules = sl.rules.FSDP.override(paths={"**": ("embed",)})
        with sl.use(sl.make_mesh("fsdp=8"), rules):
            state = sl.abstract_state(lambda rngs: nnx.BatchNorm(16, rngs=rngs), optax.sgd(0.1))
        assert state.params["scale"].sharding.spec == P("fsdp")
        assert state.model_state["mean"].sharding.is_fully_replicated


def annotated(kind):
    """The same two layers, placed on mesh axes in each of the ways that Flax has."""
    init = jax.nn.initializers.lecun_normal()
    if kind == "linen":

        class Net(linen.Module):
            @linen.compact
            def __call__(self, x):
                into = linen.with_partitioning(init, ("fsdp", "tensor"))
                out_of = linen.with_partitioning(init, ("tensor", ("fsdp",)))
                x = linen.Dense(32, kernel_init=into, use_bias=False)(x)
                return linen.Dense(16, kernel_init=out_of, use_bias=False)(linen.relu(x))

        return Net(), {"inputs": (X,)}

    def place(spec):
        if kind == "nnx sharding":
            spec = NamedSharding(sl.make_mesh("fsdp=4,tensor=2"), spec)
        return nnx.with_metadata(init, out_sharding=spec, eager_sharding=False)

    def make(rngs):
        options = {"use_bias": False, "rngs": rngs}
        return nnx.Sequential(
            nnx.Linear(16, 32, kernel_init=place(P("fsdp", "tensor")), **options),
            nnx.relu,
            nnx.Linear(32, 16, kernel_init=place(P("tensor", "fsdp")), **options),
        )

    return make, {}


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("kind", ["linen", "nnx", "nnx sharding"])
def test_names_of_mesh_axes_are_those_mesh_axes(kind):
    make, options = annotated(kind)
    state, losses = train(make, "fsdp=4,tensor=2", sl.rules.STANDARD, **options)
    assert sorted(specs(state).values()) == [("fsdp", "tensor"), ("tensor", "fsdp")]
    for leaf in jax.tree.leaves(state.params):
        assert {s.data.size for s in leaf.addressable_shards} == {leaf.size // 8}
    _, alone = train(make, "data=1", sl.rules.STANDARD, **options)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    for path in specs(state):
        found = row(state, path)
        assert found.origin == "metadata"
        assert set(found.logical_axes) == {"fsdp", "tensor"}
        assert found.note.startswith("taken as mesh axes: ")
        assert found.asked_for


TWO_AXES, STANDARD = "fsdp=4,tensor=2", sl.rules.STANDARD


def only(*names, shape=(16, 16), mesh=TWO_AXES, rules=STANDARD):
    def make(rngs):
        model = nnx.Dict()
        model.w = nnx.Param(jnp.zeros(shape), out_sharding=names, eager_sharding=False)
        return model

    state = sl.abstract_state(make, optax.sgd(0.1), mesh=sl.make_mesh(mesh), rules=rules)
    return state.params["w"].sharding.spec


class TestMeshAxesAsNames:
    @pytest.mark.parametrize(
        ("names", "mesh", "rules", "spec"),
        [
            ((("fsdp", "tensor"), None), TWO_AXES, STANDARD, P(("fsdp", "tensor"), None)),
            # A standard axis that this mesh has not.
            (("fsdp", "tensor"), "fsdp=8", STANDARD, P("fsdp", None)),
            # Rules of that name, and for every name, come first.
            (("fsdp", "tensor"), TWO_AXES, STANDARD.override(fsdp=None), P(None, "tensor")),
            (("fsdp", "tensor"), TWO_AXES, sl.rules.DATA, P(None, None)),
        ],
    )
    def test_where_they_go(self, names, mesh, rules, spec):
        assert only(*names, mesh=mesh, rules=rules) == spec

    def test_a_spec_may_be_shorter_than_the_rank(self):
        def make(rngs):
            w = nnx.Param(jnp.zeros((8, 3)), out_sharding=P("fsdp"), eager_sharding=False)
            return nnx.Dict(w=w)

        with sl.use(sl.make_mesh("fsdp=8"), sl.rules.FSDP):
            assert sl.abstract_state(make, optax.sgd(0.1)).params["w"].sharding.spec[0] == "fsdp"

    @pytest.mark.parametrize(
        ("names", "shape", "fault"),
        [
            (("fsdp", None), (6, 4), r"w: .*'fsdp'.*fsdp=4 does not divide 6.\n  "),
            (("embed", "fsdp"), (16, 16), r"'embed'.*'fsdp' already shards dim 1.\n  "),
            (("fdsp", None), (16, 16), r"'fdsp' .*Did you mean 'fsdp'\?\n  Add one"),
        ],
    )
    def test_faults(self, names, shape, fault):
        with pytest.raises(sl.ShardlibError, match=fault):
            only(*names, shape=shape)

    def test_activations(self):
        with sl.use(sl.make_mesh("fsdp=4,tensor=2"), sl.rules.STANDARD):
            x = jax.jit(lambda x: sl.constrain(x, "fsdp", "tensor"))(jnp.ones((8, 8)))
        assert x.sharding.spec == P("fsdp", "tensor")


def test_a_table_of_which_no_dim_divides_trains_replicated_and_explain_says_so():
    class Table(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Embed(50257, 33, name="table")(x)

    options = {"inputs": (jax.ShapeDtypeStruct((8, 4), jnp.int32),), "mesh": sl.make_mesh("fsdp=8")}

    def loss(model, batch, rng):
        return jnp.mean((model(batch["tokens"]) - 1.0) ** 2)

    state = sl.init_state(Table(), optax.sgd(0.1), rules=sl.rules.FSDP, **options)
    assert state.params["table"]["embedding"].sharding.is_fully_replicated
    assert [str(fault) for fault in sl.explain(state).faults()] == [
        "table/embedding (6.3 MiB) is replicated: fsdp=8 divides none of its dims"
    ]
    batch = {"tokens": np.arange(64, dtype=np.int32).reshape(16, 4)}
    _, metrics = sl.make_train_step(loss)(state, batch)
    assert float(metrics["loss"]) < 1.1
    # A path rule asks for it.
    rules = sl.rules.FSDP.override(paths={"table/*": ()})
    asked = sl.abstract_state(Table(), optax.sgd(0.1), rules=rules, **options)
    assert sl.explain(asked).faults() == []
