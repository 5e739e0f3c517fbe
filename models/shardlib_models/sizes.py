"""Published sizes of decoders, T5, CLIP and UNets, for `model: llama3-8b`: the fields of their
config.json as ours.

Fields that are not named have the defaults of the config of the family. Each source is the
repository of the hub whose config.json is meant.
"""

import math
from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]


def _llama(*dims: Any, **more: Any) -> dict[str, Any]:
    """Returns a decoder like Llama's from layers, width, heads, kv heads, mlp, vocabulary and
    positions."""
    names = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "mlp_dim", "vocab_size")
    return {**dict(zip((*names, "max_positions"), dims, strict=True)), **more}


_PLAIN: Fields = {
    "norm": "layer",
    "mlp": "plain",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}


def _gpt2(layers: int, width: int, heads: int) -> Fields:
    return {
        **_PLAIN,
        "num_layers": layers,
        "embed_dim": width,
        "num_heads": heads,
        "positions": "learned",
        "activation": "gelu_tanh",
        "tied_embeddings": True,
        "vocab_size": 50257,
        "max_positions": 1024,
        "dropout": 0.1,
    }


def _opt(layers: int, width: int, heads: int, **more: Any) -> Fields:
    return {
        **_gpt2(layers, width, heads),
        "activation": "relu",
        "vocab_size": 50272,
        "max_positions": 2048,
        "position_offset": 2,
        **more,
    }


def _neox(layers: int, width: int, heads: int, vocab: int, rotary: int, **more: Any) -> Fields:
    return {
        **_PLAIN,
        "num_layers": layers,
        "embed_dim": width,
        "num_heads": heads,
        "vocab_size": vocab,
        "block": "parallel",
        "max_positions": 2048,
        "rotary_dims": rotary,
        "activation": "gelu",
        **more,
    }


def _llama31(factor: float) -> Fields:
    scaling = {
        "factor": factor,
        "low_frequency_factor": 1.0,
        "high_frequency_factor": 4.0,
        "original_positions": 8192,
    }
    return {"rope_theta": 500_000.0, "rope_scaling": scaling}


def _experts(num: int, per_token: int, mlp_dim: int | None = None) -> Fields:
    return {"moe": {"num_experts": num, "experts_per_token": per_token, "mlp_dim": mlp_dim}}


