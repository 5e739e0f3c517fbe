"""Transformations that optax lacks: precision, layer-wise scales, hidden matrices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers

from shardlib.errors import ModelError
from shardlib.paths import matches, path_string

PathPredicate = Callable[[str], bool]


def check_transformation(optimizer: object) -> None:
    """Raises `ModelError` for an optimizer that is not an optax transformation."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ModelError(
            f"the optimizer is {optimizer!r}, which is not an optax transformation.\n"
            "  Pass one, such as optax.adamw(3e-4)."
        )


def matches_any(patterns: Sequence[str]) -> PathPredicate:
    """Returns a predicate that is true for paths matching at least one of the patterns."""
    return lambda path: any(matches(pattern, path) for pattern in patterns)


def is_stacked(patterns: Sequence[str]) -> PathPredicate:
    """Returns a predicate that is true for paths of parameters whose first dim stacks layers.

    A path with a numbered segment (`layers/0/kernel`) belongs to a list of layers. Each layer of a
    list has its own parameters, so none of them is stacked.
    """
    listed = matches_any(patterns)
    return lambda path: listed(path) and not any(part.isdigit() for part in path.split("/"))


def path_mask(predicate: PathPredicate) -> Callable[[Any], Any]:
    """Returns a mask for optax, a function from a tree of params to a tree of bools."""
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: predicate(path_string(path)), params
    )


def compute_in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs `inner` on float32 gradients and parameters, and casts updates to the params' dtype. It
    refuses complex parameters.

    Second moments and small weight decays vanish in bfloat16, whose relative spacing is 2**-8.
    """

    def up(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: PyTree) -> PyTree:
        _refuse_complex(params)
        return inner.init(up(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("the optimizer needs transform.update(..., params=...)")
        # optax raises decay rates to integer powers, which strict promotion rejects.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = inner.update(up(updates), state, up(params))
        return jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params), state

    return optax.GradientTransformation(init, update)


def _refuse_complex(params: PyTree) -> None:
    # Their gradients by JAX are the conjugates of the directions in which a loss grows.
    paths = jax.tree_util.tree_leaves_with_path(params)
    if names := [path_string(path) for path, x in paths if jnp.iscomplexobj(x)]:
        raise ModelError(
            f"the parameters {', '.join(names)} are complex, and optimizers of a config take real "
            "ones.\n  Make a step with optax.contrib.split_real_and_imaginary(...), or store the "
            "two parts as two parameters."
        )


def store_as(
    inner: optax.GradientTransformation, dtype: DTypeLike, field: str
) -> optax.GradientTransformation:
    """Stores one field of `inner`'s state in `dtype`; `inner` itself computes in float32.

    The `mu_dtype` of optax would multiply the stored moment by its decay rate in `dtype`.
    """

    def cast(state: PyTree, to: Any) -> PyTree:
        tree = jax.tree.map(lambda x: x.astype(to), getattr(state, field))
        return state._replace(**{field: tree})

    def init(params: PyTree) -> PyTree:
        return cast(inner.init(params), dtype)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _per_leaf(function: Callable[[str, jax.Array, jax.Array], jax.Array]) -> Any:
    """Returns a stateless transformation from `function(path, update, param) -> update`."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, Any]:
        named = jax.tree_util.tree_map_with_path(
            lambda path, u, p: function(path_string(path), u, p), updates, params
        )
        return named, state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _layer_dims(ndim: int, stacked: bool) -> tuple[int, ...]:
    return tuple(range(1, ndim)) if stacked and ndim else tuple(range(ndim))


def scale_by_layer_trust_ratio(
    *, coefficient: float, eps: float, excluded: PathPredicate, stacked: PathPredicate
) -> optax.GradientTransformation:
    """Scales each layer's update by `coefficient * |param| / (|update| + eps)`.

    Norms are taken per layer, over all dims except the first if layers are stacked. The ratio is 1
    if either norm is 0, and for excluded paths.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks",
    arXiv:1708.03888, equation 6; You et al., "Large Batch Optimization for Deep Learning",
    arXiv:1904.00962, algorithm 2 with the identity as scaling function.
    """

    def scale(path: str, update: jax.Array, param: jax.Array) -> jax.Array:
        if excluded(path):
            return update
        dims = _layer_dims(update.ndim, stacked(path))
        param_norm = jnp.sqrt(jnp.sum(jnp.square(param), axis=dims, keepdims=True))
        update_norm = jnp.sqrt(jnp.sum(jnp.square(update), axis=dims, keepdims=True))
        usable = (param_norm > 0) & (update_norm > 0)
        ratio = coefficient * param_norm / jnp.where(usable, update_norm + eps, 1.0)
        return update * jnp.where(usable, ratio, 1.0)

    return _per_leaf(scale)


