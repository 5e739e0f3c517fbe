"""Memory of arrays on TPUs, which pad the last two dims of a layout to tiles of 8 by 128.

A compiler chooses which dims are last. Source: "Array layouts" in the documentation of JAX's Pallas
for TPUs; the choices are read from compiled steps.
"""

import math
from collections.abc import Sequence

_SUBLANES, _LANES = 8, 128


def least_padding(dims: Sequence[float]) -> float:
    """Returns the size of a padded array over its size, with the best dim last."""
    return min(map(lane_padding, filter(None, dims)), default=1.0)


def lane_padding(lanes: float) -> float:
    """Returns the same with a dim of `lanes` last."""
    return _padded(lanes, _LANES) / lanes if lanes else 1.0


def operand_padding(batch: float, features: float) -> float:
    """Returns the same for an operand of a convolution, whose last two dims are its batch and its
    features, in the better order."""
    return min(
        _padded(last, _LANES) / last * _padded(other, _tile(other)) / other
        for last, other in ((batch, features), (features, batch))
    )


def _tile(dim: float) -> int:
    """Returns the sublanes of a tile: fewer for a small dim."""
    return min(_SUBLANES, 2 ** math.ceil(math.log2(max(dim, 1))))


def _padded(dim: float, to: int) -> float:
    return math.ceil(dim / to) * to
