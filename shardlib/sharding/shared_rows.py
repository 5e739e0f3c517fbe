"""Rows of which each device along a mesh axis holds a part, and operations that devices share.

A loss can be computed in a manual region over an axis that cuts the dim `length` of its batch. Each
device then sees its own positions. Operations between positions, such as attention, ask here for
the parts of a row and exchange what they need themselves. In a proof that no other operation is
between positions, `opaque` stands for each of them.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching

from shardlib.errors import ModelError
from shardlib.mesh import mesh_sizes
from shardlib.sharding.constrain import Scope, active, plainly

OPAQUE = "shared_over_rows"
"""The name of the primitive that stands for a shared operation."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Seen:
    parts: int
    scope: Scope | None


_WHOLE = _Seen(1, None)
_rows: contextvars.ContextVar[_Seen] = contextvars.ContextVar("rows", default=_WHOLE)


@contextlib.contextmanager
def rows_cut(parts: int) -> Iterator[None]:
    """Marks the code of a manual region in which each device holds one of `parts` equal parts of
    every row."""
    token = _rows.set(_Seen(parts, None))
    try:
        yield
    finally:
        _rows.reset(token)


@contextlib.contextmanager
def proving(parts: int) -> Iterator[None]:
    """Traces plainly, with `opaque` in place of each shared operation, for one of `parts` parts."""
    scope = active()
    token = _rows.set(_Seen(parts, scope))
    try:
        with plainly(f"rows of {scope and mesh_sizes(scope.mesh)}"):
            yield
    finally:
        _rows.reset(token)


def row_parts() -> int:
    """Returns the number of parts of a row, of which the code being traced holds one; 1 where it
    holds whole rows or the compiler cuts them."""
    return _rows.get().parts


def proof_scope() -> Scope | None:
    """Returns the mesh and rules for which `proving` traces; None outside of it."""
    return _rows.get().scope


def opaque(
    what: Hashable,
    arrays: Sequence[jax.Array | None],
    result: jax.ShapeDtypeStruct,
    dim: int = 1,
    *,
    tag: str | None = None,
) -> jax.Array:
    """Returns a value that is traced and never computed: the result of a shared operation, given as
    `what`, with its options. Operands with several dims are cut along `dim`, the dim of the
    positions, as is the result; operands with one dim are whole. With a `tag` for remat policies
    the gradient takes the result too, before the gradient of the result."""
    given = [x for x in arrays if x is not None]
    return _opaque((what, dim), tag, result.shape, jnp.dtype(result.dtype), *given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _opaque(
    what: Hashable, tag: str | None, shape: tuple[int, ...], dtype: Any, *arrays: jax.Array
) -> jax.Array:
    return _bound(what, tag, shape, dtype, *arrays)


def _bound(
    what: Hashable, tag: str | None, shape: tuple[int, ...], dtype: Any, *arrays: jax.Array
) -> jax.Array:
    (result,) = _shared.bind(*arrays, what=what, results=((shape, dtype),), linear=False)
    return result if tag is None else checkpoint_name(result, tag)


def _forward(what: Hashable, tag: str | None, shape: Any, dtype: Any, *arrays: jax.Array) -> Any:
    # A call of `_opaque` would hide the tag from remat policies.
    result = _bound(what, tag, shape, dtype, *arrays)
    return result, (arrays, () if tag is None else (result,))


def _backward(what: Hashable, tag: Any, shape: Any, dtype: Any, known: Any, grad: jax.Array) -> Any:
    del tag, shape, dtype
    arrays, result = known
    moving = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
    results = tuple(
        (x.shape, x.dtype) for x, is_float in zip(arrays, moving, strict=True) if is_float
    )
    grads = iter(_shared.bind(*arrays, *result, grad, what=what, results=results, linear=True))
    return tuple(next(grads) if is_float else None for is_float in moving)


_opaque.defvjp(_forward, _backward)
_shared = Primitive(OPAQUE)
_shared.multiple_results = True


@_shared.def_abstract_eval
def _(*arrays: Any, what: Hashable, results: Any, linear: bool) -> list[Any]:
    del arrays, what, linear
    return [ShapedArray(shape, dtype) for shape, dtype in results]


def _batched(
    arrays: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    what: Hashable,
    results: Any,
    linear: bool,
) -> tuple[list[jax.Array], list[int]]:
    """Rows of all copies under `jax.vmap` are rows of one operation."""
    mapped = [(x, dim) for x, dim in zip(arrays, dims, strict=True) if dim is not None]
    if any(x.ndim == 2 for x, _ in mapped):
        raise ModelError(
            "attention whose sinks differ between the copies of jax.vmap is not one operation.\n"
            "  Let all copies share their sinks, or call the model for each copy in turn."
        )
    copies = mapped[0][0].shape[mapped[0][1]]

    def merged(x: jax.Array, dim: int | None) -> jax.Array:
        if dim is None and x.ndim == 1:
            return x
        each = jnp.broadcast_to(x, (copies, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        return each.reshape(-1, *each.shape[2:])

    def apart(x: jax.Array) -> jax.Array:
        if x.ndim == 1:
            return jnp.broadcast_to(x, (copies, *x.shape))
        return x.reshape(copies, -1, *x.shape[1:])

    rows = [((copies * n[0], *n[1:]) if len(n) > 1 else n, dtype) for n, dtype in results]
    given = map(merged, arrays, dims)
    made = _shared.bind(*given, what=what, results=tuple(rows), linear=linear)
    return [apart(x) for x in made], [0] * len(made)


batching.primitive_batchers[_shared] = _batched
