"""Meshes by name: `"data=4x8,fsdp=-1,tensor=2"` -> a JAX mesh with a good device order."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib.errors import MeshError
from shardlib.mesh.device_order import arrange, count_groups
from shardlib.mesh.device_order import draw as draw

STANDARD_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""The axes known to presets, from the slowest interconnect to the fastest."""

AxisTypes: TypeAlias = Literal["auto", "explicit"]
MeshSpec: TypeAlias = "str | Mapping[str, int | str] | MeshConfig"
"""A mesh as text (`"data=2,fsdp=-1"`), as a mapping of axes to degrees, or as a config."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEGREE = re.compile(r"(-?\d+)(?:\s*[xX]\s*(-?\d+))?")


@dataclasses.dataclass(frozen=True)
class MeshAxis:
    """One mesh axis: `outer` groups (slices or hosts) times `inner` devices within a group."""

    name: str
    inner: int
    """Devices along the axis within one slice or host; -1 for all remaining ones."""
    outer: int = 1
    """Slices or hosts along the axis; -1 for all remaining ones."""

    @property
    def size(self) -> int:
        """The number of devices along the axis; -1 while a degree is unresolved."""
        return -1 if -1 in (self.inner, self.outer) else self.outer * self.inner

    def __str__(self) -> str:
        degree = f"{self.inner}" if self.outer == 1 else f"{self.outer}x{self.inner}"
        return f"{self.name}={degree}"


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Mesh axes and their degrees, in mesh order; `str()` gives text that parses to the same mesh.

    If every axis is a standard one, the axes are in the order of `STANDARD_AXES` however they were
    written. If one axis is the user's own, the written order holds.

    Raises:
        MeshError: For bad names, bad degrees, repeated axes, or more than one -1; lists all.
    """

    axes: tuple[MeshAxis, ...]

    def __post_init__(self) -> None:
        _raise_faults(",".join(map(str, self.axes)), _axis_faults(self.axes))
        if all(axis.name in STANDARD_AXES for axis in self.axes):
            ordered = sorted(self.axes, key=lambda axis: STANDARD_AXES.index(axis.name))
            object.__setattr__(self, "axes", tuple(ordered))

    @classmethod
    def parse(cls, spec: MeshSpec) -> "MeshConfig":
        """Reads a mesh from `"data=4x8,fsdp=-1"`, `{"data": "4x8", "fsdp": -1}`, or a `MeshConfig`.

        Raises:
            MeshError: For malformed text; lists every fault.
        """
        if isinstance(spec, MeshConfig):
            return spec
        if isinstance(spec, str):
            text, (pairs, faults) = spec.strip(), _split(spec)
        elif isinstance(spec, Mapping):
            text = ",".join(f"{name}={degree}" for name, degree in spec.items())
            pairs, faults = [(str(name), degree) for name, degree in spec.items()], []
        else:
            raise MeshError(
                f"a mesh is text, a mapping or a MeshConfig, not {type(spec).__name__}.\n"
                '  Write it as "data=2,fsdp=-1" or as {"data": 2, "fsdp": -1}.'
            )
        axes = []
        for name, degree in pairs:
            parsed = _parse_degree(degree)
            if parsed is None:
                comma = "; write a comma between axes" if "=" in str(degree) else ""
                faults.append(f"{name}={degree}: {_DEGREE_HINT}{comma}")
            else:
                axes.append(MeshAxis(name, inner=parsed[1], outer=parsed[0]))
        # An axis with a bad degree is not in `axes`, so its fault is never reported twice.
        empty_is_known = bool(faults) and not axes
        _raise_faults(text, faults + ([] if empty_is_known else _axis_faults(axes)))
        return cls(tuple(axes))

    def __str__(self) -> str:
        return ",".join(map(str, self.axes))

    @property
    def names(self) -> tuple[str, ...]:
        """The axis names in mesh order."""
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """The devices along each axis, in mesh order; -1 for an unresolved one."""
        return {axis.name: axis.size for axis in self.axes}

    def resolve(self, num_devices: int, *, at_hand: bool = False) -> "MeshConfig":
        """Returns the mesh with its -1 filled in, so that it covers `num_devices` exactly.

        Args:
            num_devices: The number of devices.
            at_hand: Whether they come from `jax.devices()`, of which fewer can be passed.

        Raises:
            MeshError: If no degree fits, or if a mesh without -1 has another product.
        """
        given = math.prod(d for a in self.axes for d in (a.outer, a.inner) if d != -1)
        if all(axis.size != -1 for axis in self.axes):
            if given != num_devices:
                raise MeshError(_product_fault(self, given, num_devices, at_hand=at_hand))
            return self
        if num_devices % given:
            raise MeshError(
                f"mesh {self} cannot fill {_devices(num_devices)}: its other sizes multiply to "
                f"{given}, which does not divide {num_devices}.\n"
                f"  {_fewer_devices(num_devices - num_devices % given, num_devices, at_hand)}"
            )
        rest = num_devices // given
        return MeshConfig(
            tuple(
                dataclasses.replace(
                    axis,
                    inner=rest if axis.inner == -1 else axis.inner,
                    outer=rest if axis.outer == -1 else axis.outer,
                )
                for axis in self.axes
            )
        )


