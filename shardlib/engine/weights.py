"""A model as an engine serves it."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardlib.engine.adapters import row_factors, with_adapters
from shardlib.engine.arguments import check_same
from shardlib.finetune.lora import merge
from shardlib.functional.quantized import Bits, quantize
from shardlib.sharding.constrain import Scope


class ServedWeights:
    """A model as it is served.

    Args:
        model: The module.
        bits: `int8` for kernels of stacked layers in 8 bits, which are widened where they are read;
            None for parameters as they are.
        adapters: Models with adapters by name; see `row_factors`. Nothing else of them is kept.

    Raises:
        ModelError: If an adapter does not fit.
    """

    def __init__(self, model: nnx.Module, bits: Bits | None, adapters: Mapping[str, Any]):
        self._graphdef = nnx.graphdef(model)
        self._bits: Bits | None = bits
        self._factors = row_factors(merge(model), adapters) if adapters else {}
        self._shapes = jax.eval_shape(lambda: nnx.state(model))

    def served(self, params: Any) -> nnx.Module:
        """Returns the module that is served, with parameters of the model.

        Raises:
            ModelError: If they differ from the model's in structure, shapes or dtypes, or nothing
                of them can have 8 bits.
        """
        check_same(self._shapes, params)
        model = nnx.merge(self._graphdef, params)
        model.eval()  # Without dropout, whatever the mode that it was given in.
        if self._bits is not None or self._factors:
            # Adapters that a run has trained hide the kernels below them.
            model = merge(model)
        model = model if self._bits is None else quantize(model, self._bits, keep_dtype=True)
        return with_adapters(model, self._factors) if self._factors else model


def shardings_of(params: Any, scope: Scope | None) -> Any:
    """Returns the sharding of each parameter. What lies on one device, as the keys of dropout do,
    is replicated on the mesh of `scope`."""

    def sharding(x: jax.Array) -> Sharding:
        if scope is None or len(x.sharding.device_set) > 1:
            return x.sharding
        return NamedSharding(scope.mesh, PartitionSpec())

    return jax.tree.map(sharding, params)


def placed(params: Any, shardings: Any) -> Any:
    """Returns parameters in the one form that steps are compiled for: bound to their devices, and
    without the weak types of Python's numbers."""

    def strong(x: jax.Array) -> jax.Array:
        # The keys of dropout, which is off, are arrays without such a type.
        return x.astype(x.dtype) if getattr(x, "weak_type", False) else x

    return jax.device_put(jax.tree.map(strong, params), shardings)
