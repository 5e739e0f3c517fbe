"""Well-known models by their published dims, for `--model llama3-70b`.

Vocabularies of GPT-2, GPT-3 and BERT are padded to a multiple of 128, as is common in training:
50,257 has no divisor that a mesh could use. A patch is a token of a ViT, whose tables stand for the
projection of patches and for the classifier.
"""

import dataclasses
import re
from collections.abc import Collection
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
    causal: bool = True
    """Whether a token attends only to those before it."""


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
_GEMMA2 = 'Gemma Team 2024, "Gemma 2", table 1, and the published configurations'
_QWEN25 = 'Qwen Team 2024, "Qwen2.5 Technical Report", table 1, and the published configurations'
_GPT_OSS = 'OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", and the published configurations'
_OPT = 'Zhang et al. 2022, "OPT", table 1, and the published configurations'
_GPTJ = "EleutherAI/gpt-j-6b, published configuration"
_BERT = 'Devlin et al. 2019, "BERT", section 3'
_VIT = 'Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", table 1'
_LLAMA4 = "meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E, published configurations"


def _named(length: int, source: str, *dims: Any, **more: Any) -> NamedModel:
    """Returns a named model. `dims` follow `Transformer`: layers, embed, heads, kv_heads, head_dim,
    mlp, vocab."""
    return NamedModel(Transformer(*dims, **more), length, source)


def _encoder(length: int, source: str, *dims: Any, **more: Any) -> NamedModel:
    """Returns a named encoder, whose tokens attend to all others."""
    model = Transformer(*dims, gated=False, activation="gelu", learned_positions=length, **more)
    return NamedModel(model, length, source, causal=False)


def _opt(layers: int, width: int, heads: int) -> NamedModel:
    dims = layers, width, heads, heads, width // heads, 4 * width, 50272
    # Two rows of the table of positions are for padding.
    return _named(2048, _OPT, *dims, learned_positions=2050, activation="relu", **_PLAIN)


def _gemma2(*dims: Any) -> NamedModel:
    local = {"window": 4096, "windowed_layers": dims[0] // 2}
    return _named(8192, _GEMMA2, *dims, 256000, **_GEMMA_BLOCK, **local)


def _gpt_oss(layers: int, experts: int) -> NamedModel:
    more = {"experts": Experts(experts, 4, 2880), "activation": "clamped_swiglu"}
    local = {"window": 128, "windowed_layers": layers // 2}
    return _named(4096, _GPT_OSS, layers, 2880, 64, 8, 64, 2880, 201088, **more, **local)


_PLAIN: dict[str, Any] = {"gated": False, "tied": True}
_GEMMA_BLOCK: dict[str, Any] = {"tied": True, "activation": "gelu_tanh", "sandwich": True}
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
    "qwen3-0.6b": _named(4096, _QWEN3, 28, 1024, 16, 8, 128, 3072, 151936, tied=True, qk_norm=True),
    "qwen3-1.7b": _named(4096, _QWEN3, 28, 2048, 16, 8, 128, 6144, 151936, tied=True, qk_norm=True),
    "qwen3-4b": _named(4096, _QWEN3, 36, 2560, 32, 8, 128, 9728, 151936, tied=True, qk_norm=True),
    "qwen3-8b": _named(4096, _QWEN3, 36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True),
    "qwen3-14b": _named(4096, _QWEN3, 40, 5120, 40, 8, 128, 17408, 151936, qk_norm=True),
    "qwen3-32b": _named(4096, _QWEN3, 64, 5120, 64, 8, 128, 25600, 151936, qk_norm=True),
    "qwen3-30b-a3b": _named(
        4096, _QWEN3, 48, 2048, 32, 4, 128, 6144, 151936, experts=Experts(128, 8, 768), qk_norm=True
    ),
    "qwen3-235b-a22b": _named(
        *(4096, _QWEN3, 94, 4096, 64, 4, 128, 12288, 151936),
        experts=Experts(128, 8, 1536),
        qk_norm=True,
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
        **_GEMMA_BLOCK,
        qk_norm=True,
        window=1024,
        windowed_layers=29,
    ),
    "gemma3-12b": _named(
        *(32768, _GEMMA3, 48, 3840, 16, 8, 256, 15360, 262208),
        **_GEMMA_BLOCK,
        qk_norm=True,
        window=1024,
        windowed_layers=40,
    ),
    "gemma3-27b": _named(
        *(32768, _GEMMA3, 62, 5376, 32, 16, 128, 21504, 262208),
        **_GEMMA_BLOCK,
        qk_norm=True,
        window=1024,
        windowed_layers=52,
    ),
    "gemma-2b": _named(
        8192, _GEMMA, 18, 2048, 8, 1, 256, 16384, 256000, tied=True, activation="gelu_tanh"
    ),
    "gemma-7b": _named(
        8192, _GEMMA, 28, 3072, 16, 16, 256, 24576, 256000, tied=True, activation="gelu_tanh"
    ),
    "gemma2-2b": _gemma2(26, 2304, 8, 4, 256, 9216),
    "gemma2-9b": _gemma2(42, 3584, 16, 8, 256, 14336),
    "gemma2-27b": _gemma2(46, 4608, 32, 16, 128, 36864),
    "qwen2.5-0.5b": _named(4096, _QWEN25, 24, 896, 14, 2, 64, 4864, 151936, tied=True),
    "qwen2.5-1.5b": _named(4096, _QWEN25, 28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    "qwen2.5-3b": _named(4096, _QWEN25, 36, 2048, 16, 2, 128, 11008, 151936, tied=True),
    "qwen2.5-7b": _named(4096, _QWEN25, 28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-14b": _named(4096, _QWEN25, 48, 5120, 40, 8, 128, 13824, 152064),
    "qwen2.5-32b": _named(4096, _QWEN25, 64, 5120, 40, 8, 128, 27648, 152064),
    "qwen2.5-72b": _named(4096, _QWEN25, 80, 8192, 64, 8, 128, 29568, 152064),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "gpt-j-6b": _named(2048, _GPTJ, 28, 4096, 16, 16, 256, 16384, 50400, gated=False),
    "bert-base": _encoder(512, _BERT, 12, 768, 12, 12, 64, 3072, 30592, tied=True),
    "bert-large": _encoder(512, _BERT, 24, 1024, 16, 16, 64, 4096, 30592, tied=True),
    "vit-b-16": _encoder(197, _VIT, 12, 768, 12, 12, 64, 3072, 1000),
    "vit-l-16": _encoder(197, _VIT, 24, 1024, 16, 16, 64, 4096, 1000),
    "vit-h-14": _encoder(257, _VIT, 32, 1280, 16, 16, 80, 5120, 1000),
}
"""Models by name."""


def canonical(name: str) -> str:
    """Returns the name of a model as the tables write it, for `Llama_3-8B` too."""
    written = name.strip().lower().replace("_", "-")
    return _WRITTEN.get(_letters(written), written)


def named_model(name: str, others: Collection[str] = ()) -> NamedModel:
    """Returns a published model by its name, in any case and with or without dashes.

    Raises:
        ModelError: If no model has that name.
    """
    model = NAMED.get(canonical(name))
    if model is None:
        known = dict.fromkeys((*NAMED, *others))
        fix = did_you_mean(name.lower(), known)
        fix = fix or f"\n  Give a config, or one of: {', '.join(known)}."
        raise ModelError(f"no model is known by the name {name!r}.{fix}")
    return model


def _letters(name: str) -> str:
    return re.sub("[-_ ]", "", name)


_WRITTEN = {_letters(name): name for name in NAMED}
