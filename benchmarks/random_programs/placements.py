"""Where the parameters of a random program lie, and over what its batch is cut."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from random_programs.draws import Random
from shardlib.rules import STANDARD, Auto, AxisRules

MESHES = (
    "data=2,fsdp=2,tensor=2",
    "data=8",
    "fsdp=8",
    "fsdp=4,tensor=2",
    "fsdp=2,tensor=4",
    "data=2,context=2,tensor=2",
    "data=2,fsdp=2,expert=2",
    "fsdp=2,context=2,tensor=2",
    "data=2,context=4",
    "data=2,fsdp=4",
)
WITH_CONTEXT = tuple(mesh for mesh in MESHES if "context" in mesh)
"""Meshes over which sequences are cut along their length, and images along their height."""
STYLES = ("fsdp_tensor", "joined", "random", "auto", "replicated")

Dims = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim of a parameter."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The rules of a program, and the logical axes of its batch and of its parameters.

    `own_names` holds logical axes that the model itself carries, by path; otherwise the rules have
    them as `paths`.
    """

    style: str
    rules: AxisRules
    own_names: Mapping[str, tuple[str | None, ...]]
    batch_axes: Mapping[str, tuple[str | None, ...]]


def draw_placement(
    style: str,
    own_names: bool,
    mesh: Mapping[str, int],
    params: Mapping[str, tuple[int, ...]],
    inputs: tuple[Any, ...],
    random: Random,
) -> Placement:
    """Returns a placement of a style on a mesh; `params` holds shapes by path."""
    dims = {path: _dims(style, shape, mesh, random) for path, shape in params.items()}
    if style == "fsdp_tensor":
        order = random.pick("embed,mlp", "mlp,embed", "either")
        dims = {path: _fsdp_tensor(shape, mesh, order, random) for path, shape in params.items()}
    rules = AxisRules(
        params={_name(axes): "+".join(axes) or None for d in dims.values() for axes in d},
        activations=dict(STANDARD.activations) | _activations(mesh, random),
        auto=Auto("fsdp" if "fsdp" in mesh else "data", min_elements=256)
        if style == "auto"
        else Auto(None),
    )
    names = {path: tuple(map(_name, d)) for path, d in dims.items()} if style != "auto" else {}
    batch_axes = _batch_axes(inputs, mesh, random)
    if own_names:
        return Placement(style, rules, names, batch_axes)
    return Placement(style, rules.override(paths=names), {}, batch_axes)


def _name(axes: tuple[str, ...]) -> str:
    return "_".join(("over", *axes)) if axes else "whole"


def _activations(mesh: Mapping[str, int], random: Random) -> dict[str, Any]:
    batch = [axis for axis in ("data", "fsdp", "expert") if axis in mesh]
    if random.chance(0.15):
        batch = batch[::-1]
    if not batch:
        batch = ["context"]
    return {"batch": "+".join(batch), "length": "context", "height": "context"}


def _batch_axes(inputs: tuple[Any, ...], mesh: Mapping[str, int], random: Random) -> dict[str, Any]:
    """Cuts the length of sequences and the height of images over `context`, mostly."""
    rank = inputs[0].ndim
    if "context" not in mesh or rank == 1 or len(inputs) > 1 or random.chance(0.25):
        return {}
    if rank == 4:
        return {"x0": ("batch", "height", None, None)}
    # Vectors have features in their second dim, which are not cut.
    is_sequence = rank == 3 or inputs[0].dtype == "int32"
    return {"x0": ("batch", "length", None)[:rank]} if is_sequence else {}


def _dims(style: str, shape: tuple[int, ...], mesh: Mapping[str, int], random: Random) -> Dims:
    dims: list[tuple[str, ...]] = [()] * len(shape)
    if style == "joined" and shape:
        axes = tuple(a for a in ("fsdp", "tensor", "data") if a in mesh)[:2]
        fitting = [i for i, n in enumerate(shape) if n % math.prod(mesh[a] for a in axes) == 0]
        if len(shape) > 1 and fitting:
            dims[random.pick(*fitting)] = axes
    elif style == "random":
        for axis in random.generator.permutation(list(mesh)).tolist():
            if shape and random.chance(0.6):
                dim = int(random.generator.integers(len(shape)))
                if shape[dim] % (mesh[axis] * math.prod(mesh[a] for a in dims[dim])) == 0:
                    dims[dim] = (*dims[dim], axis)
    return tuple(dims)


def _fsdp_tensor(
    shape: tuple[int, ...], mesh: Mapping[str, int], order: str, random: Random
) -> Dims:
    """Two dims of a kernel over one axis each, as FSDP with tensor parallelism places them."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    first = next(a for a in ("fsdp", "data", "context") if a in mesh)
    second = next((a for a in ("tensor", "expert", "fsdp") if a in mesh and a != first), None)

    def divides(i: int, j: int) -> bool:
        return shape[i] % mesh[first] == 0 and shape[j] % mesh.get(second or "", 1) == 0

    pairs = [pair for pair in itertools.combinations(range(len(shape)), 2) if divides(*pair)]
    if not pairs:
        return tuple(dims)
    i, j = pairs[-1] if random.chance(0.8) else random.pick(*pairs)
    swapped = order == "mlp,embed" or (order == "either" and random.chance(0.5))
    if swapped and divides(j, i):
        i, j = j, i
    dims[i] = (first,)
    if second:
        dims[j] = (second,)
    return tuple(dims)