def scale_by_layer_rms(
    *, threshold: float, min_scale: float, stacked: PathPredicate
) -> optax.GradientTransformation:
    """Clips each layer's update to `threshold` RMS and scales it by the RMS of its parameter.

    Source: Shazeer and Stern, "Adafactor", arXiv:1804.04235, algorithm 4 (d = `threshold`,
    epsilon_2 = `min_scale`).
    """

    def scale(path: str, update: jax.Array, param: jax.Array) -> jax.Array:
        dims = _layer_dims(update.ndim, stacked(path))
        update_rms = jnp.sqrt(jnp.mean(jnp.square(update), axis=dims, keepdims=True))
        param_rms = jnp.sqrt(jnp.mean(jnp.square(param), axis=dims, keepdims=True))
        step = jnp.maximum(param_rms, min_scale) / jnp.maximum(update_rms / threshold, 1.0)
        return update * step

    return _per_leaf(scale)


class HiddenMatrices:
    """The parameters that are matrices of hidden layers, with their input and output dims.

    Not counting the dim that stacks layers, a parameter with two dims is a matrix
    [inputs, outputs]. A parameter with more dims is one or many matrices only if it matches a
    pattern.

    Args:
        excluded: Paths that are not hidden matrices, such as embeddings and output heads.
        stacked: Paths whose first dim stacks layers.
        one_input: Paths of parameters whose first dim is the input and all others the output.
        one_output: Paths of parameters whose last dim is the output and all others the input.
        many: Paths of parameters with three dims, [matrices, inputs, outputs].
    """

    def __init__(
        self,
        *,
        excluded: PathPredicate,
        stacked: PathPredicate,
        one_input: PathPredicate,
        one_output: PathPredicate,
        many: PathPredicate,
    ):
        self._excluded = excluded
        self._stacked = stacked
        self._one_input = one_input
        self._one_output = one_output
        self._many = many

    def dims(self, path: str, ndim: int) -> MuonDimensionNumbers | None:
        """Returns the matrix dims of a parameter (the rest are batch dims), or None."""
        first = 1 if self._stacked(path) else 0
        if self._excluded(path) or ndim - first < 2:
            return None
        if ndim - first == 3 and self._many(path):
            first += 1
        if ndim - first == 2 or self._one_input(path):
            middle = first + 1
        elif self._one_output(path):
            middle = ndim - 1
        else:
            return None
        return MuonDimensionNumbers(tuple(range(first, middle)), tuple(range(middle, ndim)))

    def labels(self, params: PyTree) -> PyTree:
        """Returns a tree of "muon" and "adamw" labels for `optax.partition`."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: "muon" if self.dims(path_string(path), x.ndim) else "adamw", params
        )

    def tree(self, params: PyTree) -> PyTree:
        """Returns the matrix dims of all parameters that optax has not masked out, as a tree."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: self.dims(path_string(path), x.ndim), params
        )


def scale_by_matrix_shape(matrices: HiddenMatrices, rms: float) -> optax.GradientTransformation:
    """Scales orthogonal updates by `rms * sqrt(max(inputs, outputs))`, so that their RMS is `rms`.

    Source: Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982, section 2.2.
    """

    def scale(path: str, update: jax.Array, param: jax.Array) -> jax.Array:
        dims = matrices.dims(path, update.ndim)
        assert dims is not None
        inputs = math.prod(update.shape[dim] for dim in dims.reduction_axis)  # type: ignore
        outputs = math.prod(update.shape[dim] for dim in dims.output_axis)  # type: ignore
        return update * (rms * math.sqrt(max(inputs, outputs)))

    return _per_leaf(scale)
