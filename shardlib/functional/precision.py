"""Storage dtype and compute dtype of parameters, and the products of linear layers."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import PyTree

from shardlib.errors import ConfigError, ModelError, did_you_mean
from shardlib.functional.eight_bit import fp8_dot_general, int8_dot_general
from shardlib.functional.protocol import axis_names_of
from shardlib.paths import path_string

_WIDE_AXES = frozenset({"vocab", "classes", "token", "features", "conv_in", "shared_gate"})
"""Logical axes of embeddings, heads and gates, whose products keep the compute dtype."""


@dataclasses.dataclass(frozen=True)
class Precision:
    """A precision policy.

    Gradients have the dtype of the parameters and are accumulated in float32.
    """

    params: PyTree
    """Storage dtype of the parameters; the state of shardlib's optimizers is in float32."""
    compute: Any
    """Dtype of the parameters in the loss function, and of the arguments of the model."""
    dot_general: Callable[..., Any] | None = None
    """What linear layers multiply with in place of `jax.lax.dot_general`; None for no change."""

    def store(
        self, params: PyTree, float32: Collection[str] = (), only: Collection[str] | None = None
    ) -> PyTree:
        """Returns parameters in their storage dtype; integers are unchanged. `float32` are paths
        that no policy rounds; `only` are the paths to cast, if the tree also holds other leaves."""
        return _cast_params(params, self.params, float32, only)

    def cast_params(
        self, params: PyTree, float32: Collection[str] = (), only: Collection[str] | None = None
    ) -> PyTree:
        """Returns parameters in the compute dtype; the arguments are as in `store`."""
        return _cast_params(params, self.compute, float32, only)

    def prepare(self, model: Any) -> Any:
        """Returns a module whose linear layers multiply with `dot_general`.

        A linear layer has an attribute `dot_general`, as `nnx.Linear`, `nnx.LinearGeneral` and the
        layers of the shipped models do. Layers with a function of their own there keep it. Those
        with the logical axes of an embedding, a head or a gate, and those kept in float32, stay
        as they are.

        Raises:
            ModelError: If the module has no such layer.
        """
        if self.dot_general is None:
            return model
        layers = _linear_layers(model)
        if not layers:
            raise ModelError(
                f"{type(model).__name__} has no layer that can multiply in 8 bits.\n"
                "  Choose the precision bf16, or hold its weights in nnx.Linear or "
                "nnx.LinearGeneral layers, which take another dot_general."
            )
        for layer in layers:
            layer.dot_general = self.dot_general
        return model

    def cast_batch(self, batch: PyTree) -> PyTree:
        """Returns a batch with its floating leaves in float32, or in a wider compute dtype: targets
        are never rounded, and `boundary` casts the inputs of the model."""
        return jax.tree.map(lambda x: _cast(x, _wide(self.compute)), batch)


POLICIES = {
    "f32": Precision(jnp.float32, jnp.float32),
    "bf16": Precision(jnp.float32, jnp.bfloat16),
    "bf16_params": Precision(jnp.bfloat16, jnp.bfloat16),
    "fp8": Precision(jnp.float32, jnp.bfloat16, fp8_dot_general),
    "int8": Precision(jnp.float32, jnp.bfloat16, int8_dot_general),
}


def precision(policy: str | Precision) -> Precision:
    """Returns a policy by name: `f32`, `bf16` (parameters in float32, computed in bfloat16:
    Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning Training"), `bf16_params`, or `fp8`
    or `int8` (bf16, with the products of linear layers in 8 bits: see `eight_bit`).

    Raises:
        ConfigError: If no policy has that name.
    """
    if isinstance(policy, Precision):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ConfigError(
            f"no precision is called {policy!r}.{did_you_mean(str(policy), POLICIES)}\n"
            f"  Choose one of: {', '.join(POLICIES)}."
        )
    return POLICIES[policy]


def _linear_layers(model: Any) -> list[Any]:
    if not isinstance(model, nnx.Module):
        return []
    return [
        node
        for _, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
        and _multiplies_plainly(node)
        and not _stays_wide(getattr(node, "kernel", None))
    ]


def _multiplies_plainly(layer: nnx.Module) -> bool:
    if isinstance(layer, nnx.LinearGeneral):
        return layer.dot_general is None and layer.dot_general_cls is None
    return getattr(layer, "dot_general", None) is jax.lax.dot_general


def _stays_wide(kernel: Any) -> bool:
    if not isinstance(kernel, nnx.Variable):
        return False
    metadata = kernel.get_metadata()
    names = metadata.get("out_sharding")
    axes = [] if names is None else axis_names_of(names, len(kernel.shape)) or ()
    return bool(metadata.get("float32")) or not _WIDE_AXES.isdisjoint(axes)


def _cast(x: Any, dtype: DTypeLike) -> Any:
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _wide(dtype: DTypeLike) -> Any:
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def _cast_params(
    params: PyTree, dtype: DTypeLike, float32: Collection[str], only: Collection[str] | None
) -> PyTree:
    wide = _wide(dtype)

    def cast(path: KeyPath, x: Any) -> Any:
        name = path_string(path)
        if only is not None and name not in only:
            return x
        return _cast(x, wide if name in float32 else dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
