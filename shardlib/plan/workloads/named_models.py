"""Well-known models by their published dims, for `--model llama3-70b`.

Vocabularies of GPT-2 and GPT-3 are padded to a multiple of 128, as is common in training: 50,257
has no divisor that a mesh could use.
"""

import dataclasses
from typing import Any

from shardlib.cost.workload import Experts, Latent, Transformer
from shardlib.errors import ModelError, did_you_mean


@dataclasses.dataclass(frozen=True)
class NamedModel:
    """A published model."""

    model: Transformer
    length: int
    """Tokens per sequence in its pre-training."""
    source: str


_LLAMA2 = 'Touvron et al. 2023, "Llama 2", and the published configurations'
_LLAMA3 = 'Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3'
_LLAMA32 = "meta-llama/Llama-3.2, published configurations"
_MISTRAL = 'Jiang et al. 2023, "Mistral 7B", table 1'
_MIXTRAL = 'Jiang et al. 2024, "Mixtral of Experts", table 1, and the published configurations'
_DEEPSEEK2 = 'DeepSeek-AI 2024, "DeepSeek-V2", section 3.1.2'
_DEEPSEEK3 = 'DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 4.2'
_QWEN3 = 'Yang et al. 2025, "Qwen3 Technical Report", tables 1 and 2, and the configurations'
_GPT2 = 'Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2'
_GPT3 = 'Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1'
_GEMMA = 'Gemma Team 2024, "Gemma: Open Models Based on Gemini Research and Technology", table 1'
_GEMMA3 = 'Gemma Team 2025, "Gemma 3 Technical Report", table 1, and the published configurations'
_LLAMA4 = "meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E, published configurations"


def _named(length: int, source: str, *dims: Any, **more: Any) -> NamedModel:
    """Returns a named model. `dims` follow `Transformer`: layers, embed, heads, kv_heads, head_dim,
    mlp, vocab."""
    return NamedModel(Transformer(*dims, **more), length, source)


_PLAIN: dict[str, Any] = {"gated": False, "tied": True}
NAMED: dict[str, NamedModel] = {
    "llama2-7b": _named(4096, _LLAMA2, 32, 4096, 32, 32, 128, 11008, 32000),
    "llama2-13b": _named(4096, _LLAMA2, 40, 5120, 40, 40, 128, 13824, 32000),
    "llama2-70b": _named(4096, _LLAMA2, 80, 8192, 64, 8, 128, 28672, 32000),
    "llama3-8b": _named(8192, _LLAMA3, 32, 4096, 32, 8, 128, 14336, 128256),
    "llama3-70b": _named(8192, _LLAMA3, 80, 8192, 64, 8, 128, 28672, 128256),
    "llama3-405b": _named(8192, _LLAMA3, 126, 16384, 128, 8, 128, 53248, 128256),
    "llama3.2-1b": _named(8192, _LLAMA32, 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "llama3.2-3b": _named(8192, _LLAMA32, 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
    "mistral-7b": _named(
        8192, _MISTRAL, 32, 4096, 32, 8, 128, 14336, 32000, window=4096, windowed_layers=32
    ),
    "mixtral-8x7b": _named(
        32768, _MIXTRAL, 32, 4096, 32, 8, 128, 14336, 32000, experts=Experts(8, 2, 14336)
    ),
    "mixtral-8x22b": _named(
        32768, _MIXTRAL, 56, 6144, 48, 8, 128, 16384, 32768, experts=Experts(8, 2, 16384)
    ),
    "deepseek-v2": _named(
        4096,
        _DEEPSEEK2,
        *(60, 5120, 128, 128, 192, 12288, 102400),
        experts=Experts(160, 6, 1536, shared_mlp=3072, dense_layers=1, groups=(8, 3)),
        latent=Latent(1536, 512, 128, 64, 128),
    ),
    "deepseek-v3": _named(
        4096,
        _DEEPSEEK3,
        *(61, 7168, 128, 128, 192, 18432, 129280),
        experts=Experts(256, 8, 2048, shared_mlp=2048, dense_layers=3, groups=(8, 4)),
        latent=Latent(1536, 512, 128, 64, 128),
    ),
    "qwen3-0.6b": _named(4096, _QWEN3, 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    "qwen3-1.7b": _named(4096, _QWEN3, 28, 2048, 16, 8, 128, 6144, 151936, tied=True),
    "qwen3-4b": _named(4096, _QWEN3, 36, 2560, 32, 8, 128, 9728, 151936, tied=True),
    "qwen3-8b": _named(4096, _QWEN3, 36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3-14b": _named(4096, _QWEN3, 40, 5120, 40, 8, 128, 17408, 151936),
    "qwen3-32b": _named(4096, _QWEN3, 64, 5120, 64, 8, 128, 25600, 151936),
    "qwen3-30b-a3b": _named(
        4096, _QWEN3, 48, 2048, 32, 4, 128, 6144, 151936, experts=Experts(128, 8, 768)
    ),
    "qwen3-235b-a22b": _named(
        4096, _QWEN3, 94, 4096, 64, 4, 128, 12288, 151936, experts=Experts(128, 8, 1536)
    ),
    "gpt2": _named(1024, _GPT2, 12, 768, 12, 12, 64, 3072, 50304, learned_positions=1024, **_PLAIN),
    "gpt2-xl": _named(
        1024, _GPT2, 48, 1600, 25, 25, 64, 6400, 50304, learned_positions=1024, **_PLAIN
    ),
    "gpt3-175b": _named(
        2048, _GPT3, 96, 12288, 96, 96, 128, 49152, 50304, learned_positions=2048, **_PLAIN
    ),
    "llama4-scout": _named(
        8192,
        _LLAMA4,
        *(48, 5120, 40, 8, 128, 16384, 202048),
        experts=Experts(16, 1, 8192, shared_mlp=8192),
        window=8192,
        windowed_layers=36,
    ),
    "llama4-maverick": _named(
        8192,
        _LLAMA4,
        *(48, 5120, 40, 8, 128, 16384, 202048),
        experts=Experts(128, 1, 8192, shared_mlp=8192, dense_layers=24),
        window=8192,
        windowed_layers=36,
    ),
    "gemma3-4b": _named(
        *(32768, _GEMMA3, 34, 2560, 8, 4, 256, 10240, 262208),
        tied=True,
        window=1024,
        windowed_layers=29,
    ),
    "gemma3-12b": _named(
        *(32768, _GEMMA3, 48, 3840, 16, 8, 256, 15360, 262208),
        tied=True,
        window=1024,
        windowed_layers=40,
    ),
    "gemma3-27b": _named(
        *(32768, _GEMMA3, 62, 5376, 32, 16, 128, 21504, 262208),
        tied=True,
        window=1024,
        windowed_layers=52,
    ),
    "gemma-2b": _named(8192, _GEMMA, 18, 2048, 8, 1, 256, 16384, 256000, tied=True),
    "gemma-7b": _named(8192, _GEMMA, 28, 3072, 16, 16, 256, 24576, 256000, tied=True),
}
"""Models by name."""


def canonical(name: str) -> str:
    """Returns the name of a model as the tables write it."""
    return name.strip().lower().replace("_", "-")


def named_model(name: str) -> NamedModel:
    """Returns a published model by its name, in any case and with `_` for `-`.

    Raises:
        ModelError: If no model has that name.
    """
    model = NAMED.get(canonical(name))
    if model is None:
        raise ModelError(
            f"no model is known by the name {name!r}.{did_you_mean(name.lower(), NAMED)}\n"
            f"  Give a config, or one of: {', '.join(NAMED)}."
        )
    return model
