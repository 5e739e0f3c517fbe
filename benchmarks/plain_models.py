"""Nine models in plain Flax NNX that name no axis: what `find_rules.py` asks about.

Each `Case` holds a module at two sizes: `large` for a compiled program, `tiny` for a run on CPU
devices. Hand-written rules are paths alone, as a Megatron engineer would cut the model.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

Axes = tuple[str | None, ...]


def dense(width: int, out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(width, out, use_bias=False, rngs=rngs)


def embed(table: nnx.Embed, ids: Any) -> Any:
    """Returns rows of a table in its own dtype; `nnx.Embed` returns the dtype of its creation."""
    return jnp.take(table.embedding[...], ids, axis=0)


class Attention(nnx.Module):
    """Attention by einsum; `memory` is what keys and values are read from."""

    def __init__(self, dim: int, heads: int, rngs: nnx.Rngs, causal: bool = False):
        self.heads, self.causal = heads, causal
        for name in ("query", "key", "value", "out"):
            setattr(self, name, dense(dim, dim, rngs))

    def __call__(self, x: Any, memory: Any = None) -> Any:
        memory = x if memory is None else memory
        parts = (self.query(x), self.key(memory), self.value(memory))
        query, key, value = (p.reshape(*p.shape[:2], self.heads, -1) for p in parts)
        scores = jnp.einsum("blhd,bmhd->bhlm", query, key) * query.shape[-1] ** -0.5
        if self.causal:
            seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), value)
        return self.out(mixed.reshape(*x.shape))


class MLP(nnx.Module):
    def __init__(self, dim: int, hidden: int, out: int, rngs: nnx.Rngs):
        self.up, self.down = dense(dim, hidden, rngs), dense(hidden, out, rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.gelu(self.up(x)))


class Experts(nnx.Module):
    """Two of some experts for each token, which drop what exceeds their capacity.

    Source: Lepikhin et al. 2020, "GShard", algorithm 1, with rows as groups.
    """

    def __init__(self, dim: int, hidden: int, experts: int, rngs: nnx.Rngs):
        self.router = dense(dim, experts, rngs)
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        self.up = nnx.Param(init(rngs.params(), (experts, dim, hidden)))
        self.down = nnx.Param(init(rngs.params(), (experts, hidden, dim)))
        self.experts = experts

    def __call__(self, x: Any) -> Any:
        capacity = 5 * x.shape[1] // (2 * self.experts)
        gates, chosen = lax.top_k(jax.nn.softmax(self.router(x).astype(jnp.float32)), 2)
        ones = jax.nn.one_hot(chosen, self.experts)
        place = jnp.cumsum(ones.sum(2), axis=1) - 1
        places = jax.nn.one_hot(jnp.einsum("bske,bse->bsk", ones, place), capacity)
        combine = jnp.einsum("bsk,bske,bskc->bsec", gates, ones, places).astype(x.dtype)
        taken = jnp.einsum("bsec,bsd->becd", (combine > 0).astype(x.dtype), x)
        hidden = jax.nn.gelu(jnp.einsum("becd,edh->bech", taken, self.up[...]))
        made = jnp.einsum("bech,ehd->becd", hidden, self.down[...])
        return jnp.einsum("bsec,becd->bsd", combine, made)


class Block(nnx.Module):
    """A layer of a transformer, with experts or cross-attention if it has them."""

    def __init__(
        self,
        dim: int,
        heads: int,
        rngs: nnx.Rngs,
        *,
        causal: bool = False,
        cross: bool = False,
        experts: int = 0,
    ):
        self.attention = Attention(dim, heads, rngs, causal)
        self.cross = Attention(dim, heads, rngs) if cross else None
        self.mlp = Experts(dim, 2 * dim, experts, rngs) if experts else MLP(dim, 4 * dim, dim, rngs)
        self.norms = nnx.List([nnx.RMSNorm(dim, rngs=rngs) for _ in range(3)])

    def __call__(self, x: Any, memory: Any = None) -> Any:
        x = x + self.attention(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory)
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, vocab: int, dim: int, heads: int, experts: int = 0):
        self.tokens = nnx.Embed(vocab, dim, rngs=rngs)
        self.blocks = nnx.List(
            [Block(dim, heads, rngs, causal=True, experts=experts) for _ in range(2)]
        )
        self.norm, self.head = nnx.RMSNorm(dim, rngs=rngs), dense(dim, vocab, rngs)

    def __call__(self, batch: Any) -> Any:
        x = embed(self.tokens, batch["tokens"])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class EncoderDecoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, vocab: int, dim: int, heads: int):
        self.tokens = nnx.Embed(vocab, dim, rngs=rngs)
        self.encoder = nnx.List([Block(dim, heads, rngs) for _ in range(2)])
        self.decoder = nnx.List(
            [Block(dim, heads, rngs, causal=True, cross=True) for _ in range(2)]
        )
        self.head = dense(dim, vocab, rngs)

    def __call__(self, batch: Any) -> Any:
        memory, x = (embed(self.tokens, batch[name]) for name in ("source", "tokens"))
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


class ViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dim: int, heads: int, patch: int, length: int):
        size = (patch, patch)
        self.patches = nnx.Conv(3, dim, size, strides=size, rngs=rngs)
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (length, dim)))
        self.blocks = nnx.List([Block(dim, heads, rngs) for _ in range(2)])
        self.head = dense(dim, 1024, rngs)

    def __call__(self, batch: Any) -> Any:
        x = self.patches(batch["images"])
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...][None]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Residual(nnx.Module):
    """Two convolutions, added to their input; `stride` halves the image."""

    def __init__(self, width: int, out: int, stride: int, rngs: nnx.Rngs):
        strides = (stride, stride)
        self.first = nnx.Conv(width, out, (3, 3), strides=strides, use_bias=False, rngs=rngs)
        self.second = nnx.Conv(out, out, (3, 3), use_bias=False, rngs=rngs)
        self.skip = nnx.Conv(width, out, (1, 1), strides=strides, use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(out, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        y = jax.nn.relu(self.norms[0](self.first(x)))
        return jax.nn.relu(self.norms[1](self.second(y)) + self.skip(x))


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, widths: tuple[int, ...]):
        self.stem = nnx.Conv(3, widths[0], (3, 3), use_bias=False, rngs=rngs)
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nnx.List(
            [Residual(a, b, 2 if n else 1, rngs) for n, (a, b) in enumerate(pairs)]
        )
        self.head = dense(widths[-1], 1024, rngs)

    def __call__(self, batch: Any) -> Any:
        x = self.stem(batch["images"])
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class UNet(nnx.Module):
    """Convolutions down and up again, with the features of each size passed across."""

    def __init__(self, rngs: nnx.Rngs, widths: tuple[int, ...]):
        def conv(width: int, out: int, stride: int = 1) -> nnx.Conv:
            return nnx.Conv(width, out, (3, 3), strides=(stride, stride), rngs=rngs)

        self.stem = conv(3, widths[0])
        steps = list(itertools.pairwise(widths))
        self.downs = nnx.List([conv(a, b, 2) for a, b in steps])
        self.ups = nnx.List(
            [nnx.ConvTranspose(b, a, (3, 3), strides=(2, 2), rngs=rngs) for a, b in steps]
        )
        self.merges = nnx.List([conv(2 * a, a) for a, _ in steps])
        self.norms = nnx.List([nnx.GroupNorm(b, num_groups=4, rngs=rngs) for _, b in steps])
        self.head = conv(widths[0], 3)

    def __call__(self, batch: Any) -> Any:
        x = self.stem(batch["images"])
        kept = []
        for down, norm in zip(self.downs, self.norms, strict=True):
            kept.append(x)
            x = jax.nn.silu(norm(down(x)))
        for up, merge, skip in zip(self.ups[::-1], self.merges[::-1], kept[::-1], strict=True):
            x = jax.nn.silu(merge(jnp.concatenate([up(x), skip], -1)))
        return self.head(x)


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, vocab: int, dim: int):
        self.tokens = nnx.Embed(vocab, dim, rngs=rngs)
        self.layers = nnx.List(
            [nnx.RNN(nnx.OptimizedLSTMCell(dim, dim, rngs=rngs)) for _ in range(2)]
        )
        self.head = dense(dim, vocab, rngs)

    def __call__(self, batch: Any) -> Any:
        x = embed(self.tokens, batch["tokens"])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class GraphNet(nnx.Module):
    """Messages along edges, summed where they arrive; each row is a graph."""

    def __init__(self, rngs: nnx.Rngs, features: int, dim: int):
        self.encode, self.decode = dense(features, dim, rngs), dense(dim, features, rngs)
        self.messages = nnx.List([MLP(2 * dim, 4 * dim, dim, rngs) for _ in range(2)])
        self.updates = nnx.List([MLP(2 * dim, 4 * dim, dim, rngs) for _ in range(2)])

    def __call__(self, batch: Any) -> Any:
        x, ids = self.encode(batch["nodes"]), batch["edges"]
        for message, update in zip(self.messages, self.updates, strict=True):
            ends = [jnp.take_along_axis(x, ids[..., n, None], 1) for n in range(2)]
            sent = message(jnp.concatenate(ends, -1))
            add = functools.partial(jax.ops.segment_sum, num_segments=x.shape[1])
            x = x + update(jnp.concatenate([x, jax.vmap(add)(sent, ids[..., 1])], -1))
        return self.decode(x)


class Selective(nnx.Module):
    """A selective state space by an associative scan.

    Source: Gu and Dao 2023, "Mamba", algorithm 2, without its convolution.
    """

    def __init__(self, dim: int, state: int, rngs: nnx.Rngs):
        inner = 2 * dim
        self.into, self.gate = dense(dim, inner, rngs), dense(dim, inner, rngs)
        self.rates, self.out = dense(inner, inner, rngs), dense(inner, dim, rngs)
        self.write, self.read = dense(inner, state, rngs), dense(inner, state, rngs)
        self.decay = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, state + 1), (inner, 1))))
        self.norm = nnx.RMSNorm(dim, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = self.norm(x)
        u = jax.nn.silu(self.into(y))
        rate = jax.nn.softplus(self.rates(u))
        kept = jnp.exp(-rate[..., None] * jnp.exp(self.decay[...])[None, None])
        added = (rate * u)[..., None] * self.write(u)[..., None, :]

        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        _, states = lax.associative_scan(combine, (kept, added), axis=1)
        mixed = jnp.einsum("blds,bls->bld", states, self.read(u))
        return x + self.out(mixed * jax.nn.silu(self.gate(y)))


class Mamba(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, vocab: int, dim: int, state: int):
        self.tokens = nnx.Embed(vocab, dim, rngs=rngs)
        self.layers = nnx.List([Selective(dim, state, rngs) for _ in range(2)])
        self.head = dense(dim, vocab, rngs)

    def __call__(self, batch: Any) -> Any:
        x = embed(self.tokens, batch["tokens"])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: Any, batch: Any) -> Any:
    """Cross-entropy of `targets` that are ids, else the mean squared error."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found, targets = model(batch).astype(jnp.float32), batch["targets"]
        if jnp.issubdtype(targets.dtype, jnp.integer):
            return optax.softmax_cross_entropy_with_integer_labels(found, targets).mean()
        return jnp.mean((found - targets) ** 2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at two sizes.

    Args:
        module: Module class.
        large: Its arguments for compiled programs.
        tiny: Its arguments for a run.
        batch: Function of one of the two that returns the shape of each leaf of the batch and the
            number of ids, 0 for floats.
        hand: Hand-written axes of parameters by path; empty if there is no known table.
    """

    module: Callable[..., Any]
    large: Mapping[str, Any]
    tiny: Mapping[str, Any]
    batch: Callable[[bool], Mapping[str, tuple[tuple[int, ...], int]]]
    hand: Mapping[str, Axes] = dataclasses.field(default_factory=dict)

    def make(self, *, tiny: bool = False) -> Callable[[nnx.Rngs], Any]:
        """Returns the factory of the module."""
        return lambda rngs: self.module(rngs, **(self.tiny if tiny else self.large))

    def shapes(self, *, tiny: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of a batch."""
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.int32 if ids else jnp.float32)
            for name, (shape, ids) in self.batch(tiny).items()
        }


