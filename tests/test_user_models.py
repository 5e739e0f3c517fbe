"""Models that know nothing of shardlib train sharded, in few lines of a user's own."""

import functools
import inspect

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.paths import named_leaves

STEPS = 6


class ConvNet(linen.Module):
    """A user's own linen model: no annotation, batch statistics, dropout."""

    @linen.compact
    def __call__(self, images, train: bool):
        x = linen.Conv(32, (3, 3), use_bias=False)(images)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.relu(x).reshape(x.shape[0], -1)
        x = linen.Dense(64)(x)
        x = linen.Dropout(0.1, deterministic=not train)(linen.relu(x))
        return linen.Dense(10)(x)


class TextClassifier(nnx.Module):
    """A user's own NNX model, with logical names that shardlib has never heard of."""

    def __init__(self, rngs, symbols=64, width=32):
        def named(*axes):
            init = nnx.initializers.normal(0.2)
            return nnx.with_metadata(init, out_sharding=axes, eager_sharding=False)

        self.table = nnx.Embed(
            symbols, width, embedding_init=named("symbols", "features"), rngs=rngs
        )
        self.mixer = nnx.Linear(
            width, 4 * width, kernel_init=named("features", "inner"), use_bias=False, rngs=rngs
        )
        self.reader = nnx.Linear(
            4 * width, 10, kernel_init=named("inner", "answers"), use_bias=False, rngs=rngs
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        x = sl.constrain(self.table(tokens), "examples", "time", "features")
        x = nnx.gelu(self.mixer(x)).mean(axis=1)
        return self.reader(self.dropout(x))


def image_batches():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 64).astype(np.int32)
    noise = rng.normal(size=(64, 8, 8, 3)).astype(np.float32)
    bright = np.linspace(-2, 2, 10, dtype=np.float32)[labels]
    batch = {"images": 0.3 * noise + bright[:, None, None, None], "labels": labels}
    return [batch] * STEPS


def text_batches():
    rng = np.random.default_rng(1)
    symbols = rng.integers(0, 64, 64).astype(np.int32)
    tokens = np.where(rng.random((64, 12)) < 0.7, symbols[:, None], 0).astype(np.int32)
    return [{"tokens": tokens, "labels": symbols % 10}] * STEPS