_LLAMA3: Fields = {"rope_theta": 500_000.0}
_LLAMA32: Fields = {**_llama31(32.0), "tied_embeddings": True}
_QWEN25: Fields = {"rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": True}
_QWEN3: Fields = {"rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True, "head_dim": 128}
_GEMMA: Fields = {
    "head_dim": 256,
    "norm_eps": 1e-6,
    "norm_offset": 1.0,
    "embed_scale": "sqrt",
    "activation": "gelu_tanh",
    "tied_embeddings": True,
}
_TIED: Fields = {"tied_embeddings": True}


def _gemma2(query_dims: int, head_dim: int) -> dict[str, Any]:
    return {
        **_GEMMA,
        "head_dim": head_dim,
        "block": "sandwich",
        "query_scale": query_dims**-0.5,
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "window": 4096,
        "global_every": 2,
    }


def _deepseek(query_rank: int | None, sharpening: float, **moe: Any) -> dict[str, Any]:
    scaling = {"kind": "yarn", "factor": 40.0, "original_positions": 4096}
    mscale = {"mscale": sharpening, "mscale_all_dim": sharpening}
    # YaRN sharpens the scores of heads of 192 dims; see `YarnScaling.sharpening`.
    scale = (1.0 + 0.1 * sharpening * math.log(40.0)) ** 2 / math.sqrt(192)
    return {
        "norm_eps": 1e-6,
        "rotary_interleaved": True,
        "rope_scaling": {**scaling, **mscale},
        "query_scale": scale,
        "latent": {"query_rank": query_rank},
        "moe": {"dense_layers": 1, **moe},
    }


_DEEPSEEK_V3: Fields = {
    "num_experts": 256,
    "experts_per_token": 8,
    "mlp_dim": 2048,
    "num_shared_experts": 1,
    "dense_layers": 3,
    "groups": 8,
    "groups_per_token": 4,
    "group_best": 2,
    "scores": "sigmoid",
    "balance": "bias",
    "weights_scale": 2.5,
}
_DEEPSEEK_V2: Fields = {
    "num_shared_experts": 2,
    "experts_per_token": 6,
    "normalize_weights": False,
}


def _gpt_oss(layers: int, experts: int) -> Fields:
    scaling = {"kind": "yarn", "factor": 32.0, "original_positions": 4096, "truncate": False}
    return _llama(layers, 2880, 64, 8, 2880, 201088, 131072) | {
        "head_dim": 64,
        "window": 128,
        "global_every": 2,
        "rope_theta": 150_000.0,
        "rope_scaling": scaling,
        "activation": "clamped_swiglu",
        "sinks": True,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "moe": {"num_experts": experts, "experts_per_token": 4, "router_bias": True},
    }


SIZES: Mapping[str, Fields] = {
    # meta-llama/Llama-2-{7b,13b,70b}-hf
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    # meta-llama/Meta-Llama-3-{8B,70B}
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192, **_LLAMA3),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192, **_LLAMA3),
    # meta-llama/Llama-3.1-{8B,70B,405B}
    "llama3.1-8b": _llama(32, 4096, 32, 8, 14336, 128256, 131072, **_llama31(8.0)),
    "llama3.1-70b": _llama(80, 8192, 64, 8, 28672, 128256, 131072, **_llama31(8.0)),
    "llama3.1-405b": _llama(126, 16384, 128, 8, 53248, 128256, 131072, **_llama31(8.0)),
    # meta-llama/Llama-3.2-{1B,3B}
    "llama3.2-1b": _llama(16, 2048, 32, 8, 8192, 128256, 131072, **_LLAMA32),
    "llama3.2-3b": _llama(28, 3072, 24, 8, 8192, 128256, 131072, **_LLAMA32),
    # mistralai/Mistral-7B-v0.1
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, 32768, window=4096),
    # mistralai/Mixtral-8x{7B,22B}-v0.1
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, 32768, rope_theta=1e6, **_experts(8, 2)),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16384, 32000, 65536, rope_theta=1e6, **_experts(8, 2)),
    # Qwen/Qwen2.5-{0.5B,1.5B,3B,7B,14B,32B,72B}
    "qwen2.5-0.5b": _llama(24, 896, 14, 2, 4864, 151936, 32768, **_QWEN25, **_TIED),
    "qwen2.5-1.5b": _llama(28, 1536, 12, 2, 8960, 151936, 131072, **_QWEN25, **_TIED),
    "qwen2.5-3b": _llama(36, 2048, 16, 2, 11008, 151936, 32768, **_QWEN25, **_TIED),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064, 131072, **_QWEN25),
    "qwen2.5-14b": _llama(48, 5120, 40, 8, 13824, 152064, 131072, **{**_QWEN25, "norm_eps": 1e-5}),
    "qwen2.5-32b": _llama(64, 5120, 40, 8, 27648, 152064, 131072, **{**_QWEN25, "norm_eps": 1e-5}),
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, 152064, 131072, **{**_QWEN25, "norm_eps": 1e-5}),
    # Qwen/Qwen3-{0.6B,1.7B,4B,8B,14B,32B,30B-A3B,235B-A22B}
    "qwen3-0.6b": _llama(28, 1024, 16, 8, 3072, 151936, 40960, **_QWEN3, **_TIED),
    "qwen3-1.7b": _llama(28, 2048, 16, 8, 6144, 151936, 40960, **_QWEN3, **_TIED),
    "qwen3-4b": _llama(36, 2560, 32, 8, 9728, 151936, 40960, **_QWEN3, **_TIED),
    "qwen3-8b": _llama(36, 4096, 32, 8, 12288, 151936, 40960, **_QWEN3),
    "qwen3-14b": _llama(40, 5120, 40, 8, 17408, 151936, 40960, **_QWEN3),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25600, 151936, 40960, **_QWEN3),
    "qwen3-30b-a3b": _llama(
        48, 2048, 32, 4, 6144, 151936, 40960, **_QWEN3, **_experts(128, 8, 768)
    ),
    "qwen3-235b-a22b": _llama(
        94, 4096, 64, 4, 12288, 151936, 40960, **_QWEN3, **_experts(128, 8, 1536)
    ),
    # google/gemma-{2b,7b}
    "gemma-2b": _llama(18, 2048, 8, 1, 16384, 256000, 8192, **_GEMMA),
    "gemma-7b": _llama(28, 3072, 16, 16, 24576, 256000, 8192, **_GEMMA),
    # google/gemma-2-{2b,9b,27b}, google/gemma-3-1b-pt
    "gemma2-2b": _llama(26, 2304, 8, 4, 9216, 256000, 8192, **_gemma2(256, 256)),
    "gemma2-9b": _llama(42, 3584, 16, 8, 14336, 256000, 8192, **_gemma2(256, 256)),
    "gemma2-27b": _llama(46, 4608, 32, 16, 36864, 256000, 8192, **_gemma2(144, 128)),
    "gemma3-1b": _llama(26, 1152, 4, 1, 6912, 262144, 32768)
    | {
        **_gemma2(256, 256),
        "attention_softcap": None,
        "logit_softcap": None,
        "qk_norm": True,
        "window": 512,
        "global_every": 6,
        "rope_theta": 1e6,
        "local_rope_theta": 1e4,
    },
    # deepseek-ai/DeepSeek-{V2-Lite,V2,V3}, without the layer that predicts a second token
    "deepseek-v2-lite": _llama(27, 2048, 16, None, 10944, 102400, 163840)
    | _deepseek(None, 0.707, num_experts=64, mlp_dim=1408, **_DEEPSEEK_V2),
    "deepseek-v2": _llama(60, 5120, 128, None, 12288, 102400, 163840)
    | _deepseek(
        1536,
        0.707,
        num_experts=160,
        mlp_dim=1536,
        groups=8,
        groups_per_token=3,
        weights_scale=16.0,
        **_DEEPSEEK_V2,
    ),
    "deepseek-v3": _llama(61, 7168, 128, None, 18432, 129280, 163840)
    | _deepseek(1536, 1.0, **_DEEPSEEK_V3),
    # openai/gpt-oss-{20b,120b}
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    # microsoft/Phi-3-mini-4k-instruct
    "phi3-mini-4k": _llama(32, 3072, 32, 32, 8192, 32064, 4096, window=2047),
    # openai-community/gpt2{,-medium,-large,-xl}
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    # EleutherAI/gpt-j-6b
    "gpt-j-6b": {
        **_neox(28, 4096, 16, 50400, 64),
        "block": "parallel_one_norm",
        "rotary_interleaved": True,
        "activation": "gelu_tanh",
        "qkv_bias": False,
        "out_bias": False,
        "head_bias": True,
    },
    # EleutherAI/gpt-neox-20b, whose hidden_act is gelu_fast: the approximation by tanh
    "gpt-neox-20b": _neox(44, 6144, 64, 50432, 24, activation="gelu_tanh"),
    # EleutherAI/pythia-{70m,160m,410m,1b,1.4b,2.8b,6.9b,12b}
    "pythia-70m": _neox(6, 512, 8, 50304, 16),
    "pythia-160m": _neox(12, 768, 12, 50304, 16),
    "pythia-410m": _neox(24, 1024, 16, 50304, 16),
    "pythia-1b": _neox(16, 2048, 8, 50304, 64),
    "pythia-1.4b": _neox(24, 2048, 16, 50304, 32),
    "pythia-2.8b": _neox(32, 2560, 32, 50304, 20),
    "pythia-6.9b": _neox(32, 4096, 32, 50432, 32),
    "pythia-12b": _neox(36, 5120, 40, 50688, 32),
    # facebook/opt-{125m,350m,1.3b,2.7b,6.7b,13b,30b,66b}; 175B: Zhang et al. 2022, table 1
    "opt-125m": _opt(12, 768, 12),
    "opt-350m": _opt(24, 1024, 16, block="post", token_dim=512),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
}
"""Fields of `TransformerConfig` by the name of the size."""


