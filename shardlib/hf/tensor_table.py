"""Tables between our parameters and the tensors of a Hugging Face checkpoint.

A row names one of our parameters, one of their tensors, and the dims of that tensor by our logical
axes:

```
layers/attention/query/kernel  model.layers.{layers}.self_attn.q_proj.weight  heads*head_dim embed
```

- A line may hold several rows: `query/kernel|bias  q_proj.weight|bias  (heads*head_dim) embed`. All
  but the first have the dims in parentheses alone.
- A dim is a product of our logical axes, the slowest first; `1` is a dim of size one.
- `{axis}` in the name counts along a leading axis of ours, `{axis+3}` from 3 on.
- Rows with the same name are parts of one tensor, in order. A `+` marks where a dim joins them:
  `+mlp` one after the other, `heads*+head_dim` within each head, `mlp*+` alternating.

A row gives a strided view of their tensor in our axes. An import reads the view and an export
writes it, so that they are inverse bit for bit. No row computes.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardlib.errors import ModelError
from shardlib.hf.tiled_copy import copy

Index = tuple[slice, ...]

_COUNTED = re.compile(r"{(\w+)(?:\+(\d+))?}")


class Parameter(NamedTuple):
    """The logical axes and the shape of one of our parameters."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each logical axis."""
        return dict(zip(self.axes, self.shape, strict=True))


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dim of their tensor: the axes before the place where parts are joined, and after it."""

    outer: tuple[str, ...]
    inner: tuple[str, ...] | None = None
    """None if the dim joins no parts."""


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """One row of a table."""

    ours: str
    theirs: str
    dims: tuple[Dim, ...]

    @property
    def counted(self) -> tuple[str, ...]:
        """The axes of ours that the name of their tensor counts."""
        return tuple(axis for axis, _ in _COUNTED.findall(self.theirs))

    def name(self, at: Sequence[int]) -> str:
        """Returns the name of their tensor at leading indices of ours."""
        index = iter(at)
        return _COUNTED.sub(lambda axis: str(next(index) + int(axis[2] or 0)), self.theirs)


def rows(text: str) -> tuple[TensorRow, ...]:
    """Returns the rows of a table written as text; see the module."""
    lines = (line.split() for line in text.strip().splitlines() if line.strip())
    return tuple(row for ours, theirs, *dims in lines for row in _of_line(ours, theirs, dims))


def _of_line(ours: str, theirs: str, dims: list[str]) -> Iterator[TensorRow]:
    named = zip(_alternatives(ours, "/"), _alternatives(theirs, "."), strict=True)
    for number, (own, other) in enumerate(named):
        held = [dim.strip("()") for dim in dims if not number or dim.startswith("(")]
        yield TensorRow(own, other, tuple(map(_dim, held)))


def _alternatives(name: str, separator: str) -> list[str]:
    """Returns `a/b` and `a/c` for `a/b|c`."""
    first, *others = name.split("|")
    start = first.rpartition(separator)
    return [first, *(f"{start[0]}{separator}{other}" for other in others)]


def _dim(text: str) -> Dim:
    outer, joins, inner = text.partition("+")
    axes = [
        tuple(axis for axis in part.split("*") if axis not in ("", "1")) for part in (outer, inner)
    ]
    return Dim(axes[0], axes[1] if joins else None)


class TensorTable:
    """A table applied to the parameters of one model."""

    def __init__(self, table: Sequence[TensorRow], params: Mapping[str, Parameter]):
        """Args: the table, whose rows may name parameters that this model lacks, and the parameters
        by path.

        Raises:
            ModelError: If a parameter has no row, or an axis that the name counts does not lead.
        """
        self.params = params
        self.rows = {row.ours: row for row in table if row.ours in params}
        if absent := params.keys() - self.rows.keys():
            raise ModelError(
                f"the table of tensors has no row for {', '.join(sorted(absent))}.\n"
                "  Add one for each to the table of the architecture."
            )
        self._parts: dict[str, list[TensorRow]] = {}
        for row in self.rows.values():
            assert params[row.ours].axes[: len(row.counted)] == row.counted, row
            self._parts.setdefault(row.theirs, []).append(row)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yields the name and the shape of every tensor of theirs, and the path of a part of it."""
        for parts in self._parts.values():
            shape = self._shape(parts[0])
            for _, name in self._names(parts[0]):
                yield name, shape, parts[0].ours

    def names(self, path: str, index: Index) -> Iterator[str]:
        """Yields the names of the tensors that a shard of our parameter reads."""
        row = self.rows[path]
        for at in _points(index, self.params[path].shape, len(row.counted)):
            yield row.name(at)

    def read(self, path: str, index: Index, tensor: Callable[[str], np.ndarray]) -> np.ndarray:
        """Returns a shard of our parameter, copied from their tensors.

        Args:
            path: The path of the parameter.
            index: The slice of each of its dims.
            tensor: Returns their tensor of a name, mapped or in memory.
        """
        row, shape = self.rows[path], self.params[path].shape
        num_counted = len(row.counted)
        lengths = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
        out: np.ndarray | None = None
        within = np.ndindex(*lengths[:num_counted])
        for place, at in zip(within, _points(index, shape, num_counted), strict=True):
            # With an ellipsis scalars are views, too.
            view = self._view(row, tensor(row.name(at)))[(*index[num_counted:], ...)]
            out = np.empty(lengths, view.dtype) if out is None else out
            copy(out[(*place, ...)], view)
        assert out is not None, "a shard is not empty"
        return out

    def write(
        self,
        fill: Callable[[np.ndarray, str, tuple[int, ...]], None],
        specs: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name and the values of every tensor of theirs, in the order of `tensors`.

        All lie in one buffer of the size of the largest: values hold until the next are drawn.

        Args:
            fill: `fill(view, path, at)` writes our parameter at leading indices into a view.
            specs: The shape and the dtype of each tensor by name.
        """
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in specs.items()}
        buffer = np.empty(max(sizes.values(), default=0), np.uint8)
        for parts in self._parts.values():
            for at, name in self._names(parts[0]):
                shape, dtype = specs[name]
                out = buffer[: sizes[name]].view(dtype).reshape(shape)
                for part in parts:
                    fill(self._view(part, out), part.ours, at)
                yield name, out

    def _names(self, row: TensorRow) -> Iterator[tuple[tuple[int, ...], str]]:
        sizes = self.params[row.ours].sizes
        for at in itertools.product(*(range(sizes[axis]) for axis in row.counted)):
            yield at, row.name(at)

    def _shape(self, row: TensorRow) -> tuple[int, ...]:
        return tuple(
            self._size(row, dim.outer) * sum(self._joined(row, position) or [1])
            for position, dim in enumerate(row.dims)
        )

    def _size(self, row: TensorRow, axes: Sequence[str]) -> int:
        sizes = self.params[row.ours].sizes
        return math.prod(sizes[axis] for axis in axes)

    def _joined(self, row: TensorRow, position: int) -> list[int]:
        """Returns the sizes of the parts along a dim that joins them."""
        if row.dims[position].inner is None:
            return []
        return [
            self._size(part, part.dims[position].inner or ()) for part in self._parts[row.theirs]
        ]

    def _view(self, row: TensorRow, tensor: np.ndarray) -> np.ndarray:
        """Returns a view of their tensor with the dims of our parameter that are not counted."""
        parameter = self.params[row.ours]
        shape: list[int] = []
        index: list[slice] = []
        axes: list[str] = []
        number = self._parts[row.theirs].index(row)
        for position, dim in enumerate(row.dims):
            shape += [parameter.sizes[axis] for axis in dim.outer]
            index += [slice(None)] * len(dim.outer)
            axes += [*dim.outer, *(dim.inner or ())]
            if lengths := self._joined(row, position):
                start = sum(lengths[:number])
                shape.append(sum(lengths))
                index.append(slice(start, start + lengths[number]))
        view = tensor.reshape(shape)[(*index, ...)]
        view = view.reshape([parameter.sizes[axis] for axis in axes])
        assert np.may_share_memory(view, tensor), "a row gives a view"
        return view.transpose([axes.index(a) for a in parameter.axes if a not in row.counted])


def _points(index: Index, shape: Sequence[int], num: int) -> Iterator[tuple[int, ...]]:
    """Yields the leading indices of ours that a shard covers."""
    ranges = [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
    return itertools.product(*ranges[:num])
