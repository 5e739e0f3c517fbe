"""A text drawing of the placement of one array."""

import math
from typing import Any

import jax
from jax.sharding import Sharding

from shardlib.tables import aligned


def draw(
    array: jax.Array | jax.ShapeDtypeStruct | Sharding, shape: tuple[int, ...] | None = None
) -> str:
    """Draws the placement of an array as text: one cell for each shard, with its devices.

    Arrays of any rank are drawn over the two dims with the most shards.

    Args:
        array: An array or `ShapeDtypeStruct` with a sharding, or a sharding with `shape`.
        shape: Shape of the array if `array` is a sharding.

    Raises:
        TypeError: If the array has no sharding, such as one of NumPy.
    """
    if not isinstance(array, Sharding) and not hasattr(array, "sharding"):
        raise TypeError(
            f"draw takes an array with a sharding, or a sharding, not {type(array).__name__}.\n"
            "  Place the array first: jax.device_put(array, sharding)."
        )
    sharding = array if isinstance(array, Sharding) else array.sharding
    dims = tuple(getattr(array, "shape", ()) if shape is None else shape)
    pieces: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(dims).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, dims, strict=True))
        pieces.setdefault(bounds, []).append(device.id)
    cuts = [sorted({bounds[dim] for bounds in pieces}) for dim in range(len(dims))]
    finest = sorted(range(len(dims)), key=lambda d: (-len(cuts[d]), d))[:2]
    row_dim, column_dim = [*sorted(finest), None, None][:2]
    rows = [None] if row_dim is None else cuts[row_dim]
    columns = [None] if column_dim is None else cuts[column_dim]
    cells: dict[tuple[Any, Any], list[str]] = {}
    for bounds, ids in sorted(pieces.items()):
        row = None if row_dim is None else bounds[row_dim]
        column = None if column_dim is None else bounds[column_dim]
        cells.setdefault((row, column), []).append(_ids(ids))
    count = math.prod(len(c) for c in cuts)
    header = f"{'x'.join(map(str, dims)) or 'scalar'} in {count} piece{'s' * (count > 1)}"
    table = [[_range(row_dim, r), *(" / ".join(cells[r, c]) for c in columns)] for r in rows]
    if column_dim is not None:
        table.insert(0, ["", *(_range(column_dim, c) for c in columns)])
    return "\n".join([header, *aligned(table)])


def _range(dim: int | None, bounds: tuple[int, int] | None) -> str:
    return "" if bounds is None else f"dim {dim} [{bounds[0]}:{bounds[1]}]"


def _ids(ids: list[int]) -> str:
    """Returns device ids as text, with runs shortened: `0-3` or `0,2,4`."""
    ids = sorted(ids)
    if len(ids) > 2 and ids == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]}-{ids[-1]}"
    return ",".join(map(str, ids))