def _t5(layers: int, width: int, heads: int, head_dim: int, mlp_dim: int, **more: Any) -> Fields:
    return {
        "num_layers": layers,
        "embed_dim": width,
        "num_heads": heads,
        "head_dim": head_dim,
        "mlp_dim": mlp_dim,
        "vocab_size": 32128,
        "dropout": 0.1,
        **more,
    }


_V11: Fields = {"mlp": "gated_gelu", "tied_embeddings": False}
_T5_V11: Mapping[str, Fields] = {
    "small": _t5(8, 512, 6, 64, 1024, **_V11),
    "base": _t5(12, 768, 12, 64, 2048, **_V11),
    "large": _t5(24, 1024, 16, 64, 2816, **_V11),
    "xl": _t5(24, 2048, 32, 64, 5120, **_V11),
    "xxl": _t5(24, 4096, 64, 64, 10240, **_V11),
}

T5_SIZES: Mapping[str, Fields] = {
    # google-t5/t5-{small,base,large,3b,11b}
    "t5-small": _t5(6, 512, 8, 64, 2048),
    "t5-base": _t5(12, 768, 12, 64, 3072),
    "t5-large": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16384),
    "t5-11b": _t5(24, 1024, 128, 128, 65536),
    # google/t5-v1_1-{small,base,large,xl,xxl} and google/flan-t5-{small,base,large,xl,xxl}
    **{f"t5-v1.1-{size}": fields for size, fields in _T5_V11.items()},
    **{f"flan-t5-{size}": fields for size, fields in _T5_V11.items()},
}
"""Fields of `T5Config` by the name of the size."""


