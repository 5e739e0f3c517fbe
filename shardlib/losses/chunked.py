"""A cross-entropy over the classes of a vocabulary, chunk by chunk."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from shardlib.errors import ModelError
from shardlib.losses.aggregate import Mean
from shardlib.losses.weighted import Statistics, loss_of, statistics
from shardlib.mesh import entry_axes
from shardlib.rules import AxisRules
from shardlib.sharding.constrain import Scope, active, constrain, use

VOCAB = "vocab"
_TILE = 128
"""Classes in a tile of a TPU. Of gradients of other numbers of classes XLA for TPUs (libtpu 0.0.42)
makes an all-reduce in place of a reduce-scatter."""
_MOST_REPEATED = 0.02
"""Classes that chunks of whole tiles may repeat, relative to all."""
Leaves = list[Any]
"""Arrays in the order of the leaves of the weights; None for those that are elsewhere."""


def chunked_cross_entropy(
    project: Callable[[Any, jax.Array], jax.Array],
    weights: PyTree,
    x: Float[Array, "batch length embed"],
    labels: Int[Array, "batch length"],
    mask: Bool[Array, "batch length"] | None = None,
    *,
    axes: PyTree,
    num_chunks: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the `cross_entropy` of `project(weights, x)`, whose logits never exist as a whole.

    The V classes are cut into chunks that are computed one after the other. At most
    [batch, length, V / num_chunks] of the logits [batch, length, V] exist at a time, and only as
    many of the weights are gathered. The backward pass computes the logits of each chunk again.
    Loss and gradients equal the unchunked ones up to the rounding of sums. The gradient of `x` is
    summed over the chunks in float32.

    On a mesh each chunk of the weights is gathered once forward and once backward. Its gradient is
    reduced once, straight to its placement. If the rules cut `vocab`, each device cuts its own part
    of the classes into chunks, and sums over the parts follow the loop.

    Args:
        project: `project(weights, x) -> logits`, from [batch, length, embed] to
            [batch, length, C], with the weights of any C classes. It must not close over arrays
            that are differentiated or sharded.
        weights: Pytree of arrays; on a mesh it may have any sharding.
        x: The inputs of `project`.
        labels: See `cross_entropy`.
        mask: None for all.
        axes: Pytree like `weights` with a tuple for each array: the logical axis, or None, of each
            dim. The dim called `vocab` is cut into chunks. An array without one is used whole by
            each chunk, and its gradient is summed in float32.
        num_chunks: Number of chunks. If they cannot be of one size, which is best a multiple of
            128, the last chunk repeats classes of the one before, and they count once.
        label_smoothing: See `cross_entropy`.
        z_loss: See `cross_entropy`.

    Raises:
        ModelError: If `axes` do not fit `weights`, or a device has too few classes for the chunks.

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", section 4.
    """
    head = _head(project, weights, axes, num_chunks)
    # A copy of x for each part of the classes: a device sums the gradient of its copy over its
    # chunks, and the compiler sums over the copies behind the loop.
    copies = head.placed(jnp.broadcast_to(x[None], (head.parts, *x.shape)))
    leaves = head.cut(jax.tree.leaves(weights))
    found: Any = _of_chunks(head, bool(label_smoothing), copies, leaves, labels)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    return loss_of(_joined(found, head.sizes), head.num_classes, mask, **options)


