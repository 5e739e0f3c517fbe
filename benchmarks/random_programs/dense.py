"""Pieces over the last dim: dense layers, norms, gates and experts, [..., features] to the same."""

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax

ACTIVATIONS = {"tanh": jnp.tanh, "gelu": jax.nn.gelu, "relu": jax.nn.relu, "silu": jax.nn.silu}
NORMS = ("layer", "rms", "group", "batch")


def norm(kind: str) -> linen.Module:
    """Returns a normalisation; the kind is one of `NORMS`."""
    return {
        "layer": linen.LayerNorm,
        "rms": linen.RMSNorm,
        "group": lambda: linen.GroupNorm(num_groups=4),
        "batch": lambda: linen.BatchNorm(use_running_average=False),
    }[kind]()


class Chain(linen.Module):
    """Dense layers, one after the other; a width of 0 is that of the input."""

    widths: tuple[int, ...]
    activation: str
    use_bias: bool

    @linen.compact
    def __call__(self, x):
        features = x.shape[-1]
        for width in (*self.widths, features):
            dense = linen.Dense(width or features, use_bias=self.use_bias)
            x = ACTIVATIONS[self.activation](dense(x))
        return x


class Residual(linen.Module):
    """A norm, an expansion and a contraction added to the input, as in a transformer."""

    hidden: int
    activation: str
    norm: str | None
    dropout: float = 0.0

    @linen.compact
    def __call__(self, x):
        h = norm(self.norm)(x) if self.norm else x
        h = ACTIVATIONS[self.activation](linen.Dense(self.hidden)(h))
        if self.dropout:
            h = linen.Dropout(self.dropout, deterministic=False)(h)
        return x + linen.Dense(x.shape[-1])(h)


class Gated(linen.Module):
    """SwiGLU: two expansions of which one gates the other."""

    hidden: int

    @linen.compact
    def __call__(self, x):
        gate, up = (linen.Dense(self.hidden, use_bias=False)(x) for _ in range(2))
        return linen.Dense(x.shape[-1], use_bias=False)(jax.nn.silu(gate) * up)


class NormChain(linen.Module):
    """Dense layers with a norm after each."""

    kinds: tuple[str, ...]

    @linen.compact
    def __call__(self, x):
        for kind in self.kinds:
            x = jnp.tanh(norm(kind)(linen.Dense(x.shape[-1])(x)))
        return x


class Tied(linen.Module):
    """One matrix for the way up and, transposed, for the way down."""

    hidden: int

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        kernel = self.param("kernel", init, (x.shape[-1], self.hidden))
        return x + jnp.einsum(
            "...h,dh->...d", jnp.tanh(jnp.einsum("...d,dh->...h", x, kernel)), kernel
        )


class Bilinear(linen.Module):
    """A tensor of three dims contracted with two projections of the input."""

    rank: int

    @linen.compact
    def __call__(self, x):
        left, right = (linen.DenseGeneral((2, self.rank))(x) for _ in range(2))
        shape = (2, self.rank, self.rank, x.shape[-1])
        core = self.param("core", linen.initializers.normal(0.3), shape)
        return jnp.tanh(jnp.einsum("...ha,...hb,habd->...d", left, right, core))


class DenseExperts(linen.Module):
    """Every expert sees every row; a softmax weighs what they return."""

    experts: int
    hidden: int

    @linen.compact
    def __call__(self, x):
        width = x.shape[-1]
        init = linen.initializers.lecun_normal()
        up = self.param("up", init, (self.experts, width, self.hidden))
        down = self.param("down", init, (self.experts, self.hidden, width))
        weights = linen.softmax(linen.Dense(self.experts, name="router")(x))
        h = linen.gelu(jnp.einsum("...d,edh->...eh", x, up))
        return x + jnp.einsum("...eh,ehd,...e->...d", h, down, weights)


class TopFeatures(linen.Module):
    """The largest of the hidden units, and what they are called, pass on."""

    hidden: int
    top: int

    @linen.compact
    def __call__(self, x):
        values, indices = lax.top_k(linen.Dense(self.hidden)(x), self.top)
        names = linen.Embed(self.hidden, x.shape[-1])(indices)
        return x + linen.Dense(x.shape[-1])(values) + names.mean(-2)


