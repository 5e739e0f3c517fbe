"""Exchange between the stored order of layers and the order of an interleaved pipeline.

A stage stores consecutive layers, whatever the schedule, so a training state does not depend on the
schedule. With v chunks on each of S stages, stage s runs chunks s, S + s, 2 S + s, ... of the v S
chunks of consecutive layers. The exchange takes v rounds, and in each round every stage sends one
chunk and receives one. A step makes two exchanges: the parameters of all layers in their storage
dtype, and their gradients in float32. One of S chunks does not move.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

Layers: TypeAlias = Shaped[Array, "layers ..."]
"""A variable of the layers that a stage stores."""


class Round(NamedTuple):
    """A round in which each stage sends one chunk, with positions of the chunks by stage."""

    stored: np.ndarray
    """Position of the chunk among the chunks that the stage stores."""
    run: np.ndarray
    """Position of the arriving chunk among the chunks that the stage runs."""
    pairs: tuple[tuple[int, int], ...]
    """Pairs of stages (from, to)."""


def rounds(stages: int, chunks: int) -> list[Round]:
    """Returns the rounds that bring every chunk to the stage that runs it.

    Stage s stores the chunks `v s + j`, and chunk k runs on stage `k mod S`. Let g = gcd(v, S). In
    a round with the same j everywhere, stages with equal numbers modulo S / g would send to the
    same stage. Each of them therefore takes a different one of g neighbouring j.
    """
    common = math.gcd(stages, chunks)
    result = []
    for index in range(chunks):
        stored, run, pairs = np.zeros(stages, np.int32), np.zeros(stages, np.int32), []
        for source in range(stages):
            turn = (index + source * common // stages) % common
            stored[source] = index - index % common + turn
            run_index, target = divmod(source * chunks + int(stored[source]), stages)
            run[target] = run_index
            pairs.append((source, target))
        result.append(Round(stored, run, tuple(pairs)))
    return result


def to_run(
    leaves: Mapping[str, Layers], axis: str, stages: int, chunks: int
) -> dict[str, jax.Array]:
    """Returns this stage's layers in running order; manual over `axis`."""
    routes = [(r.stored, r.run, r.pairs) for r in rounds(stages, chunks)]
    return _exchange(leaves, axis, chunks, routes)


def to_store(
    leaves: Mapping[str, Layers], axis: str, stages: int, chunks: int
) -> dict[str, jax.Array]:
    """Returns layers in stored order, the inverse of `to_run`."""
    routes = [(r.run, r.stored, [(b, a) for a, b in r.pairs]) for r in rounds(stages, chunks)]
    return _exchange(leaves, axis, chunks, routes)


def _exchange(
    leaves: Mapping[str, Layers],
    axis: str,
    chunks: int,
    routes: Sequence[tuple[np.ndarray, np.ndarray, Sequence[tuple[int, int]]]],
) -> dict[str, jax.Array]:
    """Sends chunks along routes: positions before and after by stage, and pairs of stages."""
    stage = jax.lax.axis_index(axis)
    result = {path: jnp.zeros_like(leaf) for path, leaf in leaves.items()}
    for before, after, pairs in routes:
        for path, leaf in leaves.items():
            size = leaf.shape[0] // chunks
            start = jnp.asarray(before)[stage] * size
            chunk = jax.lax.dynamic_slice_in_dim(leaf, start, size)
            chunk = jax.lax.ppermute(chunk, axis, pairs)
            start = jnp.asarray(after)[stage] * size
            result[path] = jax.lax.dynamic_update_slice_in_dim(result[path], chunk, start, 0)
    return result
