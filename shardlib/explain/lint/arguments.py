"""The arrays that a step takes, with their category, sharding and parameter number."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardlib.explain.hlo.parameters import parameter_paths
from shardlib.explain.hlo.text import Instruction, Module
from shardlib.explain.lint.shardings import Spec, dims, spec_of_shapes, spec_of_text
from shardlib.mesh import entry_axes
from shardlib.paths import path_string

_STATE = ("params", "optimizer", "model_state")


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array that a step takes.

    Attributes:
        path: Path that starts with the name of its argument: `params/head/kernel`.
        owner: Name of its argument.
        shape: Shape of the whole array.
        dtype: Dtype of the array.
        spec: Mesh axes of each dim. None if the sharding cannot be expressed by axes.
        category: Purpose of the array, as in `CompiledStep.argument_names`.
        is_state: Whether it belongs to the state that a step keeps, and not to a batch.
        donated: Whether its buffer is donated. None if unknown.
        number: Index among the program's parameters. None if the program does not read it.
    """

    path: str
    owner: str
    shape: tuple[int, ...]
    dtype: Any
    spec: Spec | None
    category: str
    is_state: bool
    donated: bool | None
    number: int | None

    def shards(self, sizes: Mapping[str, int]) -> int:
        """Returns the number of shards of the array."""
        return math.prod(sizes.get(name, 1) for axes in self.spec or () for name in axes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * getattr(self.dtype, "itemsize", 4)


class _Leaf(NamedTuple):
    path: str
    owner: str
    category: str
    array: Any
    donated: bool | None


def read_arguments(
    arguments: tuple[Any, ...],
    names: Mapping[str, str],
    donated: tuple[bool, ...] | None,
    module: Module,
    mesh: Mapping[str, int],
) -> tuple[Argument, ...]:
    """Returns the arrays of the arguments of a step.

    Args:
        arguments: Pytrees. Leaves that are not arrays are skipped.
        names: Category of each array by path, as in `CompiledStep.argument_names`.
        donated: Whether each leaf of `arguments` is donated, in order.
        module: The program.
        mesh: Sizes of the mesh axes.
    """
    leaves = list(_leaves(arguments, names, donated))
    parameters = _parameters(module, [leaf.path for leaf in leaves])
    states = _states(leaves)
    found = []
    for leaf, is_state in zip(leaves, states, strict=True):
        parameter, shape = parameters.get(leaf.path), tuple(leaf.array.shape)
        spec = _spec(leaf.array)
        if spec is None and parameter is not None:
            text = parameter.attributes.get("sharding", "")
            spec = spec_of_text(text, len(shape), mesh)
            spec = spec or spec_of_shapes(shape, dims(parameter.shape), mesh)
        number = None if parameter is None else int(parameter.operands)
        dtype = leaf.array.dtype
        found.append(
            Argument(
                leaf.path, leaf.owner, shape, dtype, spec, leaf.category, is_state, leaf.donated,
                number,
            )
        )  # fmt: skip
    return tuple(found)


def _leaves(
    arguments: tuple[Any, ...], names: Mapping[str, str], donated: tuple[bool, ...] | None
) -> Iterator[_Leaf]:
    named = iter(names.items())
    flags = iter(donated or ())
    for argument in arguments:
        for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
            flag = next(flags, None)
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                continue
            whole, category = next(named)
            owner = whole.removesuffix(f"/{path_string(path)}")
            yield _Leaf(whole, owner, category, leaf, flag)


def _parameters(module: Module, paths: list[str]) -> dict[str, Instruction]:
    """Returns the program's parameters by the paths of their arrays."""
    entry = module.computations.get(module.entry, ())
    by_number = {i.operands.strip(): i for i in entry if i.opcode == "parameter"}
    return {path: by_number[str(n)] for n, path in parameter_paths(module, paths).items()}


def _states(leaves: Sequence[_Leaf]) -> Iterator[bool]:
    """Yields whether each array belongs to the state.

    An array without a known category follows the other arrays of its argument. Otherwise it is
    state if some array is a batch by name, or if its argument comes first and no array is state by
    name.
    """
    kinds: dict[str, set[str]] = {}
    for leaf in leaves:
        kind = "state" if leaf.category in _STATE else leaf.category
        kinds.setdefault(leaf.owner, set()).add(kind)
    first = next((owner for owner, found in kinds.items() if "batch" not in found), None)
    if any("state" in found for found in kinds.values()):
        first = None
    has_batch = any("batch" in found for found in kinds.values())
    for leaf in leaves:
        siblings = kinds[leaf.owner]
        if leaf.category in _STATE or leaf.category == "batch":
            yield leaf.category != "batch"
        elif siblings & {"state", "batch"}:
            yield "state" in siblings
        else:
            yield leaf.owner == first or has_batch


def _spec(leaf: Any) -> Spec | None:
    """Returns the mesh axes of each dim of an array."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    if spec is None:
        return None
    entries = [entry_axes(entry) for entry in spec]
    return (*entries, *[()] * (len(leaf.shape) - len(entries)))
