"""The subject of the checks: a compiled step with its mesh, cluster, arguments and jaxpr."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from shardlib.explain.analysis.collectives import Collective, ProgramReport, read_program
from shardlib.explain.analysis.equations import equations
from shardlib.explain.analysis.params import ParamsReport
from shardlib.explain.analysis.roofline import vocabularies_of
from shardlib.explain.aot.compile import CompiledStep, argument_names
from shardlib.explain.hlo.origins import HloValue, Values
from shardlib.explain.hlo.parameters import parameter_paths
from shardlib.explain.hlo.provenance import (
    Where,
    is_library,
    makes_reports,
    outermost_source,
    where_of,
)
from shardlib.explain.hlo.replica_groups import as_groups, groups_of_axes, tile_devices
from shardlib.explain.hlo.text import Instruction, Module, array_bytes, dims, parse
from shardlib.explain.lint.findings import Limits
from shardlib.hardware import Cluster
from shardlib.mesh import STANDARD_AXES, spec_axes
from shardlib.paths import path_string

DEFAULTS = Limits()
BATCH_AXES = ("data", "fsdp", "expert")
"""Preset mesh axes that split the rows of a batch."""
DIFFERENTIATED = "jvp("
"""Part of the JAX names of a loss and its gradient, but not of an optimizer's update."""
_STATE = ("params", "optimizer", "model_state")

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim of an array."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array that a step takes. Its path starts with the name of its argument, its `owner`.

    `spec` is None if the sharding cannot be expressed by mesh axes, `donated` if it is unknown, and
    `number`, the index among the program's parameters, if the program does not read it. `category`
    is as in `CompiledStep.argument_names`. A state is what a step keeps; other arrays are a batch.
    """

    path: str
    owner: str
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: Spec | None
    category: str
    is_state: bool
    donated: bool | None
    number: int | None
    shards: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * getattr(self.dtype, "itemsize", 4)

    @property
    def bytes_per_device(self) -> float:
        """Bytes of one shard."""
        return self.num_bytes / self.shards


@dataclasses.dataclass(frozen=True)
class PlacedCollective:
    """A collective with its computation and instruction."""

    collective: Collective
    computation: str
    instruction: Instruction

    @property
    def bytes(self) -> int:
        """The bytes of its buffer in one execution."""
        return self.collective.bytes

    @property
    def gather_dim(self) -> int:
        """The dim along which an all-gather concatenates."""
        return int(self.instruction.attributes.get("dimensions", "{0}").strip("{}") or 0)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A compiled step; see `CompiledStep`. Checks skip the attributes that are left out.

    `names` is its `argument_names`. `module` is the program parsed from `text`, and `program` the
    report on its collectives.
    """

    text: str
    mesh: Mapping[str, int]
    cluster: Cluster | None = None
    arguments: tuple[PyTree, ...] = ()
    names: Mapping[str, str] | None = None
    donated: tuple[bool, ...] | None = None
    warnings: str = ""
    jaxpr: ClosedJaxpr | None = None
    state: ParamsReport | None = None
    limits: Limits = DEFAULTS
    module: Module = None  # type: ignore[assignment]
    program: ProgramReport = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.module is None:
            object.__setattr__(self, "module", parse(self.text))
        if self.program is None:
            object.__setattr__(self, "program", read_program(self.module, self.mesh))

    @classmethod
    def of(
        cls,
        step: CompiledStep,
        state: ParamsReport | None = None,
        limits: Limits = DEFAULTS,
        *,
        module: Module | None = None,
        program: ProgramReport | None = None,
    ) -> "Subject":
        """Returns the subject for a step compiled ahead of time, whose text may be parsed already
        and its collectives read."""
        module = module or parse(step.text)
        return cls(
            step.text,
            step.mesh_sizes,
            step.cluster,
            step.arguments,
            step.argument_names,
            step.donated or None,
            step.warnings or "",
            step.jaxpr,
            state,
            limits,
            module,
            program or read_program(module, step.mesh),
        )

    @functools.cached_property
    def values(self) -> Values:
        """The program's values, for tracing them back."""
        return Values(self.module)

    @functools.cached_property
    def platform(self) -> str:
        """The platform of the cluster, else of the HLO dialect: `cpu`, `gpu` or `tpu`."""
        if self.cluster is not None:
            return self.cluster.platform
        if re.search(r"\]\{[\d,]*:T\(", self.text):
            return "tpu"
        return "gpu" if '"is_sync"' in self.text or "__cublas" in self.text else "cpu"

    @functools.cached_property
    def leaves(self) -> tuple[Argument, ...]:
        """The arrays that the step takes; leaves that are not arrays are left out."""
        names = self.names
        if names is None:
            names = argument_names(
                self.arguments, tuple(f"argument/{n}" for n in range(len(self.arguments)))
            )
        return _read_arguments(self.arguments, names, self.donated, self.module, self.mesh)

    @functools.cached_property
    def step_source(self) -> str:
        """The `file:line` of the traced function, else of its first line that computes.

        The string is empty if the function belongs to a library.
        """
        info = getattr(getattr(self.jaxpr, "jaxpr", None), "debug_info", None)
        match = re.search(r" at (.+:\d+)$", getattr(info, "func_src_info", None) or "")
        source = match[1] if match else ""
        if not makes_reports(source):
            return "" if is_library(source) else source
        # A step moved to another mesh is wrapped in another function.
        placed = equations(self.jaxpr) if self.jaxpr else ()
        return next(filter(None, (outermost_source(p.equation) for p in placed)), "")

    @functools.cached_property
    def by_number(self) -> dict[int, Argument]:
        """The arrays by their index among the program's parameters."""
        return {leaf.number: leaf for leaf in self.leaves if leaf.number is not None}

    @functools.cached_property
    def batch(self) -> tuple[Argument, ...]:
        """The arrays outside the state, whose rows are split over devices."""
        return tuple(leaf for leaf in self.leaves if not leaf.is_state and leaf.shape)

    @functools.cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the rows of the batch.

        The preset batch axes are the fallback if its sharding is unknown or nothing splits it.
        """
        axes = {name for leaf in self.batch if leaf.spec for name in leaf.spec[0]} or BATCH_AXES
        return tuple(name for name in self.mesh if name in axes and self.mesh[name] > 1)

    @functools.cached_property
    def own_axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device whose names are not in the presets."""
        return tuple(n for n, size in self.mesh.items() if size > 1 and n not in STANDARD_AXES)

    @functools.cached_property
    def collectives(self) -> tuple[PlacedCollective, ...]:
        """The collectives with their computations and instructions."""
        return tuple(
            PlacedCollective(collective, *self.module.located[collective.name])
            for collective in self.program.collectives
        )

    def operands(self, placed: PlacedCollective) -> list[HloValue]:
        """Returns the operands of a collective."""
        return self.values.operands(placed.computation, placed.instruction)

    def arguments_of(self, value: HloValue) -> list[Argument] | None:
        """Returns the arguments that a value consists of, moved but not computed, or None."""
        origins = self.values.origins(value)
        if any(origin.argument is None and origin.opcode != "constant" for origin in origins):
            return None
        numbers = [o.argument for o in origins if o.argument is not None]
        leaves = [self.by_number.get(number) for number in numbers]
        return [leaf for leaf in leaves if leaf is not None] if all(leaves) else None

    def where(self, placed: PlacedCollective) -> Where:
        """Returns the source place of a collective, else of an operand or of a user."""
        instructions = [placed.instruction]
        for value in self.operands(placed):
            if operand := self.module.instruction(value.computation, value.name):
                instructions.append(operand)
        users = self.module.users(placed.computation, placed.instruction.name)
        for user, _ in users:
            instructions.append(user)
            instructions += [one for one, _ in self.module.users(placed.computation, user.name)]
        # An argument has only a path and no source, so its users are more precise.
        places = [where_of(self.module, instruction) for instruction in instructions]
        return next((where for where in places if where.source), places[0])

    def in_loss(self, name: str) -> bool:
        """Whether an operation is part of a loss or its gradient. True if the program has
        neither."""
        return DIFFERENTIATED in name or DIFFERENTIATED not in self.text

    def is_parameter(self, placed: PlacedCollective) -> bool:
        """Whether a collective reads only leaves of the state, moved or converted."""
        owners = map(self.arguments_of, self.operands(placed))
        return all(leaves and all(leaf.is_state for leaf in leaves) for leaves in owners)

    @functools.cached_property
    def rows(self) -> set[int]:
        """The possible sizes of a dim of gathered rows: rows or tokens of a microbatch."""
        sizes: set[int] = set()
        for leaf in self.batch:
            for size in (leaf.shape[0], math.prod(leaf.shape[:2])):
                sizes |= {size // parts for parts in range(1, size + 1) if size % parts == 0}
        return sizes - {1}

    @functools.cached_property
    def vocabularies(self) -> set[int]:
        """The sizes of dims with the logical axis `vocab`, else of tables used in lookups."""
        sizes = set(vocabularies_of(self.state)) if self.state is not None else set[int]()
        if sizes or self.jaxpr is None:
            return sizes
        for placed in equations(self.jaxpr):
            if placed.equation.primitive.name == "gather":
                table, taken = placed.equation.invars[0].aval, placed.equation.params["slice_sizes"]
                is_table = table.ndim == 2 and jnp.issubdtype(table.dtype, jnp.floating)
                if is_table and tuple(taken) == (1, table.shape[1]):
                    sizes.add(table.shape[0])
        return sizes

    def is_leaf_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether a leaf of the state, or one of its layers, has this shape. The leaf may be whole
        or sharded over some of its axes."""
        return _without_ones(shape) in self._leaf_shapes

    def is_leaf_in_shards(self, shape: tuple[int, ...]) -> bool:
        """Whether a leaf has this shape where its shards lie along a dim of their own, in any order
        of dims, as in an all-reduce that gathers them."""
        devices = math.prod(self.mesh.values())
        whole = {tuple(sorted(known)) for known in self._leaf_shapes}
        merged = (
            (*shape[:dim], one * other, *shape[dim + 2 :])
            for dim, (one, other) in enumerate(itertools.pairwise(shape))
            if not devices % other or not devices % one
        )
        return any(tuple(sorted(_without_ones(each))) in whole for each in merged)

    @functools.cached_property
    def _leaf_shapes(self) -> set[tuple[int, ...]]:
        shapes = set()
        for leaf in self.leaves:
            spec = leaf.spec or ((),) * len(leaf.shape)
            sizes = [
                [
                    size // math.prod(self.mesh.get(n, 1) for n in axes[:end])
                    for end in range(len(axes) + 1)
                ]
                for size, axes in zip(leaf.shape, spec, strict=True)
            ]
            for start in (0, 1) if leaf.is_state else ():
                shapes |= {_without_ones(shape) for shape in itertools.product(*sizes[start:])}
        return shapes


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


class _Leaf(NamedTuple):
    path: str
    owner: str
    category: str
    array: jax.ShapeDtypeStruct
    donated: bool | None


def _read_arguments(
    arguments: tuple[PyTree, ...],
    names: Mapping[str, str],
    donated: tuple[bool, ...] | None,
    module: Module,
    mesh: Mapping[str, int],
) -> tuple[Argument, ...]:
    """Returns the arrays of the arguments of a step, as `Subject.leaves`."""
    leaves = list(_leaves(arguments, names, donated))
    entry = module.computations.get(module.entry, ())
    by_number = {i.operands.strip(): i for i in entry if i.opcode == "parameter"}
    paths = parameter_paths(module, [leaf.path for leaf in leaves])
    parameters = {path: by_number[str(n)] for n, path in paths.items()}
    read = []
    for leaf, is_state in zip(leaves, _states(leaves), strict=True):
        parameter, shape = parameters.get(leaf.path), tuple(leaf.array.shape)
        own = getattr(getattr(leaf.array, "sharding", None), "spec", None)
        spec = None if own is None else spec_axes(own, len(shape))
        if spec is None and parameter is not None:
            text = parameter.attributes.get("sharding", "")
            spec = spec_of_text(text, len(shape), mesh)
            spec = spec or spec_of_shapes(shape, dims(parameter.shape), mesh)
        number = None if parameter is None else int(parameter.operands)
        shards = math.prod(mesh.get(name, 1) for axes in spec or () for name in axes)
        sharded = shape, leaf.array.dtype, spec
        facts = leaf.category, is_state, leaf.donated, number, shards
        read.append(Argument(leaf.path, leaf.owner, *sharded, *facts))
    return tuple(read)


def _leaves(
    arguments: tuple[PyTree, ...], names: Mapping[str, str], donated: tuple[bool, ...] | None
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
    first = next((owner for owner, own in kinds.items() if "batch" not in own), None)
    if any("state" in own for own in kinds.values()):
        first = None
    has_batch = any("batch" in own for own in kinds.values())
    for leaf in leaves:
        siblings = kinds[leaf.owner]
        if leaf.category in _STATE or leaf.category == "batch":
            yield leaf.category != "batch"
        elif siblings & {"state", "batch"}:
            yield "state" in siblings
        else:
            yield leaf.owner == first or has_batch


def spec_of_text(text: str, rank: int, mesh: Mapping[str, int]) -> Spec | None:
    """Returns the mesh axes that shard each of `rank` dims by a sharding such as
    `{devices=[4,1,2]<=[8] last_tile_dim_replicate}`, or None if the text does not determine
    them."""
    if text in ("{replicated}", "{maximal device=0}"):
        return ((),) * rank
    ids = tile_devices(text)
    if ids is None or ids.ndim < rank:
        return None
    axes = groups_of_axes(mesh)
    spec = []
    for dim in range(rank):
        rows = np.moveaxis(ids, dim, -1).reshape(-1, ids.shape[dim])
        named = axes.get(as_groups(rows.tolist())) if ids.shape[dim] > 1 else ()
        if named is None:
            return None
        spec.append(named)
    return tuple(spec)


def spec_of_shapes(
    whole: tuple[int, ...], here: tuple[int, ...], mesh: Mapping[str, int]
) -> Spec | None:
    """Returns the mesh axes that shard each dim, from its global and its local size, or None if
    ambiguous."""
    if len(whole) != len(here):
        return None
    free = [name for name, size in mesh.items() if size > 1]
    spec = []
    for size, part in zip(whole, here, strict=True):
        ways = [
            names
            for count in range(len(free) + 1)
            for names in itertools.combinations(free, count)
            if part * math.prod(mesh[name] for name in names) == size
        ]
        if len(ways) != 1:
            return None
        spec.append(ways[0])
        free = [name for name in free if name not in ways[0]]
    return tuple(spec)


def largest(shapes: tuple[str, ...]) -> str:
    """Returns the largest of the arrays, such as `bf16[8,512]`, and the number of others."""
    first = max(shapes, key=array_bytes, default="")
    return first if len(shapes) < 2 else f"{first} and {len(shapes) - 1} more"


def times_a_step(count: int) -> str:
    """Returns how often an operation runs in a step, for a message; empty for once."""
    return f", {count} times a step" if count > 1 else ""


def array_text(array: Argument | ShapedArray) -> str:
    """Returns the dtype and shape of an array, such as `float32[4,8]`."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
