"""Storage dtype and compute dtype of parameters."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import PyTree

from shardlib.errors import ConfigError, did_you_mean
from shardlib.paths import path_string


@dataclasses.dataclass(frozen=True)
class Precision:
    """A precision policy.

    Gradients have the dtype of the parameters and are accumulated in float32.
    """

    params: PyTree
    """Storage dtype of the parameters; the state of shardlib's optimizers is in float32."""
    compute: Any
    """Dtype of the parameters in the loss function, and of the arguments of the model."""

    def store(
        self, params: PyTree, float32: Collection[str] = (), only: Collection[str] | None = None
    ) -> PyTree:
        """Returns parameters in their storage dtype; integers are unchanged.

        Args:
            params: The parameters.
            float32: Paths of parameters that no policy rounds: `FunctionalModule.float32`.
            only: Paths of the parameters to cast, if the tree also holds other leaves.
        """
        return _cast_params(params, self.params, float32, only)

    def cast_params(
        self, params: PyTree, float32: Collection[str] = (), only: Collection[str] | None = None
    ) -> PyTree:
        """Returns parameters in the compute dtype; the arguments are as in `store`."""
        return _cast_params(params, self.compute, float32, only)

    def cast_batch(self, batch: PyTree) -> PyTree:
        """Returns a batch with its floating leaves in float32, or in a wider compute dtype: targets
        are never rounded, and `boundary` casts the inputs of the model."""
        return jax.tree.map(lambda x: _cast(x, _wide(self.compute)), batch)


POLICIES = {
    "f32": Precision(jnp.float32, jnp.float32),
    "bf16": Precision(jnp.float32, jnp.bfloat16),
    "bf16_params": Precision(jnp.bfloat16, jnp.bfloat16),
}


def precision(policy: str | Precision) -> Precision:
    """Returns a policy by name: `f32`, `bf16` (parameters in float32, computed in bfloat16:
    Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning Training") or `bf16_params`.

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
