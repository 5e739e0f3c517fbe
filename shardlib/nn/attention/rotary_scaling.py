"""Rotary frequencies of models that read longer sequences than they were first trained on.

Each kind changes the frequencies `theta**(-2i / head_dim)`, and may enlarge cosines and sines by an
`amplitude`, which sharpens attention.
"""

import math
from typing import Literal

import numpy as np

from shardlib.config import configclass


@configclass
class RotaryScaling:
    """Stretches the slow frequencies.

    Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models", and the reference code published
    with Llama 3.1, whose constants are the defaults.
    """

    kind: Literal["llama3"] = "llama3"
    factor: float = 8.0
    """Factor by which the low frequencies are slowed down."""
    low_frequency_factor: float = 1.0
    """Wavelengths longer than `original_positions / low_frequency_factor` are stretched in full."""
    high_frequency_factor: float = 4.0
    """Wavelengths shorter than `original_positions / high_frequency_factor` stay as they are."""
    original_positions: int = 8192
    """Sequence length of the original training, in tokens."""

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    def scaled(self, plain: np.ndarray, theta: float, length: int | None) -> np.ndarray:
        """Returns the frequencies [head_dim / 2] for rows of `length` tokens."""
        turns = self.original_positions * plain / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return kept * plain + (1.0 - kept) * plain / self.factor


@configclass
class LinearScaling:
    """Divides all frequencies.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation".
    """

    kind: Literal["linear"] = "linear"
    factor: float = 1.0
    """Divisor of the frequencies."""

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    def scaled(self, plain: np.ndarray, theta: float, length: int | None) -> np.ndarray:
        """Returns the frequencies [head_dim / 2] for rows of `length` tokens."""
        return plain / self.factor


@configclass
class YarnScaling:
    """Slows down dims by how often they turn over the original length.

    Source: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models",
    sec. 3; the two factors of `mscale`: the reference code published with DeepSeek-V2.
    """

    kind: Literal["yarn"] = "yarn"
    factor: float = 1.0
    """Divisor of the frequencies of dims that turn slowly."""
    original_positions: int = 4096
    """Sequence length of the original training, in tokens."""
    fast_turns: float = 32.0
    """Dims that turn more often over the original length keep their frequency."""
    slow_turns: float = 1.0
    """Dims that turn less often are slowed down in full."""
    mscale: float | None = None
    """Weight of log(factor) in the amplitude; null for 1."""
    mscale_all_dim: float | None = None
    """Weight of log(factor) in the divisor of the amplitude; null for no divisor."""
    truncate: bool = True
    """Whether the range of dims between these two is rounded to whole pairs; false in gpt-oss."""

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        if self.mscale and self.mscale_all_dim:
            return self.sharpening(self.mscale) / self.sharpening(self.mscale_all_dim)
        return self.sharpening(1.0)

    def sharpening(self, weight: float) -> float:
        """Returns 1 + 0.1 * weight * log(factor)."""
        return 1.0 + 0.1 * weight * math.log(self.factor) if self.factor > 1.0 else 1.0

    def scaled(self, plain: np.ndarray, theta: float, length: int | None) -> np.ndarray:
        """Returns the frequencies [head_dim / 2] for rows of `length` tokens."""
        pairs = len(plain)

        def pair(turns: float) -> float:
            """Returns the index of the pair that turns so often over the original length."""
            wavelengths = self.original_positions / (turns * 2 * math.pi)
            return pairs * math.log(wavelengths) / math.log(theta)

        first, last = pair(self.fast_turns), pair(self.slow_turns)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        ramp = np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0.0, 1.0)
        return (1.0 - ramp) * plain + ramp * plain / self.factor


@configclass
class LongScaling:
    """Divides each frequency by a factor of its own, one list for short rows and one for long.

    The length of a row decides, and in generation that of prompt and result together, so that all
    keys of a cache agree.

    Source: Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", and
    the configuration published with Phi-3.
    """

    kind: Literal["longrope"] = "longrope"
    short_factors: tuple[float, ...] = ()
    """Divisors for rows of at most `original_positions` tokens, one for each pair of dims."""
    long_factors: tuple[float, ...] = ()
    """Divisors for longer rows."""
    factor: float = 1.0
    """The longest sequence as a multiple of `original_positions`."""
    original_positions: int = 4096
    """Sequence length of the original training, in tokens."""

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_positions))

    def scaled(self, plain: np.ndarray, theta: float, length: int | None) -> np.ndarray:
        """Returns the frequencies [head_dim / 2] for rows of `length` tokens."""
        is_long = length is not None and length > self.original_positions
        return plain / np.asarray(self.long_factors if is_long else self.short_factors)


Scaling = RotaryScaling | LinearScaling | YarnScaling | LongScaling

SCALINGS: dict[str, type] = {
    "llama3": RotaryScaling,
    "linear": LinearScaling,
    "yarn": YarnScaling,
    "longrope": LongScaling,
}
"""The kinds by name."""


def faults(scaling: Scaling, rotary_dims: int) -> list[str]:
    """Returns all faults of a scaling for heads of which `rotary_dims` dims are rotated."""
    found = []
    if scaling.factor <= 0:
        found.append(f"rope_scaling.factor is {scaling.factor}; it must be greater than 0.")
    if not isinstance(scaling, LinearScaling) and scaling.original_positions < 2:
        found.append(
            f"rope_scaling.original_positions is {scaling.original_positions}; it must be at least "
            "2."
        )
    if isinstance(scaling, LongScaling):
        for name in ("short_factors", "long_factors"):
            values = getattr(scaling, name)
            if len(values) != rotary_dims // 2 or min(values) <= 0:
                found.append(
                    f"rope_scaling.{name} has {len(values)} values; give {rotary_dims // 2} "
                    "positive ones, one for each rotated pair of dims."
                )
    return found