def train_linen(mesh, batches):
    def loss_fn(model, batch, rng):
        logits = model(batch["images"], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    with sl.use(mesh, sl.rules.FSDP):
        images = jax.ShapeDtypeStruct((8, 8, 8, 3), jnp.float32)
        state = sl.init_state(ConvNet(), optax.adam(3e-3), seed=0, inputs=(images, True))
        step = sl.make_train_step(loss_fn)
        losses = []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    return state, losses


def train_nnx(mesh, batches):
    rules = sl.AxisRules(
        params={"features": "fsdp", "symbols": None, "inner": ["fsdp", None], "answers": None},
        activations={"batch": "fsdp", "examples": "fsdp", "time": None, "features": None},
    )

    def loss_fn(model, batch, rng):
        logits = model(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    with sl.use(mesh, rules):
        state = sl.init_state(lambda rngs: TextClassifier(rngs), optax.adamw(3e-2), seed=0)
        step = sl.make_train_step(loss_fn)
        losses = []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    return state, losses


def on(num_devices):
    return sl.make_mesh(f"fsdp={num_devices}", devices=jax.devices()[:num_devices])


def user_lines(*objects):
    """Counts the lines that a user writes: the model apart, which exists already."""
    sources = "\n".join(inspect.getsource(o) for o in objects).splitlines()
    return len([line for line in sources if line.strip()])


CASES = {
    "linen": (train_linen, image_batches, {"Dense_0/kernel": ("fsdp", None)}),
    "nnx": (
        train_nnx,
        text_batches,
        {
            "table/embedding": (None, "fsdp"),
            "mixer/kernel": ("fsdp", None),
            "reader/kernel": ("fsdp", None),
        },
    ),
}


@functools.cache
def trained(kind, num_devices):
    train, batches, _ = CASES[kind]
    return train(on(num_devices), batches())


@pytest.mark.mesh
@pytest.mark.parametrize("kind", CASES)
def test_trains_sharded_in_under_25_lines(kind):
    train, _, specs = CASES[kind]
    assert user_lines(train) < 25
    state, losses = trained(kind, 8)
    assert losses[-1] < 0.8 * losses[0]
    params = named_leaves(state.params)
    moments = named_leaves(state.opt_state)
    for path, spec in specs.items():
        of_adam = [x for name, x in moments.items() if name.endswith(path)]
        assert len(of_adam) == 2
        for leaf in (params[path], *of_adam):
            assert tuple(leaf.sharding.spec) == spec
            assert {s.data.size for s in leaf.addressable_shards} == {leaf.size // 8}
    np.testing.assert_allclose(losses, trained(kind, 1)[1], rtol=1e-5)


@pytest.mark.mesh
def test_batch_statistics_are_those_of_the_whole_batch():
    found, expected = (named_leaves(trained("linen", n)[0].model_state) for n in (8, 1))
    assert list(found) == ["batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var"]
    for path, leaf in found.items():
        assert leaf.sharding.is_fully_replicated
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-4, atol=1e-6)
        assert np.abs(leaf - (0.0 if path.endswith("mean") else 1.0)).max() > 1e-3


class Annotated(linen.Module):
    """A linen model with boxes around its parameters."""

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        into = linen.with_logical_partitioning(init, ("embed", "mlp"))
        out_of = linen.with_partitioning(init, ("mlp", "embed"))
        x = linen.Dense(64, kernel_init=into, use_bias=False)(x)
        return linen.Dense(16, kernel_init=out_of, use_bias=False)(linen.relu(x))


def squared_error(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def regression_batch():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(32, 16)).astype(np.float32)
    return {"x": x, "y": np.tanh(x)}


def regress(make, mesh, rules, **options):
    with sl.use(sl.make_mesh(mesh), rules):
        state = sl.init_state(make, optax.sgd(0.1), **options)
    step, losses = sl.make_train_step(squared_error), []
    for _ in range(STEPS):
        state, metrics = step(state, regression_batch())
        losses.append(float(metrics["loss"]))
    return state, losses


X = jax.ShapeDtypeStruct((4, 16), jnp.float32)


def test_boxed_linen_model_trains():
    state, losses = regress(Annotated(), "fsdp=4,tensor=2", sl.rules.STANDARD, inputs=(X,))
    specs = {path: tuple(x.sharding.spec) for path, x in named_leaves(state.params).items()}
    assert specs == {"Dense_0/kernel": ("fsdp", "tensor"), "Dense_1/kernel": ("tensor", "fsdp")}
    assert losses[-1] < losses[0]
    _, alone = regress(Annotated(), {"data": 8}, sl.rules.DATA, inputs=(X,))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


@pytest.mark.mesh
def test_shard_places_an_nnx_model_in_memory():
    model = TextClassifier(nnx.Rngs(0))
    model.norm = nnx.BatchNorm(10, rngs=nnx.Rngs(1))
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    tokens = text_batches()[0]["tokens"]
    model.eval()
    expected = model.norm(model(tokens))
    rules = sl.AxisRules(
        params={"features": "fsdp", "symbols": None, "inner": None, "answers": None},
        activations={"examples": "fsdp", "*": None},
        auto=sl.rules.Auto("fsdp"),
    )
    with sl.use(sl.make_mesh("fsdp=8"), rules):
        assert sl.shard(model) is model
    assert model.mixer.kernel[...].sharding.spec == jax.P("fsdp", None)
    assert model.reader.kernel[...].sharding.spec == jax.P(None, None)
    assert model.norm.mean[...].sharding.is_fully_replicated
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(after))
    np.testing.assert_allclose(model.norm(model(tokens)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.mesh
def test_shard_places_linen_variables_in_memory():
    images = image_batches()[0]["images"]
    variables = ConvNet().init(jax.random.key(0), images, train=False)
    placed = sl.shard(variables, sl.make_mesh("fsdp=8"), sl.rules.FSDP)
    assert placed["params"]["Dense_0"]["kernel"].sharding.spec == jax.P("fsdp", None)
    assert placed["batch_stats"]["BatchNorm_0"]["mean"].sharding.is_fully_replicated
    expected = ConvNet().apply(variables, images, train=False)
    found = ConvNet().apply(placed, images, train=False)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_shard_keeps_the_boxes_of_linen_variables():
    variables = Annotated().init(jax.random.key(0), regression_batch()["x"])
    placed = sl.shard(variables, sl.make_mesh("fsdp=4,tensor=2"), sl.rules.STANDARD)
    kernel = placed["params"]["Dense_0"]["kernel"]
    assert isinstance(kernel, linen.LogicallyPartitioned)
    assert kernel.names == ("embed", "mlp")
    assert kernel.value.sharding.spec == jax.P("fsdp", "tensor")
