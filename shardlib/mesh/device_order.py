"""The position of each device in a mesh, and a drawing of it."""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from shardlib.errors import MeshError
from shardlib.hardware import slice_of
from shardlib.humanize import plural

_LOG = logging.getLogger(__name__)
_GRID_DEVICES, _GRID_COLUMNS, _GRID_AXES = 64, 16, 3


def count_groups(devices: Sequence[Any]) -> int:
    """Returns the number of device groups joined by a slow network: slices, or else GPU hosts.

    CPU processes are not counted: they share one memory and have no fast links to prefer.
    """
    slices = len({slice_of(device) for device in devices})
    hosts = len({device.process_index for device in devices})
    return hosts if slices == 1 and devices[0].platform in ("gpu", "cuda", "rocm") else slices


def arrange(
    devices: Sequence[Any], *, names: Sequence[str], outer: Sequence[int], inner: Sequence[int]
) -> np.ndarray:
    """Returns the devices as an object array whose dim i has size `outer[i] * inner[i]`: the
    degrees across groups, and within a group.

    Groups (slices or hosts) are in index order, the last axis fastest. The devices of each group
    are placed by `mesh_utils.create_device_mesh`, which follows the torus.

    Raises:
        MeshError: If the devices do not form the groups that the outer degrees ask for.
    """
    if devices[0].platform == "cpu":
        ordered = sorted(devices, key=lambda device: device.process_index)
        return _interleave(_object_array(ordered), outer, inner)
    if math.prod(outer) == 1:
        sizes = [o * i for o, i in zip(outer, inner, strict=True)]
        outer = _leading_degrees(sizes, len({slice_of(device) for device in devices}))
        inner = [size // degree for size, degree in zip(sizes, outer, strict=True)]
    groups = _groups(devices, names, outer, inner)
    grids = [_place_group(group, inner).reshape(-1) for group in groups]
    return _interleave(np.concatenate(grids), outer, inner)


def _object_array(devices: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array


def _interleave(flat: np.ndarray, outer: Sequence[int], inner: Sequence[int]) -> np.ndarray:
    """Reshapes devices ordered by (all outer degrees, all inner degrees) to one dim per axis."""
    rank = len(outer)
    order = [dim for axis in range(rank) for dim in (axis, rank + axis)]
    grid = flat.reshape(*outer, *inner).transpose(order)
    return grid.reshape([o * i for o, i in zip(outer, inner, strict=True)])


def _leading_degrees(sizes: Sequence[int], num_slices: int) -> list[int]:
    """Spreads slices over the leading axes; always succeeds when they divide the devices."""
    degrees, remaining = [], num_slices
    for size in sizes:
        degrees.append(math.gcd(size, remaining))
        remaining //= degrees[-1]
    return degrees


def _groups(
    devices: Sequence[Any], names: Sequence[str], outer: Sequence[int], inner: Sequence[int]
) -> list[list[Any]]:
    """Splits devices into the groups of the outer degrees: slices if they fit, or hosts."""
    by_slice, by_host = defaultdict(list), defaultdict(list)
    for device in devices:
        by_slice[slice_of(device)].append(device)
        by_host[device.process_index].append(device)
    wanted = math.prod(outer)
    mesh = ",".join(
        f"{name}={o * i}" if o == 1 else f"{name}={o}x{i}"
        for name, o, i in zip(names, outer, inner, strict=True)
    )
    fitting = [groups for groups in (by_slice, by_host) if len(groups) == wanted]
    if not fitting:
        form = f"{plural(len(by_slice), 'slice')} on {plural(len(by_host), 'host')}"
        groups = len(by_slice) if len(by_slice) > 1 else len(by_host)
        plain = ",".join(f"{n}={o * i}" for n, o, i in zip(names, outer, inner, strict=True))
        raise MeshError(
            f"mesh {mesh} has outer sizes for {wanted} slices or hosts, but its "
            f"{len(devices)} devices form {form}.\n"
            f"  Make the outer sizes multiply to {groups}, or leave them out ({plain})."
        )
    groups = [fitting[0][index] for index in sorted(fitting[0])]
    sizes = sorted({len(group) for group in groups})
    if len(sizes) > 1:
        raise MeshError(
            f"mesh {mesh} needs {math.prod(inner)} devices of each slice or host, but they hold "
            f"{' or '.join(map(str, sizes))}.\n  Pass the same number of devices of each."
        )
    return groups


def _place_group(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Places the devices of one slice or host along its links."""
    try:
        return mesh_utils.create_device_mesh(tuple(shape), devices, allow_split_physical_axes=True)
    # `create_device_mesh` raises TypeError for shapes it cannot split (16x20x28), and
    # AssertionError for devices that do not form a cuboid.
    except (NotImplementedError, ValueError, AssertionError, TypeError):
        ordered = sorted(devices, key=lambda d: (*getattr(d, "coords", ()), d.id))
        if (torus := _torus(ordered)) is not None:
            return _split(torus, shape)
        _LOG.warning(
            "the %d %s devices do not form a cuboid: the mesh %s takes them in order of their "
            "coordinates, so mesh neighbours may be several hops apart",
            len(devices), devices[0].device_kind, "x".join(map(str, shape)),
        )  # fmt: skip
        return _object_array(ordered).reshape(tuple(shape))


def _torus(ordered: Sequence[Any]) -> np.ndarray | None:
    """Returns devices in order of their coordinates as an array of the torus, with a last dim for
    the devices of a chip; None if they do not form one."""
    places: list[Any] = [getattr(device, "coords", None) for device in ordered]
    if None in places:
        return None
    sizes = [len(set(values)) for values in zip(*places, strict=True)]
    each, rest = divmod(len(ordered), math.prod(sizes))
    if rest or len(set(map(tuple, places))) != math.prod(sizes):
        return None
    return _object_array(ordered).reshape(*sizes, each)


def _split(torus: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the devices of a torus in a shape of as many, whose last dim has the nearest
    neighbours: each dim takes the largest factors that one axis of the torus still has."""
    left = list(torus.shape)
    # Of each axis of the torus: the dims that share it and their sizes, the innermost first.
    parts: list[list[tuple[int, int]]] = [[] for _ in left]
    for dim in reversed(range(len(shape))):
        needed = shape[dim]
        while needed > 1:
            common = [math.gcd(size, needed) for size in left]
            axis = common.index(max(common))
            parts[axis].append((dim, common[axis]))
            left[axis] //= common[axis]
            needed //= common[axis]
    dims = [part for axis in parts for part in reversed(axis)]
    order = sorted(range(len(dims)), key=lambda index: dims[index][0])
    return torus.reshape([size for _, size in dims]).transpose(order).reshape(tuple(shape))


def draw(mesh: Mesh) -> str:
    """Returns a drawing of the position of each device.

    Up to 64 devices on up to 3 axes are drawn one by one. A larger mesh has a line for each axis
    with the number of slices and hosts it spans. Axes of size 1 are left out.
    """
    axes = [name for name, size in mesh.shape.items() if size > 1]
    grid = mesh.devices.reshape([mesh.shape[name] for name in axes])
    title = f"{','.join(f'{n}={s}' for n, s in mesh.shape.items())} over {_inventory(grid)}"
    small = grid.size <= _GRID_DEVICES and len(axes) <= _GRID_AXES
    if not small or max(grid.shape[-1:], default=1) > _GRID_COLUMNS:
        return "\n".join([title, *_axis_lines(grid, axes)])
    labels, legend = _labels(grid)
    lines = _grid_lines(labels, axes)
    return "\n".join([title, *lines, *([legend] if legend else [])])


def _inventory(grid: np.ndarray) -> str:
    devices = list(grid.flat)
    kinds = " and ".join(sorted({device.device_kind for device in devices}))
    slices = len({slice_of(device) for device in devices})
    hosts = len({device.process_index for device in devices})
    noun = "process" if devices[0].platform == "cpu" else "host"
    text = f"{len(devices)} {kinds} {'device' if len(devices) == 1 else 'devices'}"
    text += f" in {slices} slices" if slices > 1 else ""
    return text + (f" on {hosts} {noun}{'es' if noun == 'process' else 's'}" if hosts > 1 else "")


def _axis_lines(grid: np.ndarray, axes: Sequence[str]) -> list[str]:
    """Returns a line for each axis: its size, and the most slices and hosts along it."""
    width = max(map(len, axes))
    lines = []
    for dim, name in enumerate(axes):
        walks = np.moveaxis(grid, dim, -1).reshape(-1, grid.shape[dim])
        slices = max(len({slice_of(device) for device in walk}) for walk in walks)
        hosts = max(len({device.process_index for device in walk}) for walk in walks)
        reach = "within a host" if hosts == 1 else f"across {hosts} hosts"
        reach = f"across {slices} slices" if slices > 1 else reach
        lines.append(f"  {name:<{width}}  {grid.shape[dim]:>5}  {reach}")
    return lines


def _labels(grid: np.ndarray) -> tuple[np.ndarray, str]:
    """Returns the texts of the cells, and their meaning if they hold more than device ids."""
    devices = list(grid.flat)
    parts = [("slice", slice_of), ("process", lambda device: device.process_index)]
    parts = [part for part in parts if len({part[1](device) for device in devices}) > 1]
    parts.append(("device", lambda device: device.id))
    labels = _object_array([":".join(str(read(d)) for _, read in parts) for d in devices])
    legend = f"  cells: {':'.join(name for name, _ in parts)}" if len(parts) > 1 else ""
    return labels.reshape(grid.shape), legend


def _grid_lines(labels: np.ndarray, axes: Sequence[str]) -> list[str]:
    if labels.ndim == 0:
        return [f"  device {labels.item()}"]
    if labels.ndim == 1:
        return [f"  {axes[0]}  {'  '.join(labels)}"]
    if labels.ndim == 3:
        lines = []
        for index, block in enumerate(labels):
            lines.append(f"  {axes[0]}={index}")
            lines += [f"  {line}" for line in _grid_lines(block, axes[1:])]
        return lines
    corner = f"{axes[0]}\\{axes[1]}"
    width = max(len(str(labels.shape[1] - 1)), *(len(label) for label in labels.flat))
    header = "  ".join(f"{column:>{width}}" for column in range(labels.shape[1]))
    lines = [f"  {corner}  {header}"]
    for row, cells in enumerate(labels):
        lines.append(f"  {row:>{len(corner)}}  {'  '.join(f'{cell:>{width}}' for cell in cells)}")
    return lines
