"""Rotary position embeddings.

A rotation pairs the two halves of a head (dim i with dim i + d/2), like the published Llama weights
in the Hugging Face format. The paper pairs neighbouring dims, which is the same up to a permutation
of the dims.

Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.errors import ModelError
from shardlib.nn.attention.rotary_scaling import Scaling


def frequencies(
    head_dim: int,
    theta: float = 10_000.0,
    scaling: Scaling | None = None,
    *,
    length: int | None = None,
) -> np.ndarray:
    """Returns the angular frequencies, in radians per position: [head_dim / 2] float32.

    Args:
        head_dim: The rotated dims of a head.
        theta: The base of the wavelengths.
        scaling: A change of the frequencies; None for none.
        length: The tokens of a row, which some scalings depend on; None for few.

    Raises:
        ModelError: If `head_dim` is odd.
    """
    if head_dim % 2:
        raise ModelError(
            f"rotary embeddings rotate pairs of dims, but head_dim is {head_dim}.\n"
            "  Use an even head_dim."
        )
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        plain = scaling.scaled(plain, theta, length)
    return plain.astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotations:
    """Cosines and sines of the angles at each position: [batch, length, head_dim / 2] float32."""

    cos: jax.Array
    sin: jax.Array


def rotations(
    positions: jax.Array, frequencies: np.ndarray | jax.Array, amplitude: float = 1.0
) -> Rotations:
    """Returns the rotations at `positions` [batch, length] int32; call it once per forward pass.

    `amplitude` is the factor of cosines and sines that a scaling asks for.
    """
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)[None, None]
    if amplitude == 1.0:
        return Rotations(jnp.cos(angles), jnp.sin(angles))
    return Rotations(amplitude * jnp.cos(angles), amplitude * jnp.sin(angles))


def rotate(x: jax.Array, rotations: Rotations, *, interleaved: bool = False) -> jax.Array:
    """Returns `x` [batch, length, heads, head_dim] rotated by its positions, in its own dtype.

    The rotation itself is computed in float32. Frequencies of fewer dims rotate the first dims of a
    head, and leave the others.

    Args:
        x: Queries or keys.
        rotations: The rotations at their positions.
        interleaved: Whether dims 0 and 1, 2 and 3, ... are pairs, as in GPT-J; else a dim of the
            first half and one of the second half are a pair, as in GPT-NeoX and Llama.
    """
    size = 2 * rotations.cos.shape[-1]
    turned, kept = x[..., :size].astype(jnp.float32), x[..., size:]
    cos, sin = rotations.cos[:, :, None], rotations.sin[:, :, None]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
        pairs = [first * cos - second * sin, second * cos + first * sin]
        turned = jnp.stack(pairs, axis=-1).reshape(turned.shape)
    else:
        first, second = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, kept], axis=-1) if kept.shape[-1] else turned
