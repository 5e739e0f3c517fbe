"""A decoder to serve: its dimensions, and the bytes of its weights and pages on a device.

Shapes come from the traced module and its empty cache, so an engine allocates these bytes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shardlib import hf
from shardlib.config import from_dict
from shardlib.cost.layout import Layout
from shardlib.cost.serving.step import Widths, cache_cut
from shardlib.cost.workload import Transformer
from shardlib.errors import ModelError
from shardlib.functional import FunctionalModule, functional
from shardlib.functional.quantized import Bits, as_served
from shardlib.mesh import abstract_mesh
from shardlib.paths import named_leaves
from shardlib.plan.api import of_dims
from shardlib.plan.workloads.named_models import NAMED, canonical, named_model
from shardlib.registry import DataSpec, ModelFamily, family, sizes
from shardlib.rules import SERVE
from shardlib.sharding.partition import place


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A decoder with its weights as they are served, and its cache."""

    name: str
    num_params: int
    dims: Transformer
    module: FunctionalModule
    position_bytes: int
    """Bytes of the cache for one position, on all devices."""
    longest: int | None
    """Positions that the model has; None for any number."""
    widths: Widths
    with_bits: Callable[[Bits | None, Bits | None], "ServedModel"] = dataclasses.field(
        compare=False, repr=False
    )
    """Returns the model with other bits of weights and cache; raises `ModelError` for weights that
    it does not have in 8 bits."""

    def check_context(self, context: int) -> None:
        """Raises `ModelError` for a context with more tokens than the model has positions."""
        if self.longest is not None and context > self.longest:
            raise ModelError(
                f"context={context}, and {self.name} has {self.longest} positions.\n"
                f"  Give at most {self.longest} tokens."
            )

    def weight_bytes(self, layout: Layout) -> int:
        """Returns the bytes of the parameters on one device.

        Raises:
            RuleError: If the rules `serve` cannot cut a parameter.
        """
        degrees = _degrees(layout)
        mesh = abstract_mesh(degrees, math.prod(degrees.values()))
        total = 0
        for tree in self.module.shapes():
            placed, leaves = place(tree, self.module.axes, SERVE, mesh), named_leaves(tree)
            total += sum(_nbytes(leaves[path]) // placed[path].shards(degrees) for path in placed)
        return total

    def page_bytes(self, layout: Layout, page_size: int) -> int:
        """Returns the bytes of one page of the cache on one device."""
        return self.position_bytes * page_size // cache_cut(self.dims, layout)


def _degrees(layout: Layout) -> dict[str, int]:
    return {"expert": layout.expert, "tensor": layout.tensor}


def served_model(
    model: Any,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    weights: Bits | None = None,
    cache: Bits | None = None,
) -> ServedModel:
    """Returns a model to serve.

    Args:
        model: A name such as `llama3-8b`, a Hugging Face folder with a config.json, the config
            of a decoder, or the config of a run.
        dtype: Of weights and the cache.
        weights, cache: As in `Engine`.

    Raises:
        ModelError: If the model is unknown, or is not a decoder that the engine runs.
    """
    return _of_config(*described(model), dtype, weights, cache)


def described(model: Any) -> tuple[str, Any, DataSpec]:
    """Returns the name of a model to serve, its config and its data.

    Raises:
        ModelError: If it is unknown.
    """
    if hasattr(model, "served"):
        return model.served()
    if not isinstance(model, str | Path):
        return str(getattr(model, "name", model)), model, DataSpec()
    if (Path(model) / "config.json").exists():
        return Path(model).name, hf.describe(model).config, DataSpec()
    key, known = canonical(str(model)), sizes()
    if key in known:
        name, fields = known[key]
        return key, from_dict(family(name).config, fields, key), DataSpec()
    others = [name for name in known if family(known[name][0]).dims is not None]
    if key in NAMED:
        raise ModelError(
            f"{key} cannot be served: its dimensions are known, but not its architecture.\n"
            f"  Give a folder with its config.json, or one of: {', '.join(others)}."
        )
    named_model(str(model), others)
    raise AssertionError("an unknown name is refused")


def _of_config(
    name: str,
    config: Any,
    spec: DataSpec,
    dtype: jax.typing.DTypeLike,
    weights: Bits | None,
    cache: Bits | None,
) -> ServedModel:
    made = served_family(name, config)
    decoding = made.decoding
    assert decoding is not None
    assert made.dims is not None
    whole = functional(lambda rngs: made.make(config, spec, rngs))
    module = functional(lambda rngs: as_served(made.make(config, spec, rngs), dtype, weights))
    kind = cache and jnp.dtype(cache)
    pages = jax.eval_shape(lambda: decoding.pages(_made(module), 1, 1, 1, kind))
    dims = of_dims(made.dims(config, spec))
    position_bytes, width = sum(map(_nbytes, jax.tree.leaves(pages))), jnp.dtype(dtype).itemsize
    return ServedModel(
        name,
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(whole.shapes()[0])),
        dims,
        module,
        position_bytes,
        decoding.max_length(config),
        Widths(
            width,
            width if weights is None else jnp.dtype(weights).itemsize,
            position_bytes / (dims.layers * dims.kv_width),
        ),
        functools.partial(_of_config, name, config, spec, dtype),
    )


def _nbytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _made(module: FunctionalModule) -> Any:
    """Returns the module with zeros; meant to be traced."""
    shapes = module.shapes()
    params, state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return module.merge(params, state, jax.random.key(0))


def served_family(name: str, config: Any) -> ModelFamily:
    """Returns the family of a decoder; raises `ModelError` if the engine does not run it."""
    made = family(config.name) if isinstance(getattr(config, "name", None), str) else None
    if made is None or made.decoding is None or made.dims is None:
        raise ModelError(
            f"{name} is not a decoder that the engine runs.\n"
            "  Give a language model, such as llama3-8b."
        )
    return made
