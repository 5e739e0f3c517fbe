"""A step and its arguments on another mesh of the same axes: that of a cluster that is not there.

A state of shardlib names its mesh, and its step looks there. Any other function may hold meshes
anywhere: in `in_shardings`, in constraints, in `shard_map`. It is traced where it is, and in what
it was traced to each device is replaced by the one at the same place of the new mesh.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardlib.constrain import Scope
from shardlib.errors import MeshError
from shardlib.mesh import describe, mesh_sizes
from shardlib.placement import arrange, slice_of

AnyMesh = Mesh | AbstractMesh


def is_state(node: Any) -> bool:
    """Whether a node of a pytree names the mesh that it lies on, as training states do."""
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return False
    named = any(field.name == "definition" for field in dataclasses.fields(node))
    return named and isinstance(getattr(node.definition, "scope", None), Scope)  # type: ignore[attr-defined]


def mesh_of(arguments: Any) -> AnyMesh | None:
    """Returns the mesh that arguments lie on; None where no leaf has one.

    Raises:
        MeshError: If there are several.
    """
    found: dict[tuple[Any, ...], AnyMesh] = {}
    for mesh in _meshes(arguments):
        found.setdefault(tuple(mesh_sizes(mesh).items()), mesh)
    if len(found) > 1:
        names = " and ".join(describe(mesh) for mesh in found.values())
        raise MeshError(
            f"the arguments of the step lie on several meshes: {names}.\n"
            "  Place all of them on one, with jax.device_put or in their ShapeDtypeStructs."
        )
    return next(iter(found.values()), None)


def _meshes(arguments: Any) -> Iterator[AnyMesh]:
    for node in jax.tree.leaves(arguments, is_leaf=is_state):
        if is_state(node):
            yield node.definition.scope.mesh
        elif isinstance(sharding := getattr(node, "sharding", None), NamedSharding):
            yield sharding.mesh


def mesh_over(mesh: AnyMesh, devices: list[Any], name: str) -> Mesh:
    """Returns a mesh of the same axes over other devices, placed as `make_mesh` would.

    Raises:
        MeshError: If there are more or fewer devices.
    """
    sizes = mesh_sizes(mesh)
    if mesh.size != len(devices):
        raise MeshError(
            f"the step runs on a mesh of {mesh.size} devices ({describe(mesh)}), and {name} has "
            f"{len(devices)}.\n  Place its arguments on a mesh of {len(devices)}, which may be an "
            "AbstractMesh, or name a cluster of as many."
        )
    ones = (1,) * len(sizes)
    grid = arrange(devices, names=tuple(sizes), outer=ones, inner=tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=mesh.axis_types)


def lies_on(mesh: AnyMesh, devices: list[Any]) -> bool:
    """Whether a mesh consists of such devices already, in any order."""
    if isinstance(mesh, AbstractMesh):
        return False

    def facts(device: Any) -> tuple[Any, ...]:
        return device.platform, device.device_kind, slice_of(device), device.id

    return sorted(map(facts, mesh.devices.flat)) == sorted(map(facts, devices))


@dataclasses.dataclass(frozen=True)
class Move:
    """From one mesh to another of the same axes."""

    old: AnyMesh
    new: Mesh
    _done: dict[int, Any] = dataclasses.field(default_factory=dict)
    """What has been moved by the id of the original, and the original, which keeps its id."""

    def arguments(self, tree: Any) -> Any:
        """Returns arguments on the new mesh: arrays as `ShapeDtypeStruct`s, states with the mesh
        that they name, and what is no array as it is."""
        return jax.tree.map(self._node, tree, is_leaf=is_state)

    def _node(self, node: Any) -> Any:
        if not is_state(node):
            return abstract_leaf(node, self.sharding)
        definition = self._once(node.definition, self._definition)
        moved = dataclasses.replace(node, definition=definition)
        return jax.tree.map(lambda leaf: abstract_leaf(leaf, self.sharding), moved)

    def _definition(self, definition: Any) -> Any:
        scope = dataclasses.replace(definition.scope, mesh=self.new)
        return dataclasses.replace(definition, scope=scope)

    def sharding(self, sharding: Any) -> Any:
        """Returns a sharding on the new mesh; None for one that is of no mesh."""
        if not isinstance(sharding, NamedSharding):
            return None
        # Of the hosts' memory there is one name everywhere; that of the devices' own differs.
        kind = sharding.memory_kind if sharding.memory_kind == "pinned_host" else None
        return NamedSharding(self.mesh(sharding.mesh, here=True), sharding.spec, memory_kind=kind)  # type: ignore[arg-type]

    def mesh(self, mesh: AnyMesh, *, here: bool = False) -> AnyMesh:
        """Returns a mesh with each device replaced; an abstract one as it is, or if `here` the
        new mesh."""
        if isinstance(mesh, AbstractMesh):
            return self.new if here else self._named(mesh)
        if isinstance(self.old, AbstractMesh):
            return mesh
        return self._once(mesh, self._replaced)

    def _replaced(self, mesh: Mesh) -> Mesh:
        assert isinstance(self.old, Mesh)
        pairs = zip(self.old.devices.flat, self.new.devices.flat, strict=True)
        at = {id(old): new for old, new in pairs}
        if not all(id(device) in at for device in mesh.devices.flat):
            return mesh
        devices = np.empty(mesh.devices.shape, dtype=object)
        for index, device in np.ndenumerate(mesh.devices):
            devices[index] = at[id(device)]
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)

    def _once(self, original: Any, move: Callable[[Any], Any]) -> Any:
        if id(original) not in self._done:
            self._done[id(original)] = (move(original), original)
        return self._done[id(original)][0]

    def value(self, value: Any) -> Any:
        """Returns a parameter of an equation, with what it holds of meshes replaced."""
        if isinstance(value, NamedSharding):
            mesh = self.mesh(value.mesh)
            if mesh is value.mesh:
                return value
            return NamedSharding(mesh, value.spec, memory_kind=value.memory_kind)  # type: ignore[arg-type]
        if isinstance(value, AnyMesh) and not value.empty:
            return self.mesh(value)
        # In later JAX the two are one class.
        if isinstance(value, Jaxpr):
            return self._once(value, self._jaxpr)
        if isinstance(value, ClosedJaxpr):
            return self._once(value, lambda v: v.replace(jaxpr=self.value(v.jaxpr)))
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return type(value)(self.value(part) for part in value)
        return value

    def _jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=[self._equation(equation) for equation in jaxpr.eqns])

    def _equation(self, equation: Any) -> Any:
        params = {name: self.value(value) for name, value in equation.params.items()}
        context = equation.ctx
        if context.cur_abstract_mesh.empty:
            return equation.replace(params=params)
        # The mesh of the context names the kind of its devices. A context is made of what holds
        # where it is made.
        named = self._named(context.cur_abstract_mesh)
        with context.manager, jax.sharding.use_abstract_mesh(named):
            return equation.replace(params=params, ctx=type(context)())

    def _named(self, mesh: AbstractMesh) -> AbstractMesh:
        """Returns an abstract mesh that names the new kind of devices."""
        return mesh.update(abstract_device=self.new.abstract_mesh.abstract_device)

    def function(self, step: Any, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Returns a jitted function that computes on the new mesh what `step` does on the old one,
        and the arguments to lower it for: those that hold arrays. It returns a flat list."""
        seen = _Call.of(step, arguments)
        compute = jaxpr_as_fun(self.value(seen.jaxpr))

        def moved(*values: Any) -> list[Any]:
            leaves = jax.tree.leaves(values)
            return compute(*(leaves[at] if isinstance(at, int) else at[0] for at in seen.inputs))

        moved.__name__ = seen.params.get("name", getattr(step, "__name__", "step"))
        moved.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name.replace("/", "_"), inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for name in seen.names
            ]
        )
        options: dict[str, Any] = {}
        if seen.params:
            results = [self.sharding(sharding) for sharding in seen.params["out_shardings"]]
            options = {"out_shardings": results, "donate_argnums": seen.donated()}
        return jax.jit(moved, **options), seen.placed(self)


