"""Retargeting of a step and its arguments to another mesh of the same axes.

The new mesh may belong to a cluster that is not attached. A state of shardlib names its mesh, and
its step uses that mesh, so it is traced on the new one. Any other function is traced on its own
mesh. Both may hold other meshes in `in_shardings`, constraints and `shard_map`: in the jaxpr, each
device is replaced by the device at the same position of the new mesh.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from shardlib.errors import MeshError
from shardlib.explain.aot.call import Call, abstract_leaf
from shardlib.hardware import slice_of
from shardlib.mesh import describe, mesh_sizes
from shardlib.mesh.device_order import arrange
from shardlib.sharding.constrain import Scope

AnyMesh = Mesh | AbstractMesh
T = TypeVar("T")


def is_state(node: PyTree) -> bool:
    """Whether a node of a pytree names its own mesh, as training states do."""
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return False
    named = any(field.name == "definition" for field in dataclasses.fields(node))
    return named and isinstance(getattr(node.definition, "scope", None), Scope)  # type: ignore[attr-defined]


def mesh_of(arguments: PyTree) -> AnyMesh | None:
    """Returns the mesh of arguments or shardings, or None if no leaf has one.

    The first mesh is returned if there are several over the same devices.

    Raises:
        MeshError: If there are several meshes over different devices.
    """
    meshes = list(dict.fromkeys(_meshes(arguments)))
    if not meshes:
        return None
    # A mesh with devices is more specific than an abstract one.
    first = next((mesh for mesh in meshes if isinstance(mesh, Mesh)), meshes[0])
    others = [mesh for mesh in meshes if not _are_one(first, mesh)]
    if others:
        names = " and ".join(describe(mesh) for mesh in (first, *others))
        why = "" if isinstance(first, AbstractMesh) else ", which differ in devices or their order"
        raise MeshError(
            f"the arguments of the step are on several meshes: {names}{why}.\n"
            "  Place all of them on one, with jax.device_put or in their ShapeDtypeStructs."
        )
    return first


def _meshes(tree: PyTree) -> Iterator[AnyMesh]:
    for node in jax.tree.leaves(tree, is_leaf=is_state):
        sharding = getattr(node, "sharding", node)
        if is_state(node):
            yield node.definition.scope.mesh
        elif isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            yield sharding.mesh


def _are_one(first: AnyMesh, other: AnyMesh) -> bool:
    """Whether a program can use both meshes.

    JAX requires the same devices in the same order; axis names may differ. Abstract meshes have no
    devices, so their axis names and sizes are compared.
    """
    if isinstance(first, Mesh) and isinstance(other, Mesh):
        return list(first.devices.flat) == list(other.devices.flat)
    return mesh_sizes(first) == mesh_sizes(other)


def mesh_over(mesh: AnyMesh, devices: list[Any], name: str) -> Mesh:
    """Returns a mesh of the same axes over other devices, in the order of `make_mesh`.

    Raises:
        MeshError: If there are more or fewer devices.
    """
    sizes = mesh_sizes(mesh)
    if mesh.size != len(devices):
        raise MeshError(
            f"the step runs on a mesh of {mesh.size} devices ({describe(mesh)}), but {name} has "
            f"{len(devices)}.\n  Place its arguments on a mesh or AbstractMesh of {len(devices)}, "
            "or name a cluster of the same size."
        )
    ones = (1,) * len(sizes)
    grid = arrange(devices, names=tuple(sizes), outer=ones, inner=tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=mesh.axis_types)


def lies_on(mesh: AnyMesh, devices: list[Any]) -> bool:
    """Whether a mesh already consists of equal devices, in any order."""
    if isinstance(mesh, AbstractMesh):
        return False

    def facts(device: Any) -> tuple[Any, ...]:
        return device.platform, device.device_kind, slice_of(device), device.id

    return sorted(map(facts, mesh.devices.flat)) == sorted(map(facts, devices))


@dataclasses.dataclass(frozen=True)
class Move:
    """A move from one mesh to another of the same axes."""

    old: AnyMesh
    new: Mesh
    _done: dict[int, Any] = dataclasses.field(default_factory=dict)
    """Moved objects by the id of the original. The original is kept so that its id stays unique."""

    def arguments(self, tree: PyTree) -> PyTree:
        """Returns arguments on the new mesh.

        Arrays become `ShapeDtypeStruct`s, states name the new mesh, and other values are unchanged.
        """
        return jax.tree.map(self._node, tree, is_leaf=is_state)

    def _node(self, node: PyTree) -> PyTree:
        if not is_state(node):
            return abstract_leaf(node, self.sharding)
        definition = self._once(node.definition, self._definition)
        moved = dataclasses.replace(node, definition=definition)
        return jax.tree.map(lambda leaf: abstract_leaf(leaf, self.sharding), moved)

    def _definition(self, definition: Any) -> Any:
        scope = dataclasses.replace(definition.scope, mesh=self.new)
        return dataclasses.replace(definition, scope=scope)

    def sharding(self, sharding: object) -> NamedSharding | None:
        """Returns a sharding on the new mesh, or None if it has no mesh."""
        if not isinstance(sharding, NamedSharding):
            return None
        # Host memory has the same name on every platform; the name of device memory differs.
        kind = sharding.memory_kind if sharding.memory_kind == "pinned_host" else None
        return NamedSharding(self.mesh(sharding.mesh, here=True), sharding.spec, memory_kind=kind)  # type: ignore[arg-type]

    def mesh(self, mesh: AnyMesh, *, here: bool = False) -> AnyMesh:
        """Returns a mesh with each device replaced.

        An abstract mesh keeps its axes and names the new kind of devices; with `here` it becomes
        the new mesh.
        """
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

    def _once(self, original: T, move: Callable[[T], T]) -> T:
        if id(original) not in self._done:
            self._done[id(original)] = (move(original), original)
        return self._done[id(original)][0]

    def value(self, value: Any) -> Any:
        """Returns a parameter of an equation with all its meshes replaced."""
        if isinstance(value, NamedSharding):
            mesh = self.mesh(value.mesh)
            if mesh is value.mesh:
                return value
            return NamedSharding(mesh, value.spec, memory_kind=value.memory_kind)  # type: ignore[arg-type]
        if isinstance(value, AnyMesh) and not value.empty:
            return self.mesh(value)
        # In later versions of JAX the two are one class.
        if isinstance(value, Jaxpr):
            return self._once(value, self._jaxpr)
        if isinstance(value, ClosedJaxpr):
            return self._once(value, lambda v: v.replace(jaxpr=self.value(v.jaxpr)))
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return type(value)(self.value(part) for part in value)
        return value

    def _jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=[self._equation(equation) for equation in jaxpr.eqns])

    def _equation(self, equation: JaxprEqn) -> JaxprEqn:
        params = {name: self.value(value) for name, value in equation.params.items()}
        context = equation.ctx
        if context.cur_abstract_mesh.empty:
            return equation.replace(params=params)
        # The mesh of the context names the kind of its devices. A new context takes the settings
        # that are active where it is created.
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
        """Returns a jitted function that computes the call on the new mesh, and its arguments.

        Only arguments that hold arrays are returned. The function returns a flat list.
        """
        compute = jaxpr_as_fun(self.value(call.jaxpr))

        def moved(*values: PyTree) -> list[Any]:
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
    """Returns the positions of the arguments that have a donated leaf."""
    owners = [number for number, value in enumerate(call.given) for _ in jax.tree.leaves(value)]
    taken = zip(owners, call.donated, strict=True)
    return tuple(sorted({owner for owner, donated in taken if donated}))
