"""A step and its arguments on another mesh of the same axes: that of a cluster that is not there.

A state of shardlib names its mesh, and its step looks there: it is traced on the new mesh. Any
other function is traced where it is. Either may hold meshes of its own, in `in_shardings`, in
constraints, in `shard_map`: in what it was traced to each device is replaced by the one at the same
place of the new mesh.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.constrain import Scope
from shardlib.errors import MeshError
from shardlib.explain.call import Call, abstract_leaf
from shardlib.hardware import slice_of
from shardlib.mesh import describe, mesh_sizes
from shardlib.placement import arrange

AnyMesh = Mesh | AbstractMesh


def is_state(node: Any) -> bool:
    """Whether a node of a pytree names the mesh that it lies on, as training states do."""
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return False
    named = any(field.name == "definition" for field in dataclasses.fields(node))
    return named and isinstance(getattr(node.definition, "scope", None), Scope)  # type: ignore[attr-defined]


def mesh_of(arguments: Any) -> AnyMesh | None:
    """Returns the mesh that arguments, or shardings, lie on; None where no leaf has one. Of several
    over the same devices it is the first.

    Raises:
        MeshError: If there are several of different devices.
    """
    meshes = list(dict.fromkeys(_meshes(arguments)))
    if not meshes:
        return None
    # Devices say more than names.
    first = next((mesh for mesh in meshes if isinstance(mesh, Mesh)), meshes[0])
    others = [mesh for mesh in meshes if not _are_one(first, mesh)]
    if others:
        names = " and ".join(describe(mesh) for mesh in (first, *others))
        why = "" if isinstance(first, AbstractMesh) else ", which differ in devices or their order"
        raise MeshError(
            f"the arguments of the step lie on several meshes: {names}{why}.\n"
            "  Place all of them on one, with jax.device_put or in their ShapeDtypeStructs."
        )
    return first


def _meshes(tree: Any) -> Iterator[AnyMesh]:
    for node in jax.tree.leaves(tree, is_leaf=is_state):
        sharding = getattr(node, "sharding", node)
        if is_state(node):
            yield node.definition.scope.mesh
        elif isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            yield sharding.mesh


def _are_one(first: AnyMesh, other: AnyMesh) -> bool:
    """Whether a program can use both: JAX wants the same devices in the same order, by whatever
    names of axes; where there are no devices, names and sizes are all there is."""
    if isinstance(first, Mesh) and isinstance(other, Mesh):
        return list(first.devices.flat) == list(other.devices.flat)
    return mesh_sizes(first) == mesh_sizes(other)


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

    def is_left(self, call: Call) -> bool:
        """Whether a call names devices of the old mesh."""
        self.value((call.jaxpr, *call.shardings))
        meshes = (pair for pair in self._done.values() if isinstance(pair[1], Mesh))
        return any(new is not old for new, old in meshes)

    def function(self, call: Call) -> tuple[Any, tuple[Any, ...]]:
        """Returns a jitted function that computes on the new mesh what was called on the old one,
        and the arguments to lower it for: those that hold arrays. It returns a flat list."""
        compute = jaxpr_as_fun(self.value(call.jaxpr))

        def moved(*values: Any) -> list[Any]:
            leaves = jax.tree.leaves(values)
            return compute(*(leaves[at] if isinstance(at, int) else at[0] for at in call.inputs))

        moved.__name__ = call.params.get("name", "step")
        moved.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name.replace("/", "_"), inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for name in call.names
            ]
        )
        options: dict[str, Any] = {}
        if call.params:
            results = [self.sharding(sharding) for sharding in call.params["out_shardings"]]
            options = {"out_shardings": results, "donate_argnums": _donated_whole(call)}
        jitted = jax.jit(moved, compiler_options=call.compiler_options or None, **options)
        return jitted, call.placed(self.arguments, self.sharding)


def _donated_whole(call: Call) -> tuple[int, ...]:
    """Returns which of the arguments are donated: those of which a leaf is."""
    owners = [number for number, value in enumerate(call.given) for _ in jax.tree.leaves(value)]
    taken = zip(owners, call.donated, strict=True)
    return tuple(sorted({owner for owner, donated in taken if donated}))