def _clip(text_width: int, width: int, layers: int, patch: int, features: int) -> Fields:
    """Returns a CLIP from the widths of both encoders, the layers of the one of images, its patches
    and the features. Heads have 64 dims."""
    text = {"num_layers": 12, "embed_dim": text_width, "num_heads": text_width // 64}
    image = {"num_layers": layers, "embed_dim": width, "num_heads": width // 64}
    return {
        "text": {**text, "vocab_size": 49408},
        "image": {**image, "patch_size": patch, "image_size": 224, "channels": 3},
        "feature_dim": features,
    }


CLIP_SIZES: Mapping[str, Fields] = {
    # openai/clip-vit-{base-patch32,base-patch16,large-patch14}
    "clip-vit-base-patch32": _clip(512, 768, 12, 32, 512),
    "clip-vit-base-patch16": _clip(512, 768, 12, 16, 512),
    "clip-vit-large-patch14": _clip(768, 1024, 24, 14, 768),
}
"""Fields of `ClipConfig` by the name of the size."""


def _unet(multipliers: tuple[int, ...], depths: tuple[int, ...], **more: Any) -> Fields:
    return {
        "width": 320,
        "multipliers": multipliers,
        "transformer_depths": depths,
        "channels": 4,
        **more,
    }


_UNET_HEADS: Fields = {"num_heads": 5, "scale_heads": True, "linear_projections": True}

UNET_SIZES: Mapping[str, Fields] = {
    # stable-diffusion-v1-5/stable-diffusion-v1-5, unet/config.json
    "stable-diffusion-1.5": _unet((1, 2, 4, 4), (1, 1, 1, 0), num_heads=8, context_dim=768),
    # stabilityai/stable-diffusion-2-1, unet/config.json and scheduler/scheduler_config.json
    "stable-diffusion-2.1": _unet(
        (1, 2, 4, 4), (1, 1, 1, 0), context_dim=1024, prediction="v", **_UNET_HEADS
    ),
    # stabilityai/stable-diffusion-xl-base-1.0, unet/config.json
    "stable-diffusion-xl": _unet(
        (1, 2, 4), (0, 2, 10), middle_depth=10, context_dim=2048, pooled_dim=1280, **_UNET_HEADS
    ),
}
"""Fields of `UNetConfig` by the name of the size."""