def _text(rows: int, length: int, vocab: int, *more: str) -> Any:
    def batch(tiny: bool) -> Any:
        leaf = ((8, 16), 64) if tiny else ((rows, length), vocab)
        return dict.fromkeys(("tokens", "targets", *more), leaf)

    return batch


def _images(rows: int, size: int, *, dense: bool = False) -> Any:
    def batch(tiny: bool) -> Any:
        images = (8, 16, 16, 3) if tiny else (rows, size, size, 3)
        targets = (images, 0) if dense else ((images[0],), 1024)
        return {"images": (images, 0), "targets": targets}

    return batch


def _graphs(tiny: bool) -> Any:
    rows, nodes, edges, features = (8, 16, 32, 8) if tiny else (64, 256, 1024, 64)
    leaf = (rows, nodes, features), 0
    return {"nodes": leaf, "targets": leaf, "edges": ((rows, edges, 2), nodes)}


_ENDS = {"tokens/embedding": ("vocab", "embed"), "head/kernel": ("embed", "vocab")}
_BLOCK = {
    **{f"**/{name}/kernel": ("embed", "heads") for name in ("query", "key", "value")},
    "**/out/kernel": ("heads", "embed"),
    "**/mlp/up/kernel": ("embed", "mlp"),
    "**/mlp/down/kernel": ("mlp", "embed"),
}
_EXPERTS = {"**/mlp/up": ("expert", "embed", "mlp"), "**/mlp/down": ("expert", "mlp", "embed")}
_INNER = {f"**/{name}/kernel": ("embed", "mlp") for name in ("into", "gate")}
_LM = {"vocab": 64, "dim": 32, "heads": 4}
_VOCAB = 32_000

