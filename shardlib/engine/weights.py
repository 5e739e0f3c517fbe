"""A model as an engine serves it."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from shardlib.engine.adapters import row_factors, with_adapters
from shardlib.engine.arguments import check_same
from shardlib.finetune.lora import merge
from shardlib.functional.quantized import Bits, quantize


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