def make_mesh(
    spec: MeshSpec, *, devices: Sequence[Any] | None = None, axis_types: AxisTypes = "auto"
) -> Mesh:
    """Builds a mesh whose axes follow the physical topology of the devices.

    Within a slice the order comes from `jax.experimental.mesh_utils`. The outer degree of an axis
    (the 4 of `data=4x8`) crosses slices, or hosts if the devices form one slice. If the devices
    form several slices and no outer degree is written, the leading axes cross them. CPU devices
    have neither slices nor hosts: the outer degree is the major order, processes outermost.

    Args:
        spec: `"data=2,fsdp=-1,tensor=2"`, the same as a mapping, a `MeshConfig`, or `"auto"`.
        devices: CPU, GPU, TPU or ahead-of-time topology devices; `jax.devices()` by default.
        axis_types: `"auto"` (the compiler propagates shardings) or `"explicit"` (types carry them).

    Raises:
        MeshError: If the mesh is malformed, does not multiply out to the number of devices, or
            its outer degrees do not fit their slices and hosts.
    """
    all_devices = list(jax.devices() if devices is None else devices)
    if not all_devices:
        raise MeshError("a mesh needs at least one device.\n  Leave devices out to use them all.")
    config = _resolved(spec, len(all_devices), count_groups(all_devices), at_hand=devices is None)
    grid = arrange(
        all_devices,
        names=config.names,
        outer=tuple(axis.outer for axis in config.axes),
        inner=tuple(axis.inner for axis in config.axes),
    )
    return Mesh(grid, config.names, axis_types=_axis_types(axis_types, len(config.axes)))