CASES = {
    "transformer": Case(
        LanguageModel,
        {"vocab": _VOCAB, "dim": 1024, "heads": 8},
        _LM,
        _text(16, 1024, _VOCAB),
        {**_ENDS, **_BLOCK},
    ),
    "moe": Case(
        LanguageModel,
        {"vocab": _VOCAB, "dim": 1024, "heads": 8, "experts": 8},
        {**_LM, "experts": 4},
        _text(16, 1024, _VOCAB),
        {**_ENDS, **_BLOCK, **_EXPERTS},
    ),
    "resnet": Case(
        ResNet, {"widths": (128, 256, 512, 1024)}, {"widths": (8, 16)}, _images(256, 64)
    ),
    "unet": Case(
        UNet, {"widths": (128, 256, 512)}, {"widths": (8, 16)}, _images(64, 64, dense=True)
    ),
    "vit": Case(
        ViT,
        {"dim": 1024, "heads": 16, "patch": 16, "length": 196},
        {"dim": 32, "heads": 4, "patch": 4, "length": 16},
        _images(128, 224),
        {"patches/kernel": (None, None, None, "embed"), "head/kernel": ("embed", None), **_BLOCK},
    ),
    "encoder-decoder": Case(
        EncoderDecoder,
        {"vocab": _VOCAB, "dim": 1024, "heads": 8},
        _LM,
        _text(16, 512, _VOCAB, "source"),
        {**_ENDS, **_BLOCK},
    ),
    "lstm": Case(
        Recurrent,
        {"vocab": _VOCAB, "dim": 1024},
        {"vocab": 64, "dim": 32},
        _text(64, 128, _VOCAB),
        # The gates are the columns of both kernels. The faster of what one would write: with whole
        # kernels a step takes 1.10 of the time on fsdp=4,tensor=2.
        {**_ENDS, "**/dense_i/kernel": ("embed", "mlp"), "**/dense_h/kernel": (None, "mlp")},
    ),
    "graph": Case(
        GraphNet,
        {"features": 64, "dim": 512},
        {"features": 8, "dim": 32},
        _graphs,
        {"**/up/kernel": ("embed", "mlp"), "**/down/kernel": ("mlp", "embed")},
    ),
    "mamba": Case(
        Mamba,
        {"vocab": _VOCAB, "dim": 1024, "state": 8},
        {"vocab": 64, "dim": 32, "state": 4},
        _text(16, 256, _VOCAB),
        {
            **_ENDS,
            **_INNER,
            "**/rates/kernel": ("embed", "mlp"),
            **{f"**/{name}/kernel": ("mlp", None) for name in ("write", "read")},
            "**/decay": ("mlp", None),
            "**/out/kernel": ("mlp", "embed"),
        },
    ),
}
