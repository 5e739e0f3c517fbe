"""The config of the UNet of Stable Diffusion, and its faults."""

from typing import ClassVar, Literal

from shardlib.config import configclass
from shardlib.nn import remat
from shardlib.nn.attention import Backend
from shardlib.registry import DataSpec

TAGS = (
    "conv",
    "layer_in",
    "query",
    "key",
    "value",
    "attended",
    "attention_out",
    "cross_out",
    "mlp_hidden",
    "mlp_out",
)
"""The names in a block that `save:` policies can keep."""


@configclass
class UNetConfig:
    """A UNet that predicts the noise in latents from a text; the defaults are a small one.

    Source: Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models",
    appendix E.2.1; Podell et al. 2023, "SDXL", section 2.
    """

    name: Literal["unet"] = "unet"
    init_from: str | None = None
    """A folder in the format of diffusers, such as PIPELINE/unet, whose weights the run starts
    from; its config.json gives the fields that are left out, but not `prediction`."""
    width: int = 32
    """Channels of the first level."""
    multipliers: tuple[int, ...] = (1, 2)
    """Channels of each level in multiples of `width`. Each level but the last halves height and
    width."""
    num_resnets: int = 2
    """Residual blocks of a level on the way down; on the way up it has one more."""
    transformer_depths: tuple[int, ...] = (1, 1)
    """Transformer layers after each residual block of a level; 0 for none."""
    middle_depth: int = 1
    """Transformer layers between both ways."""
    num_heads: int = 4
    """Heads of attention, which divide the channels of their level."""
    scale_heads: bool = False
    """Whether a level has `num_heads` times its multiplier heads, so that all heads have the same
    dims (Stable Diffusion 2 and XL)."""
    channels: int | None = None
    """Channels of the latents; null for the latents of the data."""
    context_dim: int | None = None
    """Dims of the embedding of a token; null for the texts of the data."""
    pooled_dim: int | None = None
    """Dims of a text's pooled embedding, which conditions the model together with six sizes of the
    image (SDXL); null for a model without both."""
    size_dim: int = 256
    """Dims of the embedding of each of the six sizes."""
    norm_groups: int = 32
    """Groups of channels that a GroupNorm normalises, which divide `width`."""
    linear_projections: bool = False
    """Whether published weights hold the projections around transformer layers as matrices, not as
    convolutions of 1x1, which compute the same."""
    prediction: Literal["epsilon", "v"] = "epsilon"
    """What the model predicts: the noise (Ho et al. 2020), or the velocity (Salimans & Ho 2022)."""
    attention: Backend = "auto"
    """Implementation of attention."""
    remat: str = "none"
    """Values kept for the backward pass: none, dots, full or save:NAME,NAME. A unit is a residual
    block, or a transformer layer. auto chooses, with rules: auto."""
    remat_tags: ClassVar = TAGS

    @property
    def widths(self) -> tuple[int, ...]:
        """The channels of each level."""
        return tuple(self.width * factor for factor in self.multipliers)

    def heads(self, level: int) -> int:
        """Returns the number of heads of a level."""
        return self.num_heads * (self.multipliers[level] if self.scale_heads else 1)

    @property
    def time_dim(self) -> int:
        """The dims of the embedding of the noise level."""
        return 4 * self.width


_COUNTS = (
    "width",
    "num_resnets",
    "middle_depth",
    "num_heads",
    "channels",
    "context_dim",
    "pooled_dim",
    "size_dim",
    "norm_groups",
)


def validate(config: UNetConfig, data: DataSpec) -> list[str]:
    """Returns all faults of a config, alone and with its data, as sentences."""
    faults = [
        f"{name} is {value}; it must be at least 1."
        for name in _COUNTS
        if (value := getattr(config, name)) is not None and value < 1
    ]
    if not config.multipliers or min(config.multipliers) < 1:
        faults.append(f"multipliers are {list(config.multipliers)}; each must be at least 1.")
    if len(config.transformer_depths) != len(config.multipliers):
        faults.append(
            f"transformer_depths has {len(config.transformer_depths)} numbers for "
            f"{len(config.multipliers)} levels; give one for each of multipliers."
        )
    if min(config.transformer_depths, default=0) < 0:
        depths = list(config.transformer_depths)
        faults.append(f"transformer_depths are {depths}; each must be at least 0.")
    faults += _remat_faults(config.remat)
    if not faults:
        faults = _width_faults(config) + _data_faults(config, data)
    return faults


def _remat_faults(policy: str) -> list[str]:
    if policy[:1].isdecimal():
        return [f"remat is {policy!r}, but levels differ; choose one policy without ranges."]
    return remat.check(policy, TAGS)


def _width_faults(config: UNetConfig) -> list[str]:
    faults = []
    for name, even in (("width", config.width), ("size_dim", config.size_dim)):
        if even % 2:
            faults.append(f"{name}={even} is odd; half of an embedding are sines. Make it even.")
    if config.width % config.norm_groups:
        faults.append(
            f"width={config.width} is not a multiple of norm_groups={config.norm_groups}; change "
            "one of them."
        )
    last = len(config.multipliers) - 1
    depths = config.transformer_depths
    for level, (width, depth) in enumerate(zip(config.widths, depths, strict=True)):
        if (depth or level == last) and width % config.heads(level):
            faults.append(
                f"the {width} channels of level {level} are not a multiple of its "
                f"{config.heads(level)} heads; change num_heads or width."
            )
    return faults


def _data_faults(config: UNetConfig, data: DataSpec) -> list[str]:
    faults = []
    height, width, channels = data.image_shape or (None, None, None)
    sizes = {
        "channels": (channels, "latents of the data have", "channels"),
        "context_dim": (data.context_dim, "texts of the data have", "dims"),
    }
    for name, (theirs, have, what) in sizes.items():
        ours = getattr(config, name)
        if ours is None and theirs is None:
            faults.append(f"{name} is unknown: neither the model nor its data set it.")
        elif ours is not None and theirs is not None and ours != theirs:
            faults.append(f"the {have} {theirs} {what}, but {name}={ours}; leave it out.")
    factor = 2 ** (len(config.multipliers) - 1)
    if height is not None and width is not None and (height % factor or width % factor):
        faults.append(
            f"latents of {height} x {width} cannot be halved {len(config.multipliers) - 1} times; "
            f"give data whose sizes are multiples of {factor}."
        )
    # Data whose spec knows nothing of texts says nothing of pooled ones either.
    if data.context_dim is not None and config.pooled_dim != data.pooled_dim:
        ours, theirs = ("null" if x is None else x for x in (config.pooled_dim, data.pooled_dim))
        faults.append(
            f"pooled_dim is {ours} in the model, but {theirs} in the data; make them equal."
        )
    return faults