class Sorted(linen.Module):
    """Hidden units in sorted order, read by another layer."""

    hidden: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(x.shape[-1])(jnp.sort(linen.Dense(self.hidden)(x), axis=-1))


class Running(linen.Module):
    """Running sums over the features between two dense layers."""

    hidden: int
    reverse: bool

    @linen.compact
    def __call__(self, x):
        h = lax.cumsum(linen.Dense(self.hidden)(x), axis=x.ndim - 1, reverse=self.reverse)
        return x + linen.Dense(x.shape[-1])(h / self.hidden)


class Scanned(linen.Module):
    """Residual layers with stacked parameters, scanned, each rematerialised where asked for."""

    depth: int
    hidden: int
    remat: bool

    @linen.compact
    def __call__(self, x):
        block = linen.remat(_Layer) if self.remat else _Layer
        axes, rngs = {"params": 0}, {"params": True}
        layers = linen.scan(block, variable_axes=axes, split_rngs=rngs, length=self.depth)
        return layers(self.hidden)(x, None)[0]


class _Layer(linen.Module):
    hidden: int

    @linen.compact
    def __call__(self, x, _):
        h = jnp.tanh(linen.Dense(self.hidden)(linen.LayerNorm()(x)))
        return x + linen.Dense(x.shape[-1])(h), None


class Repeated(linen.Module):
    """One layer applied again and again in a loop."""

    times: int

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        kernel = self.param("kernel", init, (x.shape[-1], x.shape[-1]))

        def again(_, y):
            return jnp.tanh(jnp.matmul(y, kernel) + x)

        return lax.fori_loop(0, self.times, again, x)


class Either(linen.Module):
    """One of two layers, as the batch decides."""

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        shape = (x.shape[-1], x.shape[-1])
        left, right = (self.param(name, init, shape) for name in ("left", "right"))

        def first(x):
            return jnp.tanh(jnp.matmul(x, left))

        def second(x):
            return jax.nn.silu(jnp.matmul(x, right)) + jnp.matmul(x, left)

        return lax.cond(jnp.sum(x) > 0, first, second, x)


class Rounded(linen.Module):
    """Hidden units that are rounded, with the gradient of the identity, clipped."""

    hidden: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(x.shape[-1])(_round(linen.Dense(self.hidden)(x)))


@jax.custom_vjp
def _round(x):
    return jnp.round(4 * x) / 4


_round.defvjp(lambda x: (_round(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 2, g, 0),))

PIECES = {
    "square": lambda r: Chain((0,) * r.pick(2, 3, 3, 5), r.pick("tanh", "silu"), r.chance(0.5)),
    "chain": lambda r: Chain(
        tuple(r.pick(16, 16, 32, 64) for _ in range(r.pick(1, 2, 3))),
        r.pick(*ACTIVATIONS),
        r.pick(True, False),
    ),
    "residual": lambda r: Residual(
        r.pick(16, 32, 64),
        r.pick(*ACTIVATIONS),
        r.pick(None, "layer", "rms"),
        r.pick(0.0, 0.0, 0.2),
    ),
    "gated": lambda r: Gated(r.pick(16, 32, 64)),
    "norm_chain": lambda r: NormChain(tuple(r.pick(*NORMS) for _ in range(r.pick(1, 2, 3)))),
    "tied": lambda r: Tied(r.pick(16, 32)),
    "bilinear": lambda r: Bilinear(r.pick(4, 8)),
    "dense_experts": lambda r: DenseExperts(r.pick(4, 8), r.pick(16, 32)),
    "top_k": lambda r: TopFeatures(r.pick(16, 32), r.pick(2, 4, 8)),
    "sort": lambda r: Sorted(r.pick(16, 32)),
    "cumsum": lambda r: Running(r.pick(16, 32), r.pick(True, False)),
    "scan": lambda r: Scanned(r.pick(2, 4, 8), r.pick(16, 32), r.pick(True, False)),
    "loop": lambda r: Repeated(r.pick(2, 3)),
    "cond": lambda r: Either(),
    "custom_vjp": lambda r: Rounded(r.pick(16, 32)),
}
"""A function of each piece that draws it: `draw(random) -> module`."""
