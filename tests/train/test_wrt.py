"""What is trained: types of one's own, a part of the parameters, and never nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.paths import named_leaves

STEPS = 3
X = jax.ShapeDtypeStruct((4, 16), jnp.float32)


class Weight(nnx.Variable):
    """A user's own type of variable."""


class Own(nnx.Module):
    """Its weights are of a type of its own, its bias is a parameter."""

    def __init__(self, rngs):
        self.w = Weight(0.1 * jax.random.normal(rngs.params(), (16, 16)))
        self.bias = nnx.Param(jnp.zeros(16))

    def __call__(self, x):
        return x @ self.w[...] + self.bias[...][None]


class WithLoRA(nnx.Module):
    """A base, sharded by its names, and an adapter."""

    def __init__(self, rngs):
        init = nnx.with_metadata(
            nnx.initializers.lecun_normal(), out_sharding=("embed", "mlp"), eager_sharding=False
        )
        self.base = nnx.Linear(16, 1024, kernel_init=init, rngs=rngs)
        self.norm = nnx.BatchNorm(1024, rngs=rngs)
        self.lora = nnx.LoRA(16, 4, 1024, rngs=rngs, b_initializer=nnx.initializers.normal(0.1))
        self.head = nnx.Linear(1024, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.tanh(self.norm(self.base(x) + self.lora(x))))


def batch():
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    return {"x": x, "y": np.tanh(x)}


def loss_fn(model, batch, rng):
    # Flax's statistics are in float32 whatever its parameters are.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def start(make, mesh="fsdp=8", rules=sl.rules.FSDP, **options):
    mesh = sl.make_mesh(mesh, devices=jax.devices()[: 1 if mesh == "data=1" else 8])
    return sl.init_state(make, optax.adam(1e-2), mesh=mesh, rules=rules, **options)


def train(state, **options):
    step, losses = sl.make_train_step(loss_fn, **options), []
    for _ in range(STEPS):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    return state, losses


def values(tree):
    return {path: np.asarray(leaf) for path, leaf in named_leaves(tree).items()}


def assert_same(tree, before):
    for path, leaf in named_leaves(tree).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)


class TestOwnTypes:
    @pytest.mark.parametrize("wrt", [Weight, (Weight, nnx.Param), lambda path, v: True])
    def test_they_are_trained(self, wrt):
        state = start(Own, wrt=wrt)
        before = values(state.params)
        assert "w" in before
        state, losses = train(state)
        for path, leaf in named_leaves(state.params).items():
            assert np.abs(leaf - before[path]).max() > 1e-3
        _, alone = train(start(Own, "data=1", wrt=wrt))
        np.testing.assert_allclose(losses, alone, rtol=1e-5)

    def test_the_optimizer_knows_no_others(self):
        state = start(Own, wrt=Weight)
        assert list(named_leaves(state.params)) == ["w"]
        assert {p.rsplit("/")[-1] for p in named_leaves(state.opt_state)} == {"w", "count"}
        assert list(named_leaves(state.model_state)) == ["bias"]
        after, _ = train(state)
        np.testing.assert_array_equal(after.model_state["bias"], np.zeros(16))


class TestFrozenParameters:
    def test_they_lie_as_parameters_do(self):
        rules = sl.rules.STANDARD.override(paths={"head/kernel": (None, "embed")})
        state = start(WithLoRA, "fsdp=4,tensor=2", rules, wrt=nnx.LoRAParam)
        assert list(named_leaves(state.params)) == ["lora/lora_a", "lora/lora_b"]
        specs = {path: x.sharding.spec for path, x in named_leaves(state.model_state).items()}
        assert specs["base/kernel"] == P("fsdp", "tensor")
        assert specs["head/kernel"] == P(None, "fsdp")
        assert specs["norm/mean"] == P(None)
        rows = {row.path: row for row in sl.explain(state).rows if row.section == "model_state"}
        assert rows["head/kernel"].origin == "path head/kernel"
        assert rows["base/kernel"].note == "not trained"
        assert rows["norm/scale"].note == "not trained; smaller than 16384 elements"
        assert rows["norm/mean"].origin == "model state without names"

    @pytest.mark.rest("mesh")
    @pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"precision": "bf16"}])
    def test_only_the_adapter_changes(self, options):
        stored = {"precision": options["precision"]} if "precision" in options else {}
        state = start(WithLoRA, "fsdp=4,tensor=2", sl.rules.STANDARD, wrt=nnx.LoRAParam, **stored)
        params, held = values(state.params), values(state.model_state)
        frozen = state.definition.module.frozen
        assert frozen == {
            *("base/bias", "base/kernel", "head/bias", "head/kernel", "norm/bias", "norm/scale")
        }
        state, losses = train(state, **options)
        for path, leaf in named_leaves(state.model_state).items():
            is_same = np.array_equal(leaf, held[path])
            assert is_same == (path in frozen), path
        assert all(np.abs(x - params[p]).max() > 0 for p, x in named_leaves(state.params).items())
        _, alone = train(start(WithLoRA, "data=1", wrt=nnx.LoRAParam, **stored), **options)
        rtol = 2e-2 if stored else 1e-5
        np.testing.assert_allclose(losses, alone, rtol=rtol)

    @pytest.mark.mesh
    def test_they_are_stored_and_cast_as_parameters(self):
        seen = []

        def loss(model, batch, rng):
            seen.append({x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))})
            return loss_fn(model, batch, rng)

        state = start(WithLoRA, wrt=nnx.LoRAParam, precision="bf16")
        assert state.model_state["base"]["kernel"].dtype == jnp.float32
        sl.make_train_step(loss, precision="bf16")(state, batch())
        assert seen[0] == {"bfloat16"}
        state = start(WithLoRA, wrt=nnx.LoRAParam, precision="bf16_params")
        assert state.model_state["base"]["kernel"].dtype == jnp.bfloat16
        assert state.model_state["norm"]["mean"].dtype == jnp.float32

    def test_groups_that_reduce_once_may_hold_them(self):
        def make(rngs):
            return nnx.Sequential(nnx.LoRALinear(16, 16, lora_rank=4, rngs=rngs))

        options = {"wrt": nnx.LoRAParam}
        config = sl.ReductionConfig(dtype="f32")
        _, losses = train(start(make, "data=2,fsdp=4", **options), reduction=config)
        _, alone = train(start(make, "data=1", **options))
        np.testing.assert_allclose(losses, alone, rtol=1e-5)