def placed_arguments(step: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments that hold arrays, each array where a jitted function takes it."""
    seen = _Call.of(step, arguments)
    return seen.placed(None)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a function is traced to.

    Attributes:
        given: The arguments that hold arrays, as `ShapeDtypeStruct`s.
        names: Their names.
        jaxpr: What is computed.
        inputs: For each input of it, the number of a leaf of `given`, or a constant in a tuple.
        params: Of the call of the jitted function; empty where there is something else too.
    """

    given: tuple[Any, ...]
    names: tuple[str, ...]
    jaxpr: ClosedJaxpr
    inputs: list[Any]
    params: dict[str, Any]

    @classmethod
    def of(cls, step: Any, arguments: tuple[Any, ...]) -> "_Call":
        arrays = [index for index, value in enumerate(arguments) if _holds_arrays(value)]

        def called(*given: Any) -> Any:
            whole = list(arguments)
            for index, value in zip(arrays, given, strict=True):
                whole[index] = value
            return step(*whole)

        given = tuple(jax.tree.map(abstract_leaf, arguments[index]) for index in arrays)
        names = parameter_names(step, arguments)
        traced = jax.make_jaxpr(called)(*given)
        call = _only_call(traced)
        jaxpr = traced if call is None else call.params["jaxpr"]
        params = {} if call is None else dict(call.params)
        return cls(given, names, jaxpr, _inputs(traced, call), params)

    def placed(self, move: Move | None) -> tuple[Any, ...]:
        """Returns the arguments with their shardings, on another mesh if there is one."""
        leaves, tree = jax.tree.flatten(move.arguments(self.given) if move else self.given)
        for at, sharding in zip(self.inputs, self.params.get("in_shardings", ()), strict=False):
            if not isinstance(at, int) or not isinstance(sharding, Sharding):
                continue
            if getattr(leaves[at], "sharding", None) is None:
                place = move.sharding(sharding) if move else sharding
                leaves[at] = abstract_leaf(leaves[at], lambda _, s=place: s)
        return jax.tree.unflatten(tree, leaves)

    def donated(self) -> tuple[int, ...]:
        """Returns which of the arguments are donated."""
        owners = [n for n, value in enumerate(self.given) for _ in jax.tree.leaves(value)]
        flags = zip(self.inputs, self.params["donated_invars"], strict=True)
        found = {owners[at] for at, donated in flags if donated and isinstance(at, int)}
        return tuple(sorted(found))


def abstract_leaf(leaf: Any, place: Callable[[Any], Any] = lambda sharding: sharding) -> Any:
    """Returns an array as a `ShapeDtypeStruct`, with what `place` makes of its sharding; what is no
    array as it is."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    placed = place(sharding if isinstance(sharding, NamedSharding) else None)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed, weak_type=weak)


def _holds_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)


def _only_call(traced: ClosedJaxpr) -> Any:
    """Returns the equation that calls the jitted function, where there is nothing else. It may
    return more than `step` did: what `nnx.jit` writes back into modules."""
    equations = traced.jaxpr.eqns
    is_call = len(equations) == 1 and "in_shardings" in equations[0].params
    return equations[0] if is_call else None


def _inputs(traced: ClosedJaxpr, call: Any) -> list[Any]:
    """Returns, for each input of the program, the number of a leaf of the arguments, or a constant
    in a tuple."""
    jaxpr = traced.jaxpr
    if call is None:
        # A ClosedJaxpr holds its constants itself.
        return list(range(len(jaxpr.invars)))
    places: dict[int, Any] = {id(var): at for at, var in enumerate(jaxpr.invars)}
    constants = zip(jaxpr.constvars, traced.consts, strict=True)
    places |= {id(var): (np.asarray(value),) for var, value in constants}
    return [(x.val,) if isinstance(x, Literal) else places[id(x)] for x in call.invars]


def parameter_names(function: Any, arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names of the arguments that hold arrays, as JAX gives them to the program."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = [p.name for p in parameters if p.kind not in variadic]
    rest = next((p.name for p in parameters if p.kind is variadic[0]), "argument")
    return tuple(
        known[n] if n < len(known) else f"{rest}/{n - len(known)}"
        for n, value in enumerate(arguments)
        if _holds_arrays(value)
    )
