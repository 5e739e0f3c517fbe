"""The active mesh and rules, and the placement of activations by logical name."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardlib.errors import MeshError, RuleError
from shardlib.mesh import entry_axes, mesh_sizes
from shardlib.rules import AxisRules
from shardlib.rules.resolve import Kind


@dataclasses.dataclass(frozen=True)
class Scope:
    """A mesh and the rules that place tensors on it."""

    mesh: Mesh
    rules: AxisRules

    @property
    def mesh_here(self) -> Mesh | AbstractMesh:
        """The mesh as seen by the code being traced: inside a `manual` region, some of its axes are
        manual."""
        here = jax.sharding.get_abstract_mesh()
        is_same = not here.empty and here.axis_names == self.mesh.axis_names
        return here if is_same and here.manual_axes else self.mesh

    @property
    def sizes(self) -> dict[str, int]:
        """The number of devices along each mesh axis, in mesh order; 1 for an axis manual here."""
        manual = manual_axes()
        return {name: 1 if name in manual else n for name, n in mesh_sizes(self.mesh).items()}

    def sharding(
        self, logical_axes: tuple[str | None, ...], shape: tuple[int, ...], kind: Any = "params"
    ) -> NamedSharding:
        """Returns the sharding of one tensor; raises `RuleError` if it cannot be placed.

        Mesh axes that are manual here shard nothing: the tensor is the part in one of their shards.
        """
        met = _met.get()
        if met is not None and kind == "activations":
            met.update(name for name in logical_axes if name is not None)
        spec = self.rules.spec(logical_axes, shape, self.sizes, kind)
        return NamedSharding(self.mesh_here, spec)  # type: ignore[arg-type]

    def parts(self, logical_axis: str, size: int) -> int:
        """Returns the number of parts into which the rules cut a dim of an activation here."""
        entry = self.sharding((logical_axis,), (size,), "activations").spec[0]
        return math.prod(self.sizes[name] for name in entry_axes(entry))


_active: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("shardlib", default=None)
_plain: contextvars.ContextVar[bool] = contextvars.ContextVar("plain", default=False)
_met: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("met", default=None)


@dataclasses.dataclass
class Priced:
    """A trace of a program for a cost model."""

    asked_platform: bool = False
    """Whether it depends on a platform that its mesh does not name."""


_priced: contextvars.ContextVar[Priced | None] = contextvars.ContextVar("priced", default=None)


def manual_axes() -> tuple[str, ...]:
    """Returns the mesh axes that are manual in the region being traced."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def active() -> Scope | None:
    """Returns the mesh and rules of the innermost `use`, or `None` outside of it."""
    return _active.get()


def platform() -> str:
    """Returns the platform of the active mesh's devices, as in `"tpu"`, which an abstract mesh may
    name. Without an active or named platform, returns JAX's default."""
    scope = active()
    if scope is not None and isinstance(scope.mesh, AbstractMesh):
        device, priced = scope.mesh.abstract_device, _priced.get()
        if priced is not None and device is None:
            priced.asked_platform = True
        return device.platform if device is not None else jax.default_backend()
    if scope is None:
        return jax.default_backend()
    return scope.mesh.devices.flat[0].platform


def active_or(mesh: Mesh | None, rules: AxisRules | None) -> Scope:
    """Returns the given mesh and rules, each defaulting to the active one.

    Raises:
        MeshError: If the mesh is not a mesh.
        RuleError: If one of them is neither given nor active, the rules do not fit the mesh, or
            the rules are not an `AxisRules`.
    """
    scope = active()
    mesh = mesh or (scope.mesh if scope else None)
    rules = rules or (scope.rules if scope else None)
    if mesh is None or rules is None:
        missing = " and ".join(n for n, v in (("mesh", mesh), ("rules", rules)) if v is None)
        raise RuleError(
            f"no active {missing}, which shardlib needs to place tensors.\n"
            "  Call this inside `with sl.use(mesh, rules):`, or pass mesh= and rules=."
        )
    _check_kinds(mesh, rules)
    rules.check(mesh)
    return Scope(mesh, rules)


