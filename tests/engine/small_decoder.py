"""A small decoder to serve."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from shardlib.registry import DataSpec
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import TransformerConfig

VOCAB = 96


@dataclasses.dataclass(frozen=True)
class Served:
    """A model, as `hf.load` returns one."""

    model: nnx.Module
    config: Any
    scope: Any = None
    tokenizer: Any = None
    end_tokens: tuple[int, ...] = ()
    family: Any = FAMILY


def made(scope=None, vocab_size=VOCAB, **options):
    config = TransformerConfig(
        embed_dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=96,
        vocab_size=vocab_size,
        max_positions=256,
        **options,
    )

    def parts():
        return nnx.split(FAMILY.make(config, DataSpec(), nnx.Rngs(0)))

    # On a mesh the initializers place what they make.
    model = nnx.merge(*(jax.jit(parts)() if scope is None else parts()))
    model.eval()
    return Served(model, model.config, scope)
