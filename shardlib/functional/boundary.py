"""Casts at the boundary of a model: inputs to its compute dtype, results to float32.

A batch holds inputs and targets, and nothing tells them apart. A target must not be rounded. An
input must be, or float32 inputs would turn every product with bfloat16 weights into one in float32.
So the batch stays as it is, and the cast happens where a value crosses into the model: where the
loss calls the model, one of its methods, or one of its submodules. Calls within such a call are the
model's own and cast nothing.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.typing import DTypeLike
from jaxtyping import PyTree

_open: contextvars.ContextVar["_Boundary | None"] = contextvars.ContextVar("boundary", default=None)


@contextlib.contextmanager
def boundary(model: nnx.Module | linen.Module, dtype: DTypeLike, batch: PyTree) -> Iterator[None]:
    """Casts arguments and results of a merged model while a loss calls it.

    Floating arrays among the arguments of a call, also inside tuples, lists and dicts, are cast to
    `dtype`. Floating results narrower than float32 become float32. `batch` itself is not cast as an
    argument, since it may hold targets: the model casts the parts that it reads. With a `dtype` of
    32 bits or more nothing is cast. `model` is the result of `FunctionalModule.merge` for this loss
    alone, and `batch` that of the loss.
    """
    if jnp.finfo(dtype).bits >= 32:
        yield
        return
    if isinstance(model, nnx.Module):
        for _, module in nnx.iter_modules(model):
            is_pytree = not jax.tree_util.all_leaves([module])
            object.__setattr__(module, "__class__", _crossing(type(module), is_pytree))
        entering: Any = contextlib.nullcontext()
    else:
        entering = linen.intercept_methods(functools.partial(_intercept, model))
    token = _open.set(_Boundary(dtype, batch))
    try:
        with entering:
            yield
    finally:
        _open.reset(token)


def carried(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that casts as in this context, wherever it is called."""
    border = _open.get()
    if border is None:
        return fn

    def here(*args: Any, **kwargs: Any) -> Any:
        token = _open.set(border)
        try:
            return fn(*args, **kwargs)
        finally:
            _open.reset(token)

    return here


class _Boundary:
    def __init__(self, dtype: DTypeLike, batch: PyTree):
        self.dtype = dtype
        # A batch that is a single array is an input when it is passed to the model.
        self.batch = None if _is_array(batch) else batch

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `fn` with cast arguments, and returns its results cast back."""
        args = tuple(map(self._enter, args))
        kwargs = {name: self._enter(value) for name, value in kwargs.items()}
        token = _open.set(None)
        try:
            return _cast(fn(*args, **kwargs), jnp.float32, _is_narrow)
        finally:
            _open.reset(token)

    def _enter(self, value: object) -> Any:
        if value is self.batch:
            return value
        return _cast(value, self.dtype, lambda x: x.dtype != self.dtype)


@functools.lru_cache(maxsize=1024)
def _crossing(cls: type, is_pytree: bool) -> type:
    """Returns a subclass whose public methods cross the boundary when the loss calls them."""
    names = {
        name
        for base in cls.__mro__[: cls.__mro__.index(nnx.Module)]
        for name, value in vars(base).items()
        if (name == "__call__" or not name.startswith("_"))
        and not isinstance(value, type | property | staticmethod | classmethod)
        and callable(inspect.getattr_static(cls, name))
    }
    namespace: dict[str, Any] = {name: _method(name) for name in sorted(names)}
    namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    namespace["__doc__"] = cls.__doc__
    made = type(cls)(cls.__name__, (cls,), namespace, pytree=is_pytree)
    for method in namespace.values():
        if callable(method):
            method.crosses = made
    return made


def _method(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = getattr(super(method.crosses, self), name)  # type: ignore[attr-defined]
        border = _open.get()
        return plain(*args, **kwargs) if border is None else border.call(plain, args, kwargs)

    method.__name__ = name
    return method


def _intercept(
    model: linen.Module,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: linen.module.InterceptorContext,
) -> Any:
    border = _open.get()
    if border is None or context.method_name == "setup" or _outermost(context.module) is not model:
        return fn(*args, **kwargs)
    return border.call(fn, args, kwargs)


def _outermost(module: linen.Module) -> Any:
    while isinstance(module.parent, linen.Module):
        module = module.parent
    return module


def _is_array(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _is_narrow(x: jax.Array) -> bool:
    return jnp.finfo(x.dtype).bits < 32


def _cast(tree: PyTree, dtype: DTypeLike, differs: Callable[[Any], bool]) -> PyTree:
    """Casts floating arrays; a tree without any to cast is returned as the same object."""
    own = (nnx.Pytree, nnx.Variable, nnx.State)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, own))
    cast = [
        x.astype(dtype)
        if _is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) and differs(x)
        else x
        for x in leaves
    ]
    is_same = all(new is old for new, old in zip(cast, leaves, strict=True))
    return tree if is_same else treedef.unflatten(cast)