class Adapted(linen.Module):
    """linen with an adapter in a collection of its own."""

    @linen.compact
    def __call__(self, x):
        down = self.variable("lora", "down", lambda: jnp.full((16, 4), 0.1)).value
        up = self.variable("lora", "up", lambda: jnp.full((4, 256), 0.1)).value
        x = linen.Dense(256)(x) + x @ down @ up
        x = linen.BatchNorm(use_running_average=False)(x)
        return linen.Dense(16)(linen.tanh(x))


class TestLinenCollections:
    @pytest.mark.mesh
    def test_an_adapter_alone(self):
        state = start(Adapted(), inputs=(X,), wrt="lora")
        assert list(named_leaves(state.params)) == ["lora/down", "lora/up"]
        held = values(state.model_state)
        layers = {path.split("/")[0] for path in state.definition.module.frozen}
        assert layers == {"BatchNorm_0", "Dense_0", "Dense_1"}
        state, losses = train(state)
        for path, leaf in named_leaves(state.model_state).items():
            assert np.array_equal(leaf, held[path]) == (not path.startswith("batch_stats/")), path
        assert losses[-1] < losses[0]
        _, alone = train(start(Adapted(), "data=1", inputs=(X,), wrt="lora"))
        np.testing.assert_allclose(losses, alone, rtol=1e-5)

    @pytest.mark.parametrize(
        ("wrt", "said"),
        [
            ("lorra", r"wrt names 'lorra', .* batch_stats, lora, params.* 'lora'\?\n  Name some"),
            (nnx.Param, r"Adapted is a linen module.\n  Name collections .* lora, params"),
        ],
    )
    def test_refuses_what_is_not_a_collection(self, wrt, said):
        with pytest.raises(sl.ShardlibError, match=said):
            start(Adapted(), inputs=(X,), wrt=wrt)


class NoParam(nnx.Module):
    def __init__(self, rngs):
        self.w = Weight(jnp.ones((16, 16)))
        self.mean = nnx.BatchStat(jnp.zeros(16))

    def __call__(self, x):
        return x @ self.w[...]


class LinenNoParam(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x @ self.variable("weights", "w", lambda: jnp.ones((16, 16))).value


@pytest.mark.parametrize(("make", "options"), [(NoParam, {}), (LinenNoParam(), {"inputs": (X,)})])
def test_variables_of_other_kinds_are_trained_where_they_are_named(make, options):
    wrt = Weight if make is NoParam else "weights"
    assert train(start(make, wrt=wrt, **options))[1][-1] > 0


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (
            NoParam,
            {},
            r"^NoParam has no parameter to train: its variables are BatchStat \(mean\); Weight "
            r"\(w\)\.\n  Say which of them to train, as in sl\.init_state",
        ),
        (LinenNoParam(), {"inputs": (X,)}, r"LinenNoParam has no .* weights \(weights/w\)"),
        (lambda rngs: nnx.Dropout(0.5, rngs=rngs), {}, r"its variables are none.\n  Say which"),
        (WithLoRA, {"wrt": Weight}, r"WithLoRA has no parameter .*LoRAParam"),
        (WithLoRA, {"wrt": 3}, r"wrt is 3, which is not a filter.*\n  Give a"),
    ],
    ids=["nnx", "linen", "no variables", "a filter that matches nothing", "not a filter"],
)
def test_nothing_to_train_is_refused(make, options, text):
    with pytest.raises(sl.ShardlibError, match=text):
        start(make, **options)
