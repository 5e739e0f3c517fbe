"""A decoder to serve: its dimensions, and the bytes of its weights and pages on a device.

Shapes come from the traced module and its empty cache, so an engine allocates these bytes.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shardlib import hf
from shardlib.config import from_dict
from shardlib.cost.layout import Layout
from shardlib.cost.workload import Transformer
from shardlib.errors import ModelError
from shardlib.functional import FunctionalModule, functional
from shardlib.mesh import abstract_mesh, entry_axes
from shardlib.plan.api import of_dims
from shardlib.plan.workloads.named_models import NAMED, canonical, named_model
from shardlib.registry import DataSpec, ModelFamily, family, sizes
from shardlib.rules import SERVE
from shardlib.sharding.partition import place


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A decoder whose weights and cache have `width` bytes an element."""

    name: str
    dims: Transformer
    module: FunctionalModule
    page_elements: int
    """Elements of the cache for one position."""
    longest: int | None
    """Positions that the model has; None for any number."""
    width: int = 2

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.module.shapes()[0]))

    def weight_bytes(self, layout: Layout) -> int:
        """Returns the bytes of the parameters on one device.

        Raises:
            RuleError: If the rules `serve` cannot cut a parameter.
        """
        params, _ = self.module.shapes()
        degrees = _degrees(layout)
        mesh = abstract_mesh(degrees, math.prod(degrees.values()))
        placed = place(params, self.module.axes, SERVE, mesh)
        return sum(
            math.prod(one.shape) * self.width // one.shards(degrees) for one in placed.values()
        )

    def page_bytes(self, layout: Layout, page_size: int) -> int:
        """Returns the bytes of one page of the cache on one device."""
        degrees = _degrees(layout)
        heads = SERVE.spec(("kv_heads",), (self.dims.kv_heads,), degrees, "activations")
        parts = math.prod(degrees[axis] for axis in entry_axes(heads[0]))
        return self.page_elements * page_size * self.width // parts


def _degrees(layout: Layout) -> dict[str, int]:
    return {"expert": layout.expert, "tensor": layout.tensor}


def served_model(model: Any, width: int = 2) -> ServedModel:
    """Returns a model to serve.

    Args:
        model: A name such as `llama3-8b`, a Hugging Face folder with a config.json, the config
            of a decoder, or the config of a run.
        width: Bytes of an element.

    Raises:
        ModelError: If the model is unknown, or is not a decoder that the engine runs.
    """
    if hasattr(model, "served"):
        name, config, spec = model.served()
        return _of_config(name, config, spec, width)
    if not isinstance(model, str | Path):
        return _of_config(str(getattr(model, "name", model)), model, DataSpec(), width)
    if (Path(model) / "config.json").exists():
        found = hf.describe(model)
        return _of_config(Path(model).name, found.config, DataSpec(), width)
    key, known = canonical(str(model)), sizes()
    if key in known:
        name, fields = known[key]
        return _of_config(key, from_dict(family(name).config, fields, key), DataSpec(), width)
    others = [name for name in known if family(known[name][0]).decoding is not None]
    if key in NAMED:
        raise ModelError(
            f"only the dimensions of {key} are known, and not a model that can be served.\n"
            f"  Give a folder with its config.json, or one of: {', '.join(others)}."
        )
    named_model(str(model), others)
    raise AssertionError("an unknown name is refused")


def _of_config(name: str, config: Any, spec: DataSpec, width: int) -> ServedModel:
    made = _served_family(name, config)
    decoding = made.decoding
    assert decoding is not None
    assert made.dims is not None
    module = functional(lambda rngs: made.make(config, spec, rngs))
    pages = jax.eval_shape(lambda: decoding.pages(_made(module), 1, 1, 1))
    return ServedModel(
        name,
        of_dims(made.dims(config, spec)),
        module,
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(pages)),
        decoding.max_length(config),
        width,
    )


def _made(module: FunctionalModule) -> Any:
    """Returns the module with zeros; meant to be traced."""
    shapes = module.shapes()
    params, state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return module.merge(params, state, jax.random.key(0))


def _served_family(name: str, config: Any) -> ModelFamily:
    made = family(config.name) if isinstance(getattr(config, "name", None), str) else None
    if made is None or made.decoding is None or made.dims is None:
        raise ModelError(
            f"{name} is not a decoder that the engine runs.\n"
            "  Give a language model, such as llama3-8b."
        )
    return made
