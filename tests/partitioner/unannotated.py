"""Six small linen models that know nothing of shardlib, with losses, batches and path rules."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import shardlib as sl

WIDTH, CLASSES, LENGTH = 16, 16, 8


class Dense4(linen.Module):
    """Four layers whose kernels lie alike, as one pattern over their paths places them."""

    @linen.compact
    def __call__(self, x):
        for _ in range(4):
            x = jnp.tanh(linen.Dense(x.shape[-1])(x))
        return x


class Block(linen.Module):
    """A layer of a transformer."""

    @linen.compact
    def __call__(self, x):
        y = linen.LayerNorm()(x)
        q, k, v = (linen.DenseGeneral((2, WIDTH // 2), name=name)(y) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float32((WIDTH // 2) ** 0.5)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.float32(-1e9)))
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + linen.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(y)
        y = linen.gelu(linen.Dense(2 * WIDTH, name="up")(linen.LayerNorm()(x)))
        return x + linen.Dense(WIDTH, name="down")(y)


class Layer(linen.Module):
    """A block as `linen.scan` calls it."""

    @linen.compact
    def __call__(self, x, _):
        return linen.remat(Block)(name="block")(x), None


class Transformer(linen.Module):
    """A language model of two layers, one after the other or scanned and rematerialised."""

    scanned: bool = False

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(CLASSES, WIDTH, name="embed")(tokens)
        if self.scanned:
            layers = linen.scan(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = layers(name="layers")(x, None)
        else:
            for number in range(2):
                x = Block(name=f"layer_{number}")(x)
        return linen.Dense(CLASSES, use_bias=False, name="head")(linen.LayerNorm(name="norm")(x))


class ConvNet(linen.Module):
    """Depthwise and strided convolutions, batch statistics, pools."""

    @linen.compact
    def __call__(self, images):
        x = linen.Conv(WIDTH, (3, 3), strides=2, name="stem")(images)
        x = linen.relu(linen.BatchNorm(use_running_average=False)(x))
        x = linen.Conv(WIDTH, (3, 3), feature_group_count=WIDTH, name="depthwise")(x)
        x = linen.max_pool(linen.relu(x), (3, 3), (2, 2), "SAME")
        x = linen.Conv(2 * WIDTH, (1, 1), name="pointwise")(x)
        x = lax.reduce_window(linen.relu(x), 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "VALID") / 4
        return linen.Dense(CLASSES, name="head")(x.reshape(x.shape[0], -1))


class LSTM(linen.Module):
    """A recurrent model over `lax.scan`."""

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(CLASSES, WIDTH, name="embed")(tokens)
        x = linen.RNN(linen.OptimizedLSTMCell(WIDTH), name="lstm")(x)
        return linen.Dense(CLASSES, name="head")(x)


class DenseExperts(linen.Module):
    """Every token goes through every expert, weighed by a router."""

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        gates = linen.softmax(linen.Dense(4, name="router")(x))
        up = self.param("up", init, (4, WIDTH, 2 * WIDTH))
        down = self.param("down", init, (4, 2 * WIDTH, WIDTH))
        y = linen.gelu(jnp.einsum("btd,edh->bteh", x, up))
        return x + jnp.einsum("bteh,ehd,bte->btd", y, down, gates)


def squared_error(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def cross_entropy(model, batch, rng):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def vectors(rows, length=None):
    rng = np.random.default_rng(0)
    shape = (rows, WIDTH) if length is None else (rows, length, WIDTH)
    x = rng.normal(size=shape).astype(np.float32)
    return {"x": x, "y": np.tanh(x[..., ::-1]).copy()}


def tokens(rows):
    rows = np.random.default_rng(1).integers(0, CLASSES, (rows, LENGTH + 1)).astype(np.int32)
    return {"x": rows[:, :-1], "y": rows[:, 1:]}


def images(rows):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(rows, 8, 8, 3)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, rows).astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and what a user writes to train it."""

    model: linen.Module
    loss: Callable[..., Any]
    batch: Callable[[int], dict[str, np.ndarray]]
    paths: dict[str, tuple[str | None, ...]]

    @property
    def rules(self):
        return sl.rules.STANDARD.override(paths=self.paths)

    @property
    def inputs(self):
        x = self.batch(2)["x"]
        return (jax.ShapeDtypeStruct(x.shape, x.dtype),)


BLOCK: dict[str, tuple[str | None, ...]] = {
    **{f"**/{name}/kernel": ("embed", "heads", "head_dim") for name in "qkv"},
    "**/out/kernel": ("heads", "head_dim", "embed"),
    "**/up/kernel": ("embed", "mlp"),
    "**/down/kernel": ("mlp", "embed"),
}
AROUND = {"**/embedding": ("vocab", "embed"), "head/kernel": ("embed", "vocab")}
STACKED = {path: ("layers", *axes) for path, axes in BLOCK.items()} | AROUND
CASES = {
    "dense": Case(Dense4(), squared_error, vectors, {"**/Dense_*/kernel": ("embed", "mlp")}),
    "transformer": Case(Transformer(), cross_entropy, tokens, BLOCK | AROUND),
    "scanned": Case(Transformer(scanned=True), cross_entropy, tokens, STACKED),
    # Without a rule the kernels lie over fsdp as they divide, and tensor is idle.
    "convolutions": Case(ConvNet(), cross_entropy, images, {}),
    "lstm": Case(
        LSTM(),
        cross_entropy,
        tokens,
        {"**/kernel": ("embed", "mlp"), "**/embedding": ("vocab", "embed")},
    ),
    "experts": Case(
        DenseExperts(),
        squared_error,
        lambda rows: vectors(rows, LENGTH),
        {
            "up": (None, "embed", "mlp"),
            "down": (None, "mlp", "embed"),
            "router/kernel": ("embed", None),
        },
    ),
}