@dataclasses.dataclass(frozen=True)
class _Head:
    """A projection to logits whose classes are cut into parts, and each part into chunks."""

    project: Callable[[Any, jax.Array], jax.Array]
    treedef: Any
    """The structure of the weights."""
    axes: tuple[tuple[str | None, ...], ...]
    """The logical axes of each leaf."""
    num_classes: int
    num_chunks: int
    size: int
    """The classes of a chunk of a part."""
    parts: int
    """The parts into which the rules cut the classes."""
    mesh_axes: tuple[str, ...]
    """The mesh axes of the parts."""
    scope: Scope | None

    @property
    def part_size(self) -> int:
        return self.num_classes // self.parts

    @property
    def repeated(self) -> int:
        """The classes that the last chunk of a part repeats."""
        return self.num_chunks * self.size - self.part_size

    @property
    def sizes(self) -> Float[Array, " chunks"]:
        """The classes of a part that count in each chunk."""
        return jnp.full(self.num_chunks, self.size, jnp.float32).at[-1].add(-self.repeated)

    def is_cut(self, leaf: int) -> bool:
        return VOCAB in self.axes[leaf]

    def cut(self, leaves: Sequence[jax.Array]) -> Leaves:
        """Returns arrays of classes as [chunks, parts, size, ...], and others as they are."""
        return [self._cut(i, leaf) if self.is_cut(i) else leaf for i, leaf in enumerate(leaves)]

    def _cut(self, i: int, leaf: jax.Array) -> jax.Array:
        leaf = jnp.moveaxis(leaf, self.axes[i].index(VOCAB), 0)
        rest = leaf.shape[1:]
        leaf = leaf.reshape(self.parts, self.part_size, *rest)
        if self.repeated:
            first = leaf[:, : (self.num_chunks - 1) * self.size]
            leaf = jnp.concatenate([first, leaf[:, -self.size :]], axis=1)
        leaf = leaf.reshape(self.parts, self.num_chunks, self.size, *rest)
        with self._rules("params"):
            return constrain(jnp.moveaxis(leaf, 1, 0), None, *self._names(i), kind="params")

    def _names(self, i: int) -> tuple[str | None, ...]:
        """Returns the logical axes of a chunk of a leaf [parts, size, ...]."""
        return (VOCAB, None, *(name for name in self.axes[i] if name != VOCAB))

    def gathered(self, chunk: Leaves) -> Leaves:
        """Returns a chunk of the weights with all dims whole but that of the parts."""

        def gather(i: int, leaf: jax.Array) -> jax.Array:
            # As stored first: else XLA gathers all chunks before the loop.
            leaf = constrain(leaf, *self._names(i), kind="params")
            return constrain(leaf, VOCAB, *[None] * (leaf.ndim - 1))

        with self._rules("params"):
            return [None if leaf is None else gather(i, leaf) for i, leaf in enumerate(chunk)]

    def scattered(self, gradients: Leaves) -> Leaves:
        """Returns the gradients of a gathered chunk, placed as gradients are."""
        with self._rules("gradients"):
            return [
                None if g is None else constrain(g, *self._names(i), kind="params")
                for i, g in enumerate(gradients)
            ]

    def placed(self, x: jax.Array) -> jax.Array:
        """Places [parts, batch, length, ...]."""
        with self._rules("params"):
            return constrain(x, VOCAB, "batch", "length", None)

    def statistics(
        self,
        x: Float[Array, "parts batch length embed"],
        weights: Leaves,
        labels: Int[Array, "batch length"],
        chunk: Int[Array, ""],
        *,
        top: Float[Array, "parts batch length"] | None = None,
        with_sum: bool,
    ) -> Statistics:
        """Returns the statistics [parts, batch, length] of the logits of one chunk; see
        `statistics` for `top`. Weights are leaves [parts, size, ...], gathered, and whole ones."""
        first = jnp.minimum(chunk * self.size, self.part_size - self.size)
        own = first + jnp.arange(self.size, dtype=jnp.int32)
        counted = own >= chunk * self.size if self.repeated else None
        parts = jnp.arange(self.parts, dtype=jnp.int32)[:, None, None, None]
        classes = (parts * self.part_size + own[None, None, None]).astype(labels.dtype)
        logits = self.placed(self._logits(x, weights))
        options = {"counted": counted, "top": top, "with_sum": with_sum}
        return statistics(logits, labels[None], classes, **options)

    def _logits(self, x: jax.Array, weights: Leaves) -> jax.Array:
        def of_part(weights: Leaves, x: jax.Array) -> jax.Array:
            whole = [
                jnp.moveaxis(leaf, 0, self.axes[i].index(VOCAB)) if self.is_cut(i) else leaf
                for i, leaf in enumerate(weights)
            ]
            with self._rules("params", in_part=True):
                return self.project(jax.tree.unflatten(self.treedef, whole), x)

        cut = [0 if self.is_cut(i) else None for i in range(len(weights))]
        over = self.mesh_axes or None
        return jax.vmap(of_part, in_axes=(cut, 0), spmd_axis_name=over)(weights, x)

    def _rules(
        self, section: Literal["params", "gradients"], *, in_part: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """Activates the rules under which the mesh axes of the parts cut nothing else, and within a
        part nothing at all."""
        if self.scope is None:
            return contextlib.nullcontext()
        rules = _freed(self.scope.rules, self.mesh_axes, () if in_part else self.mesh_axes)
        return use(self.scope.mesh, rules.of(section))  # type: ignore[arg-type]


def _freed(rules: AxisRules, mesh_axes: tuple[str, ...], vocab: tuple[str, ...]) -> AxisRules:
    """Returns rules in which `vocab` goes to some mesh axes, and nothing else to `mesh_axes`."""

    def changed(table: Any) -> dict[str, Any]:
        freed = {
            name: [tuple(a for a in one if a not in mesh_axes) for one in alternatives]
            for name, alternatives in table
        }
        return {**freed, VOCAB: [vocab]}

    return rules.override(changed(rules.params), changed(rules.activations))


def _head(project: Any, weights: PyTree, axes: PyTree, num_chunks: int) -> _Head:
    leaves, treedef = jax.tree.flatten(weights)
    names = tuple(jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple)))
    num_classes, scope = _num_classes(leaves, names), active()
    mesh_axes: tuple[str, ...] = ()
    if scope is not None:
        spec = scope.sharding((VOCAB,), (num_classes,), "activations").spec
        mesh_axes = tuple(entry_axes(spec[0]))
    parts = 1 if scope is None else scope.parts(VOCAB, num_classes)
    held = num_classes // parts
    if not 1 <= num_chunks <= held:
        raise ModelError(
            f"{num_chunks} chunks of the loss cannot be made of the {held} classes of a device.\n"
            f"  Choose a number of chunks from 1 to {held}."
        )
    size = -(-held // num_chunks)
    tiled = -(-size // _TILE) * _TILE
    if num_chunks * tiled <= (1 + _MOST_REPEATED) * held:
        size = tiled
    return _Head(
        project, treedef, names, num_classes, -(-held // size), size, parts, mesh_axes, scope
    )


def _num_classes(leaves: Sequence[jax.Array], axes: tuple[Any, ...]) -> int:
    """Returns the number of classes; raises `ModelError` if axes do not fit the weights."""
    shapes = [leaf.shape for leaf in leaves]
    fits = len(axes) == len(shapes) and all(map(_is_of, axes, shapes))
    sizes = (
        {s[a.index(VOCAB)] for a, s in zip(axes, shapes, strict=True) if VOCAB in a} if fits else ()
    )
    if len(sizes) == 1:
        return next(iter(sizes))
    raise ModelError(
        f"axes are {list(axes)} for weights of the shapes {shapes}.\n"
        "  Give each array a tuple with a name or None for each dim, such as ('embed', 'vocab'), "
        "and name the dim of the classes 'vocab', which has one size."
    )


def _is_of(axes: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(axes, tuple) and len(axes) == len(shape) and axes.count(VOCAB) <= 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_chunks(
    head: _Head, with_sum: bool, x: jax.Array, weights: Leaves, labels: jax.Array
) -> Statistics:
    """Returns the statistics [chunks, parts, batch, length] of all chunks.

    It is differentiated by hand because its derivative by JAX would hold `x` in float32, and would
    place the gradients of gathered weights as gathered first.
    """
    cut, whole = _divided(head, weights)

    def of_chunk(indexed: tuple[jax.Array, Leaves]) -> Statistics:
        index, chunk = indexed
        held = _merged(head.gathered(chunk), whole)
        return head.statistics(x, held, labels, index, with_sum=with_sum)

    return jax.lax.map(of_chunk, (jnp.arange(head.num_chunks, dtype=jnp.int32), cut))


def _forward(
    head: _Head, with_sum: bool, x: jax.Array, weights: Leaves, labels: jax.Array
) -> tuple[Statistics, Any]:
    found: Any = _of_chunks(head, with_sum, x, weights, labels)
    return found, (x, weights, labels, found.top)


def _backward(head: _Head, with_sum: bool, kept: Any, given: Statistics) -> tuple[Any, ...]:
    x, weights, labels, tops = kept
    cut, whole = _divided(head, weights)
    learned, others = _floats(whole)

    def of_chunk(sums: Any, indexed: Any) -> tuple[Any, Leaves]:
        index, chunk, top, given = indexed
        chunk, fixed = _floats(head.gathered(chunk))

        def differentiable(x: jax.Array, learned: Leaves, chunk: Leaves) -> Any:
            held = _merged(chunk, fixed, learned, others)
            found = head.statistics(x, held, labels, index, top=top, with_sum=with_sum)
            return _differentiable(found)

        _, transposed = jax.vjp(differentiable, x, learned, chunk)
        of_x, of_learned, of_chunk = transposed(given)
        added = head.placed(of_x), of_learned
        sums = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), sums, added)
        return sums, head.scattered(of_chunk)

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (x, learned))
    indices = jnp.arange(head.num_chunks, dtype=jnp.int32)
    zeros = (head.placed(zeros[0]), zeros[1])
    sums, of_cut = jax.lax.scan(of_chunk, zeros, (indices, cut, tops, _differentiable(given)))
    of_x, of_learned = jax.tree.map(lambda g, a: g.astype(a.dtype), sums, (x, learned))
    return of_x, _merged(of_cut, of_learned), None


_of_chunks.defvjp(_forward, _backward)


def _differentiable(found: Statistics) -> Any:
    """Returns the statistics with a gradient: that of `top` cancels out, and `tied` has none."""
    return found.exp_sum, found.label, found.shifted_sum


def _divided(head: _Head, leaves: Leaves) -> tuple[Leaves, Leaves]:
    """Returns leaves that are cut into chunks, and the others."""
    cut = [leaf if head.is_cut(i) else None for i, leaf in enumerate(leaves)]
    return cut, [None if head.is_cut(i) else leaf for i, leaf in enumerate(leaves)]


def _floats(leaves: Leaves) -> tuple[Leaves, Leaves]:
    """Returns leaves that have a gradient, and the others, such as random keys."""
    is_float = [a is not None and jnp.issubdtype(a.dtype, jnp.inexact) for a in leaves]
    pairs = list(zip(leaves, is_float, strict=True))
    return [a if own else None for a, own in pairs], [None if own else a for a, own in pairs]


def _merged(*groups: Leaves) -> Leaves:
    """Returns each leaf from the group that has it."""
    return [next((a for a in each if a is not None), None) for each in zip(*groups, strict=True)]


def _joined(found: Statistics, sizes: Float[Array, " chunks"]) -> Statistics:
    """Returns the statistics [batch, length] of all classes from the statistics of chunks,
    [chunks, parts, batch, length]. `sizes` are the classes of a part that count in each chunk."""
    of_chunks = 0, 1
    tops = jax.lax.stop_gradient(found.top)
    top = jnp.max(tops, axis=of_chunks)
    below = tops - top[None, None]
    shifted_sum = None
    if found.shifted_sum is not None:
        moved = found.shifted_sum + below * sizes[:, None, None, None]
        shifted_sum = jnp.sum(moved, axis=of_chunks)
    return Statistics(
        top,
        jnp.sum(found.exp_sum * jnp.exp(below), axis=of_chunks),
        jnp.sum(found.label, axis=of_chunks),
        jnp.any(found.tied & (below == 0.0), axis=of_chunks),
        shifted_sum,
    )
