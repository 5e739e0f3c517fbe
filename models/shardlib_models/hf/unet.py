"""The UNet of Stable Diffusion: the folder `unet` of a pipeline of the library diffusers."""

from collections.abc import Mapping
from typing import Any

from shardlib.hf import Architecture, Converter, Field, TensorRow, rows
from shardlib.registry import NUM_SIZES
from shardlib_models.unet_config import UNetConfig

_ATTENTIVE, _PLAIN = "CrossAttn{}Block2D", "{}Block2D"


def _table(config: UNetConfig) -> tuple[TensorRow, ...]:
    text = _embedder("time", "time_embedding") + _embedder("added", "add_embedding")
    text += _conv("conv_in", "conv_in") + _conv("conv_out", "conv_out", "channels")
    text += _norm("norm", "conv_norm_out")
    for way, step, more in (("down", "downsamplers", 0), ("up", "upsamplers", 1)):
        for level in range(len(config.multipliers)):
            ours, theirs = f"{way}/{level}", f"{way}_blocks.{level}"
            text += _conv(f"{ours}/resample", f"{theirs}.{step}.0.conv")
            for block in range(config.num_resnets + more):
                text += _resnet(f"{ours}/blocks/{block}", f"{theirs}.resnets.{block}")
                place = f"{ours}/blocks/{block}", f"{theirs}.attentions.{block}"
                text += _transformer(*place, config.linear_projections)
    text += _resnet("middle", "mid_block.resnets.0") + _resnet("middle_out", "mid_block.resnets.1")
    text += _transformer("middle", "mid_block.attentions.0", config.linear_projections)
    return rows(text)


def _conv(ours: str, theirs: str, outputs: str = "conv_out") -> str:
    return f"""
{ours}/kernel  {theirs}.weight  {outputs} conv_in kernel_h kernel_w
{ours}/bias  {theirs}.bias  channels
"""


def _norm(ours: str, theirs: str) -> str:
    return f"{ours}/scale|bias  {theirs}.weight|bias  (norm)\n"


def _embedder(ours: str, theirs: str) -> str:
    return f"""
{ours}/up/kernel|bias  {theirs}.linear_1.weight|bias  (embed) features
{ours}/down/kernel|bias  {theirs}.linear_2.weight|bias  (features) embed
"""


def _resnet(block: str, theirs: str) -> str:
    ours = f"{block}/resnet"
    return (
        _norm(f"{ours}/norm_1", f"{theirs}.norm1")
        + _conv(f"{ours}/conv_1", f"{theirs}.conv1")
        + f"{ours}/time/kernel|bias  {theirs}.time_emb_proj.weight|bias  (embed) features\n"
        + _norm(f"{ours}/norm_2", f"{theirs}.norm2")
        + _conv(f"{ours}/conv_2", f"{theirs}.conv2")
        + _conv(f"{ours}/shortcut", f"{theirs}.conv_shortcut")
    )


def _transformer(block: str, theirs: str, linear: bool) -> str:
    ours, ones = f"{block}/transformer", "" if linear else " 1 1"
    layer, of_layer = f"{ours}/layers", f"{theirs}.transformer_blocks.{{block_layers}}"
    gated = f"{of_layer}.ff.net.0.proj"
    text = _norm(f"{ours}/entry/norm", f"{theirs}.norm")
    for number, name in ((1, "attention"), (2, "cross"), (3, "mlp")):
        text += _norm(f"{layer}/{name}_norm", f"{of_layer}.norm{number}")
    for number, name in ((1, "attention"), (2, "cross")):
        attention = f"{of_layer}.attn{number}"
        text += f"""
{layer}/{name}/query/kernel  {attention}.to_q.weight  heads*head_dim embed
{layer}/{name}/key/kernel  {attention}.to_k.weight  kv_heads*head_dim embed
{layer}/{name}/value/kernel  {attention}.to_v.weight  kv_heads*head_dim embed
{layer}/{name}/out/kernel  {attention}.to_out.0.weight  embed heads*head_dim
{layer}/{name}/out/bias  {attention}.to_out.0.bias  embed
"""
    return (
        text
        + f"""
{ours}/entry/projection/kernel  {theirs}.proj_in.weight  embed channels{ones}
{ours}/entry/projection/bias  {theirs}.proj_in.bias  embed
{ours}/exit/kernel  {theirs}.proj_out.weight  channels embed{ones}
{ours}/exit/bias  {theirs}.proj_out.bias  channels
{layer}/mlp/up/kernel|bias  {gated}.weight|bias  (+mlp) embed
{layer}/mlp/gate/kernel|bias  {gated}.weight|bias  (+mlp) embed
{layer}/mlp/down/kernel|bias  {of_layer}.ff.net.2.weight|bias  (embed) mlp
"""
    )


