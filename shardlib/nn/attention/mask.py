"""Scores of pairs and the visibility of keys to queries, for single pairs and for whole tiles."""

import dataclasses
import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.errors import ModelError
from shardlib.nn.attention.tiles import AnyArray, cut


class Places(NamedTuple):
    """Positions and documents of queries or keys. The last two dims are [batch, length]."""

    positions: AnyArray
    """int32, position in the whole row; batch is 1 where all rows agree."""
    segments: AnyArray | None = None
    """int32, document; None for one document per row."""


def places(length: int, positions: AnyArray | None, segments: AnyArray | None) -> Places:
    """Returns the places of a row; positions default to 0, 1, 2, ..."""
    ramp = np.arange(length, dtype=np.int32)[None]
    return Places(ramp if positions is None else positions, segments)


@dataclasses.dataclass(frozen=True)
class Mask:
    """The rules that hide a key from a query, in addition to documents, and those that scale and
    bound the scores of the others.

    Raises:
        ModelError: If a window is not causal or is empty, or the scale or the bound is not
            positive.
    """

    causal: bool = True
    """Whether keys at later positions are hidden."""
    window: int | None = None
    """Number of positions a query sees, including its own; None for all."""
    scale: float | None = None
    """Factor of the scores; None for 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Bound c of the scores, as c * tanh(scores / c); None for none."""

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ModelError(
                f"an attention window of {self.window} positions needs causal=True and at least 1 "
                "position.\n  Set window=None, or causal=True and window=1 or more."
            )
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and not 0.0 < value < math.inf:
                raise ModelError(
                    f"{name} of attention is {value}; it must be greater than 0, and finite.\n"
                    f"  Set {name}=None for the default."
                )

    def factor(self, head_dim: int) -> float:
        """Returns the factor of the scores of queries and keys with `head_dim` dims."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale

    def scaled(self, x: jax.Array, head_dim: int) -> jax.Array:
        """Returns scores, or queries, times the factor of the scores."""
        return x / math.sqrt(head_dim) if self.scale is None else x * self.scale

    def capped(self, scores: jax.Array) -> jax.Array:
        """Returns scaled scores within their bound."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def slope(self, capped: jax.Array) -> jax.Array | None:
        """Returns the derivative of `capped` by the scores, from its result; None if it is 1."""
        return None if self.softcap is None else 1.0 - jnp.square(capped / self.softcap)

    def pairs(self, queries: Places, keys: Places) -> jax.Array | None:
        """Returns a bool mask of the visible pairs, [batch or 1, length, kv_length]; None if all
        are visible."""
        parts = []
        if queries.segments is not None and keys.segments is not None:
            parts.append(queries.segments[:, :, None] == keys.segments[:, None, :])
        if self.causal:
            distance = queries.positions[:, :, None] - keys.positions[:, None, :]
            parts.append(distance >= 0)
            if self.window is not None:
                parts.append(distance < self.window)
        if not parts:
            return None
        return jnp.asarray(functools.reduce(operator.and_, parts))

    def tiles(self, queries: Places, keys: Places) -> AnyArray:
        """Returns the tiles in which a query may see a key, [query tiles, key tiles] bool, from the
        places of both, [tiles, batch, tile].

        The test uses the smallest and largest position and document of each tile, so no visible
        pair is left out. Returns NumPy arrays for NumPy inputs.
        """
        first, last = _range(queries.positions)
        kv_first, kv_last = _range(keys.positions)
        parts: list[AnyArray] = [np.ones((first.shape[0], kv_first.shape[0], 1), bool)]
        if self.causal:
            parts.append(kv_first[None] <= last[:, None])
        if self.window is not None:
            parts.append(first[:, None] - kv_last[None] < self.window)
        if queries.segments is not None and keys.segments is not None:
            low, high = _range(queries.segments)
            kv_low, kv_high = _range(keys.segments)
            parts.append((low[:, None] <= kv_high[None]) & (kv_low[None] <= high[:, None]))
        return functools.reduce(operator.and_, parts).any(axis=-1)  # type: ignore[return-value]


def _range(x: AnyArray) -> tuple[AnyArray, AnyArray]:
    return x.min(axis=-1), x.max(axis=-1)


def cut_places(at: Places, tile: int) -> Places:
    """Cuts places of [batch, length] into tiles of [batch, tile]."""
    ids = None if at.segments is None else cut(at.segments, tile)
    return Places(cut(at.positions, tile), ids)