def _check_kinds(mesh: Mesh | AbstractMesh, rules: Any) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        given = repr(mesh) if isinstance(mesh, str | dict) else f"of type {type(mesh).__name__}"
        raise MeshError(
            f"the mesh is {given}, not a jax.sharding.Mesh.\n"
            "  Make one, as in sl.make_mesh('data=2,fsdp=-1'), and give it before the rules."
        )
    check_rules(rules)


def check_rules(rules: Any) -> None:
    """Raises `RuleError` for rules that are not `AxisRules`, such as the name of a preset."""
    if not isinstance(rules, AxisRules):
        raise RuleError(
            f"the rules are {rules!r}, not an AxisRules.\n"
            "  Give a preset, such as sl.rules.STANDARD, or sl.rules.preset(name)."
        )


@contextlib.contextmanager
def use(mesh: Mesh, rules: AxisRules) -> Iterator[Scope]:
    """Activates a mesh and rules for `constrain` and all code that places tensors.

    JAX keeps a function as it was first traced: in your own `jax.jit`, enter `use` inside the
    function. The steps of shardlib do.

    Raises:
        MeshError: If `mesh` is the text of a mesh rather than a mesh.
        RuleError: If a rule names a mesh axis that does not exist, or `rules` is not an
            `AxisRules`.
    """
    _check_kinds(mesh, rules)
    rules.check(mesh)
    token = _active.set(Scope(mesh, rules))
    try:
        yield _active.get()  # type: ignore[misc]
    finally:
        _active.reset(token)


@contextlib.contextmanager
def plainly(name: str = "plain") -> Iterator[None]:
    """Deactivates the mesh and rules, and lets layers with several implementations take the plain
    one: what is traced here says what a model computes, and neither where nor by which kernel.

    A mesh of JAX's own, which nothing uses, keeps its caches apart: functions traced here are
    traced anew elsewhere, and under another `name` of its axis.
    """
    scope = active()
    size = scope.mesh.size if scope else 1
    token, plain = _active.set(None), _plain.set(True)
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((size,), (name,))):
            yield
    finally:
        _active.reset(token)
        _plain.reset(plain)


@contextlib.contextmanager
def pricing() -> Iterator[Priced]:
    """Traces for a cost model."""
    token = _priced.set(Priced())
    try:
        yield _priced.get()  # type: ignore[misc]
    finally:
        _priced.reset(token)


def is_priced() -> bool:
    """Returns whether the code is traced under `pricing`."""
    return _priced.get() is not None


def is_plain() -> bool:
    """Returns whether the code is traced by `plainly`."""
    return _plain.get()


@contextlib.contextmanager
def recording() -> Iterator[set[str]]:
    """Yields a set that collects the logical axes of the activations placed in this context."""
    met: set[str] = set()
    token = _met.set(met)
    try:
        yield met
    finally:
        _met.reset(token)


def constrain(x: jax.Array, *logical_axes: str | None, kind: Kind = "activations") -> jax.Array:
    """Places an activation by the logical name of each of its dims.

    Outside of `use` it returns `x` unchanged, so that a model runs anywhere.

    Args:
        x: Any array inside of `jax.jit`.
        logical_axes: One name for each dim of `x`; `None` replicates.
        kind: The table of rules; `params` places `x` as a parameter.

    Raises:
        RuleError: If the names do not fit the rank, a name has no rule, or a dim cannot be divided.
    """
    scope = active()
    if scope is None:
        return x
    sharding = scope.sharding(logical_axes, x.shape, kind)
    if len(manual_axes()) == len(scope.sizes):
        return x  # No axis is left to the compiler; JAX refuses such a constraint under vmap.
    if AxisType.Explicit in scope.mesh_here.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)
