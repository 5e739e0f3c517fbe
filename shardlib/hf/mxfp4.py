"""Tensors in MXFP4, as gpt-oss is published: unpacked to bfloat16, which holds them exactly.

A number takes 4 bits (a sign, 2 of exponent, 1 of mantissa), and each 32 along the inputs of a
kernel share a scale, a power of two. A tensor `X` [expert, inputs, outputs] lies on disk as
`X_blocks` [expert, outputs, inputs / 32, 16] of bytes with two numbers each, the first in the low
bits, and `X_scales` [expert, outputs, inputs / 32].

Source: Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification", sections 5.3.3
(E2M1) and 5.4.1 (E8M0).
"""

import functools
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from shardlib.errors import CheckpointError
from shardlib.hf.safetensors import Entry, Tensors
from shardlib.hf.tensor_table import Index, Parameter, TensorTable

_GROUP = 32
_BYTES = _GROUP // 2
_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS, _SCALE_NAN = 127, 255


def unpacked(tensors: Tensors, source: Mapping[str, Any]) -> Tensors:
    """Returns the tensors of a folder, unpacked where its config.json says that they are packed.

    Args:
        tensors: The tensors as they lie in the files.
        source: The contents of config.json.

    Raises:
        CheckpointError: If they are packed in another way than MXFP4.
    """
    packed = source.get("quantization_config")
    if packed is None:
        return tensors
    method = packed.get("quant_method") if isinstance(packed, Mapping) else packed
    if method != "mxfp4":
        raise CheckpointError(
            f"{tensors.folder / 'config.json'} has quantization_config of quant_method={method!r}; "
            "supported: 'mxfp4'.\n  Choose a checkpoint in bfloat16 or float32, or save one with "
            "transformers: `model.dequantize().save_pretrained(...)`."
        )
    return Mxfp4Tensors(tensors)


class Mxfp4Tensors(Tensors):
    """The tensors of a folder by name, those in MXFP4 under the names of their unpacked ones.

    Unpacked are the shards that are read, one layer at a time.
    """

    def __init__(self, tensors: Tensors):
        """Args: the tensors as they lie in the files."""
        self._held, self.folder = tensors, tensors.folder
        self.entries = dict(tensors.entries)
        self.packed = {
            name.removesuffix(_BLOCKS)
            for name, entry in tensors.entries.items()
            if name.endswith(_BLOCKS) and _is_packed(entry, tensors.entries.get(_scales(name)))
        }
        for name in self.packed:
            blocks = self.entries.pop(name + _BLOCKS)
            del self.entries[name + _SCALES]
            experts, outputs, groups, _ = blocks.shape
            shape = (experts, groups * _GROUP, outputs)
            self.entries[name] = Entry(blocks.file, np.dtype(ml_dtypes.bfloat16), shape, 0)

    def __getitem__(self, name: str) -> np.ndarray:
        assert name not in self.packed, "read by shards"
        return self._held[name]

    def drop(self, name: str) -> None:
        """Lets go of the pages of a tensor, which are read again at its next use."""
        for held in (name + _BLOCKS, name + _SCALES) if name in self.packed else (name,):
            self._held.drop(held)

    def shard(
        self, layout: TensorTable, path: str, index: Index, names: Mapping[str, str]
    ) -> np.ndarray:
        """Returns a shard of our parameter; see `Tensors.shard`."""
        if names[next(layout.names(path, index))] not in self.packed:
            return super().shard(layout, path, index, names)
        row, axes = layout.rows[path], layout.params[path].axes
        assert len(row.counted) == 1, "layers are stacked, experts are not"
        (axis,) = row.dims[1].outer
        grouped = _grouped(layout, path, axis)
        at = axes.index(axis)
        start, stop, _ = index[at].indices(layout.params[path].shape[at])
        first, last = start // _GROUP, -(-stop // _GROUP)
        wanted: list[slice] = [slice(None)] * (len(axes) - 1)
        wanted[at - 1] = slice(start - first * _GROUP, stop - first * _GROUP)

        def blocks(name: str) -> np.ndarray:
            groups = self._held[names[name] + _BLOCKS].view(np.dtype((np.void, _BYTES)))
            return groups[..., 0].swapaxes(1, 2)

        def scales(name: str) -> np.ndarray:
            return self._held[names[name] + _SCALES].swapaxes(1, 2)

        layers = []
        for layer in range(*index[0].indices(layout.params[path].shape[0])):
            whole = [slice(layer, layer + 1), *index[1:]]
            whole[at] = slice(first, last)
            packed = grouped.read(path, tuple(whole), blocks)[0]
            scale = grouped.read(path, tuple(whole), scales)[0]
            layers.append(_unpacked(packed, scale, at - 1)[tuple(wanted)])
        return np.stack(layers)


def _scales(blocks: str) -> str:
    return blocks.removesuffix(_BLOCKS) + _SCALES


def _is_packed(blocks: Entry, scales: Entry | None) -> bool:
    """Whether tensors have the dtypes and shapes of MXFP4."""
    return (
        scales is not None
        and blocks.dtype == scales.dtype == np.uint8
        and len(blocks.shape) == 4
        and blocks.shape == (*scales.shape, _BYTES)
    )


def _grouped(layout: TensorTable, path: str, axis: str) -> TensorTable:
    """Returns a table of tensors whose entries are groups along an axis of a parameter."""
    known = layout.params
    shape = known[path].shape
    shape = tuple(
        n // _GROUP if a == axis else n for a, n in zip(known[path].axes, shape, strict=True)
    )
    # The parts of one tensor stay together.
    of_tensor = [row for row in layout.rows.values() if row.theirs == layout.rows[path].theirs]
    return TensorTable(
        of_tensor, {row.ours: Parameter(known[path].axes, shape) for row in of_tensor}
    )


def _unpacked(blocks: np.ndarray, scales: np.ndarray, axis: int) -> np.ndarray:
    """Returns the numbers in bfloat16 of groups and their scales, along an axis of both."""
    outer, rest = scales.shape[: axis + 1], scales.shape[axis + 1 :]
    out = np.empty((*outer, _GROUP, *rest), np.uint16)
    # A group of all outputs at a time, which caches hold while it is transposed.
    for at in np.ndindex(*outer):
        pairs = blocks[at][..., None].view(np.uint8)
        index = (scales[at].astype(np.uint16)[..., None] << 8) | pairs
        out[at] = np.moveaxis(np.take(_table(), index).view(np.uint16), -1, 0)
    return out.reshape(*outer[:-1], -1, *rest).view(ml_dtypes.bfloat16)


@functools.cache
def _table() -> np.ndarray:
    """Returns both numbers of each byte under each scale, as 32 bits: [256 * 256]."""
    values = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float64)
    both = np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=-1)
    scale = np.ldexp(1.0, np.arange(256) - _SCALE_BIAS)
    scale[_SCALE_NAN] = np.nan
    with np.errstate(over="ignore"):  # 6 * 2**127 is infinite in bfloat16.
        numbers = (scale[:, None, None] * both).astype(ml_dtypes.bfloat16)
    return numbers.reshape(-1, 2).view(np.uint32)[:, 0]