def abstract_mesh(
    spec: MeshSpec, num_devices: int, *, axis_types: AxisTypes = "auto"
) -> AbstractMesh:
    """Returns the mesh without devices: names, sizes and axis types.

    Raises:
        MeshError: As in `make_mesh`, for the spec and the product.
    """
    sizes = _resolved(spec, num_devices, num_groups=1).sizes
    types = _axis_types(axis_types, len(sizes))
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def auto_mesh(num_devices: int, *, num_groups: int = 1) -> MeshConfig:
    """Returns the mesh of `mesh: auto`: `fsdp` within a slice, `data` across slices.

    Fully sharded data parallelism needs only divisible dims of the model, and uses the least memory
    per device. Its all-gathers need the fast links within a slice. Across slices, or across GPU
    hosts, only gradients travel, once a step, which the slow network can carry. Choose another mesh
    if the model does not fit one slice, or if the batch per device gets small.

    Args:
        num_devices: Total number of devices.
        num_groups: Number of slices, or of GPU hosts.

    Raises:
        MeshError: If the groups do not divide the devices.
    """
    if num_groups < 1 or num_devices < 1 or num_devices % num_groups:
        raise MeshError(
            f"mesh auto cannot spread {_devices(num_devices)} evenly over {num_groups} slices or "
            "hosts.\n  Pass the same number of devices of each."
        )
    fsdp = MeshAxis("fsdp", inner=num_devices // num_groups)
    if num_groups == 1:
        return MeshConfig((fsdp,))
    return MeshConfig((MeshAxis("data", inner=1, outer=num_groups), fsdp))


def mesh_sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Returns the number of devices along each axis, in mesh order."""
    return dict(mesh.shape)


def entry_axes(entry: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a `PartitionSpec`: a name, several, or `None`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def spec_axes(spec: Iterable[Any], rank: int) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes of each dim of an array with a `PartitionSpec`, by the array's rank."""
    entries = tuple(entry_axes(entry) for entry in spec)
    return entries + ((),) * (rank - len(entries))


def describe(mesh: Mesh | AbstractMesh) -> str:
    """Returns a mesh as text, such as `data=2,fsdp=4`."""
    return ",".join(f"{name}={size}" for name, size in mesh_sizes(mesh).items())


def _resolved(
    spec: MeshSpec, num_devices: int, num_groups: int, *, at_hand: bool = False
) -> MeshConfig:
    if isinstance(spec, str) and spec.strip() == "auto":
        return auto_mesh(num_devices, num_groups=num_groups)
    return MeshConfig.parse(spec).resolve(num_devices, at_hand=at_hand)


def _axis_types(axis_types: AxisTypes, count: int) -> tuple[AxisType, ...]:
    known = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    if axis_types not in known:
        raise MeshError(f"axis_types is {axis_types!r}.\n  Write 'auto' or 'explicit'.")
    return (known[axis_types],) * count


_DEGREE_HINT = "a size is a whole number above 0, -1, or outer x inner as in 4x8"


def _parse_degree(degree: Any) -> tuple[int, int] | None:
    """Returns (outer, inner), or None if the degree cannot be read."""
    if isinstance(degree, bool) or not isinstance(degree, int | str):
        return None
    match = _DEGREE.fullmatch(str(degree).strip())
    if match is None:
        return None
    first, second = match.groups()
    return (1, int(first)) if second is None else (int(first), int(second))


def _split(text: str) -> tuple[list[tuple[str, Any]], list[str]]:
    """Splits `a=1,b=2` into pairs, and returns the faults of the other items."""
    pairs, faults = [], []
    items = text.split(",")
    if items[-1].strip() == "":
        items.pop()
    for item in items:
        name, equals, degree = (part.strip() for part in item.partition("="))
        if equals:
            pairs.append((name, degree))
            continue
        guess = re.fullmatch(rf"\s*({_NAME.pattern})\s*[:x*\s]?\s*(-?\d\S*)\s*", item)
        hint = f" Did you mean '{guess[1]}={guess[2]}'?" if guess else " Write it as in fsdp=8."
        faults.append(f"{item.strip()!r} has no '='.{hint}")
    return pairs, faults


def _axis_faults(axes: Sequence[MeshAxis]) -> list[str]:
    faults = []
    if not axes:
        faults.append("it has no axes: write at least one, as in data=-1")
    for axis in axes:
        if not _NAME.fullmatch(axis.name):
            faults.append(f"{axis.name!r} is not an axis name: use letters, digits and underscores")
        if any(degree == 0 or degree < -1 for degree in (axis.outer, axis.inner)):
            faults.append(f"{axis}: {_DEGREE_HINT}")
    for name, count in Counter(axis.name for axis in axes).items():
        if count > 1:
            faults.append(f"axis {name!r} is written {count} times: write it once")
    unknown = [degree for axis in axes for degree in (axis.outer, axis.inner)].count(-1)
    if unknown > 1:
        faults.append(f"{unknown} sizes are -1: only one axis can take the devices that remain")
    return faults


def _raise_faults(text: str, faults: list[str]) -> None:
    if faults:
        raise MeshError("\n  ".join([f"mesh {text!r} cannot be read:", *faults]))


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def _use_fewer(count: int, at_hand: bool) -> str:
    return f"pass devices=jax.devices()[:{count}]" if at_hand else f"run on {_devices(count)}"


def _fewer_devices(count: int, available: int, at_hand: bool) -> str:
    divide = f"choose sizes that divide {available}."
    return (
        f"{_use_fewer(count, at_hand)}, or {divide}".capitalize() if count else divide.capitalize()
    )


def _product_fault(config: MeshConfig, needed: int, available: int, *, at_hand: bool) -> str:
    """Returns the number of devices a mesh needs as a fault, with a degree to leave open."""
    verb = "is" if available == 1 else "are"
    fault = f"mesh {config} needs {_devices(needed)} but {available} {verb} available.\n  "
    fewer = _use_fewer(needed, at_hand) if needed < available else ""
    for position, axis in enumerate(config.axes):
        axes = list(config.axes)
        axes[position] = MeshAxis(axis.name, inner=-1)
        others = math.prod(other.size for other in config.axes if other is not axis)
        if available % others == 0:
            opened = MeshConfig(tuple(axes))
            shape = "x".join(map(str, opened.resolve(available).sizes.values()))
            either = f" or {fewer}" if fewer else ""
            return f"{fault}Set one axis to -1 ({opened} gives {shape}){either}."
    return fault + (
        f"{fewer.capitalize()}."
        if fewer and at_hand
        else f"Choose sizes whose product is {available}, or run on {_devices(needed)}."
    )