def _read_levels(theirs: Mapping[str, Any]) -> dict[str, Any]:
    widths, kinds = theirs["block_out_channels"], theirs["down_block_types"]
    factors = [width // widths[0] for width in widths]
    if [factor * widths[0] for factor in factors] != list(widths):
        raise ValueError(f"block_out_channels={widths!r} are not multiples of the first.")
    is_attentive = [kind == _ATTENTIVE.format("Down") for kind in kinds]
    _check_kinds(theirs, _kinds(is_attentive))
    depths = _each(theirs.get("transformer_layers_per_block", 1), len(widths))
    heads = theirs.get("num_attention_heads") or theirs.get("attention_head_dim", 8)
    heads = _each(heads, len(widths))
    scaled = [heads[0] * factor for factor in factors]
    if heads not in (scaled, [heads[0]] * len(widths)):
        raise ValueError(
            f"attention_head_dim={heads!r} are neither equal nor as block_out_channels={widths!r}."
        )
    if theirs.get("out_channels", 4) != theirs.get("in_channels", 4):
        raise ValueError("in_channels and out_channels differ, as in a model that inpaints.")
    return {
        "width": widths[0],
        "multipliers": factors,
        "transformer_depths": [
            depth if has else 0 for depth, has in zip(depths, is_attentive, strict=True)
        ],
        "middle_depth": depths[-1],
        "num_heads": heads[0],
        "scale_heads": heads == scaled and heads != [heads[0]] * len(widths),
        "channels": theirs.get("in_channels", 4),
    }


def _each(value: Any, count: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * count


def _kinds(is_attentive: list[bool]) -> dict[str, list[str]]:
    """Returns the types of the blocks on both ways."""
    ways = (("down_block_types", "Down", 1), ("up_block_types", "Up", -1))
    return {
        name: [(_ATTENTIVE if has else _PLAIN).format(way) for has in is_attentive[::step]]
        for name, way, step in ways
    }


def _check_kinds(theirs: Mapping[str, Any], expected: Mapping[str, list[str]]) -> None:
    for name, kinds in expected.items():
        if list(theirs[name]) != kinds:
            raise ValueError(f"{name} is {theirs[name]!r}; supported: {kinds!r}.")


def _write_levels(config: UNetConfig) -> dict[str, Any]:
    # A level without layers has a number all the same, and the last one is that of the middle.
    depths = [max(depth, 1) for depth in config.transformer_depths]
    return {
        "block_out_channels": list(config.widths),
        **_kinds([depth > 0 for depth in config.transformer_depths]),
        "transformer_layers_per_block": [*depths[:-1], config.middle_depth],
        "attention_head_dim": [config.heads(level) for level in range(len(depths))],
        "num_attention_heads": None,
        "in_channels": config.channels,
        "out_channels": config.channels,
    }


def _read_added(theirs: Mapping[str, Any]) -> dict[str, Any]:
    kind = theirs.get("addition_embed_type")
    if kind is None:
        return {"pooled_dim": None}
    if kind != "text_time":
        raise ValueError(f"addition_embed_type is {kind!r}; supported: null, 'text_time'.")
    size = theirs["addition_time_embed_dim"]
    pooled = theirs["projection_class_embeddings_input_dim"] - NUM_SIZES * size
    return {"pooled_dim": pooled, "size_dim": size}


def _write_added(config: UNetConfig) -> dict[str, Any]:
    if config.pooled_dim is None:
        return {"addition_embed_type": None}
    return {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": config.size_dim,
        "projection_class_embeddings_input_dim": config.pooled_dim + NUM_SIZES * config.size_dim,
    }


UNET = Architecture(
    name="UNet2DConditionModel",
    model_type="unet_2d_condition",
    library="diffusers",
    fields={
        "layers_per_block": Field("num_resnets", 2),
        "cross_attention_dim": Field("context_dim", 1280),
        "norm_num_groups": Field("norm_groups", 32),
        "use_linear_projection": Field("linear_projections", False),
    },
    fixed={
        "act_fn": "silu",
        "norm_eps": 1e-5,
        "dropout": 0.0,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "center_input_sample": False,
        "downsample_padding": 1,
        "mid_block_scale_factor": 1,
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "resnet_time_scale_shift": "default",
        "resnet_out_scale_factor": 1.0,
        "resnet_skip_time_act": False,
        "time_embedding_type": "positional",
        "attention_type": "default",
        "only_cross_attention": False,
        "dual_cross_attention": False,
        "class_embeddings_concat": False,
        "conv_in_kernel": 3,
        "conv_out_kernel": 3,
        **dict.fromkeys(
            (
                "class_embed_type",
                "cross_attention_norm",
                "encoder_hid_dim",
                "encoder_hid_dim_type",
                "mid_block_only_cross_attention",
                "num_class_embeds",
                "reverse_transformer_layers_per_block",
                "time_cond_proj_dim",
                "time_embedding_act_fn",
                "time_embedding_dim",
                "timestep_post_act",
            )
        ),
    },
    converters=(Converter(_read_levels, _write_levels), Converter(_read_added, _write_added)),
    table=_table,
    inputs="latents",
)
