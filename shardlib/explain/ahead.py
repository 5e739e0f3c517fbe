"""A step compiled ahead of time, for devices at hand or for a cluster that is not there."""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.errors import ConfigError, MeshError
from shardlib.explain import cache
from shardlib.explain.captured import captured_errors
from shardlib.explain.hlo import Module, parse
from shardlib.explain.moving import (
    AnyMesh,
    Move,
    abstract_leaf,
    is_state,
    lies_on,
    mesh_of,
    mesh_over,
    parameter_names,
    placed_arguments,
)
from shardlib.explain.oversized import compile_larger, needed_bytes
from shardlib.explain.topology import devices_of as devices_of
from shardlib.hardware import Cluster
from shardlib.mesh import mesh_sizes
from shardlib.paths import named_leaves

_OPTIONS: dict[str, dict[str, Any]] = {
    "tpu": {
        # Without the loops of overlapped matmuls, which send the same bytes in many small hops.
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": 100000,
        # What does not fit is compiled all the same, so that its peak is known.
        "xla_tpu_no_crash_on_oom": True,
    }
}
# What JAX calls `O0` takes a fifth of the time, has the same collectives, and a peak that differs
# by 1-7%; 0 is its default, whatever JAX_OPTIMIZATION_LEVEL says.
_FAST, _DEFAULT = 9, 0
_CATEGORIES = {
    "params": ("params", "parameters", "weights", "model", "kernel", "bias", "scale", "embedding"),
    "optimizer": ("opt_state", "optimizer", "opt", "momentum", "mu", "nu"),
    "model_state": ("model_state", "batch_stats", "buffers"),
    "batch": ("batch", "tokens", "targets", "inputs", "labels", "images", "x", "y"),
}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step compiled for a mesh, and what is known of it without running it.

    Attributes:
        text: The scheduled program, as `Compiled.as_text()` gives it.
        memory: What `Compiled.memory_analysis()` says in bytes, by name without
            `_size_in_bytes`: `argument`, `output`, `alias`, `temp`, `generated_code`, `peak`.
        lowered_hash: Of the StableHLO it was compiled from, with its sources.
        mesh_sizes: Devices along each axis, in mesh order.
        mesh: The mesh, with the devices that it was compiled for.
        cluster: What it was compiled for; None for the devices at hand.
        arguments: Pytrees of `ShapeDtypeStruct`s with shardings on that mesh.
        argument_names: What each array is for, by path, as in `state/params/head/kernel`: one of
            `params`, `optimizer`, `model_state`, `batch`, `other`.
        donated: Of each array of the arguments, in order, whether the step takes its memory.
        warnings: What the compiler wrote to the standard error, such as of involuntary full
            rematerialization.
        compiled_for: The cluster that the text is for. Of a step far too large for its chip that is
            one of as many devices with more memory; only `memory["peak"]` is of the chip itself.
        jaxpr: What the step was traced to, a `ClosedJaxpr`; None for what keeps it to itself, as
            `nnx.jit` does.
        compiled: The `jax.stages.Compiled`; None when the text is from the cache.
    """

    text: str
    memory: Mapping[str, int]
    lowered_hash: str
    mesh_sizes: Mapping[str, int]
    mesh: AnyMesh
    cluster: Cluster | None
    arguments: tuple[Any, ...]
    argument_names: Mapping[str, str]
    donated: tuple[bool, ...] = ()
    warnings: str = ""
    compiled_for: str = ""
    jaxpr: Any = None
    compiled: Any = None

    def argument_categories(self, module: Module | None = None) -> dict[int, str]:
        """Returns what each argument of the program is for, by its number; those that the step
        does not read are no arguments of the program."""
        module = module or parse(self.text)
        entry = module.computations.get(module.entry, ())
        parameters = [i for i in entry if i.opcode == "parameter"]
        in_order = list(self.argument_names.values())
        by_words = {_words(path): what for path, what in self.argument_names.items()}
        found = {}
        for parameter in parameters:
            number = int(parameter.operands)
            category = by_words.get(_words(parameter.op_name))
            if category is None and len(parameters) == len(in_order):
                category = in_order[number]
            found[number] = category or "other"
        return found


def compile_step(
    step: Any,
    arguments: tuple[Any, ...],
    *,
    on: Cluster | None = None,
    optimize: bool = False,
    keep: bool = True,
) -> CompiledStep:
    """Compiles a step for a cluster that need not be there, or for the devices of its arguments.

    Args:
        step: Any function, jitted or not, or an object with `program(*arguments)`, which returns a
            jitted one, as a training step of shardlib has.
        arguments: What it is called with: pytrees of arrays or `ShapeDtypeStruct`s with
            `NamedSharding`s, and whatever else it takes. Their mesh may be abstract.
        on: The cluster. The step is compiled for a mesh of the same axes over its devices, unless
            its arguments lie there already. None for the devices of the arguments.
        optimize: Whether a program for TPUs is optimized as one that is run, which takes five
            times as long. Otherwise its collectives are the same and its peak differs by a few
            percent.
        keep: Whether to look in, and add to, the cache of reports.

    Raises:
        MeshError: If the step's mesh does not have as many devices as the cluster, or there is no
            mesh.
        MissingExtraError: If the compiler of the cluster's platform is not installed.
        ConfigError: If the step needs a library for its compilation that is not installed.
        DoesNotFitError: If it exceeds the largest TPU so far that it cannot be compiled.
    """
    old = mesh_of(arguments)
    mesh = _mesh_for(old, on)
    jitted, placed = _placed(step, tuple(arguments), old, mesh)
    with _active_mesh(mesh):
        traced = _traced(jitted, placed)
        lowered = traced.lower()
        names = parameter_names(jitted, placed)
        placed = placed_arguments(jitted, placed)
    platform = mesh.devices.flat[0].platform
    options = dict(_OPTIONS.get(platform, {}))
    if platform == "tpu":
        options["optimization_level"] = _DEFAULT if optimize else _FAST
    digest = hashlib.sha256(lowered.as_text(debug_info=True).encode()).hexdigest()
    compiled = None

    def compile_it() -> cache.Program:
        nonlocal compiled
        try:
            with captured_errors() as said:
                compiled = lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError:
            needed = needed_bytes(lowered, options) if platform == "tpu" else None
            if needed is None:
                raise
            found = compile_larger(
                on,
                needed,
                lambda other: compile_step(step, arguments, on=other, optimize=optimize, keep=keep),
            )
            memory = {**found.memory, "peak": needed}
            return cache.Program(found.text, memory, found.warnings, found.compiled_for)
        return cache.Program(compiled.as_text() or "", memory_of(compiled, platform), said.text)

    devices = [f"{device.device_kind} {device.id}" for device in mesh.devices.flat]
    key = cache.program_key(digest, [*devices, repr(sorted(options.items()))])
    program = cache.cached(key, compile_it) if keep else compile_it()
    return CompiledStep(
        text=program.text,
        memory=program.memory,
        lowered_hash=digest,
        mesh_sizes=mesh_sizes(mesh),
        mesh=mesh,
        cluster=on,
        arguments=placed,
        argument_names=argument_names(placed, names),
        donated=tuple(info.donated for info in jax.tree.leaves(lowered.args_info)),
        warnings=program.warnings,
        compiled_for=program.compiled_for or (on.name if on else platform),
        jaxpr=getattr(traced, "jaxpr", None),
        compiled=compiled,
    )


def memory_of(compiled: Any, platform: str) -> dict[str, int]:
    """Returns what a compiled program says of its memory, in bytes by name; nothing where its
    platform says nothing."""
    stats = compiled.memory_analysis()
    if stats is None:
        return {}
    names = ("argument", "output", "alias", "temp", "generated_code")
    found = {name: int(getattr(stats, f"{name}_size_in_bytes", 0)) for name in names}
    # On CPU the peak leaves the temporaries out.
    together = found["argument"] + found["temp"] + found["output"] - found["alias"]
    peak = together if platform == "cpu" else int(getattr(stats, "peak_memory_in_bytes", 0))
    return {**found, "peak": peak}


def argument_names(arguments: tuple[Any, ...], names: tuple[str, ...]) -> dict[str, str]:
    """Returns what each array of the arguments is for, by its path behind the argument's name."""
    found = {}
    for name, argument in zip(names, arguments, strict=True):
        for path, leaf in named_leaves(argument).items():
            if not hasattr(leaf, "dtype"):
                continue
            whole = f"{name}/{path}" if path else name
            found[whole] = _category(whole.split("/"), leaf)
    return found


def _category(path: list[str], leaf: Any) -> str:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "other"
    for word in path:
        for category, words in _CATEGORIES.items():
            if word in words:
                return category
    return "other"


def _words(path: str) -> tuple[str, ...]:
    """The words of a path, however it is written: `state.params['head']` as `state/params/head`."""
    return tuple(re.findall(r"\w+", path))


def _mesh_for(old: AnyMesh | None, on: Cluster | None) -> Mesh:
    if on is None:
        if old is None or isinstance(old, AbstractMesh):
            raise MeshError(
                "nothing says which devices to compile the step for: its arguments lie on "
                f"{'no mesh' if old is None else 'an abstract mesh'}.\n"
                "  Name a cluster, as in on='v5e-16', or place the arguments on a mesh."
            )
        return old
    devices = devices_of(on)
    if old is None:
        if len(devices) > 1:
            raise MeshError(
                f"nothing says how the step is spread over the {len(devices)} devices of "
                f"{on.name}: its arguments lie on no mesh.\n  Give them NamedShardings, on an "
                "AbstractMesh if need be, or name a cluster of one device."
            )
        return jax.sharding.Mesh(devices, ("device",))
    if lies_on(old, devices):
        return old  # type: ignore[return-value]
    return mesh_over(old, devices, on.name)


def _placed(
    step: Any, arguments: tuple[Any, ...], old: AnyMesh | None, mesh: Mesh
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted function that computes the step on a mesh, and the arguments to trace it
    with."""
    if old is None:  # Of one device.
        whole = NamedSharding(mesh, PartitionSpec())
        placed = jax.tree.map(lambda leaf: abstract_leaf(leaf, lambda _: whole), arguments)
        return _jitted(step, placed), placed
    move = Move(old, mesh)
    finds_mesh = any(is_state(node) for node in jax.tree.leaves(arguments, is_leaf=is_state))
    if old is mesh or finds_mesh or isinstance(old, AbstractMesh):
        placed = move.arguments(arguments)
        return _jitted(step, placed), placed
    return move.function(_jitted(step, arguments), arguments)


def _jitted(step: Any, arguments: tuple[Any, ...]) -> Any:
    if hasattr(step, "program"):
        return step.program(*arguments)
    return step if hasattr(step, "trace") else jax.jit(step)


def _traced(jitted: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        return jitted.trace(*arguments)
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise ConfigError(
            "attention by cuDNN cannot be compiled: cuDNN is not installed.\n"
            "  pip install 'shardlib[cuda]', or let another back end compute it "
            "(model.attention=xla)."
        ) from error


@contextlib.contextmanager
def _active_mesh(mesh: Mesh) -> Iterator[None]:
    """Where the caller has set a mesh for JAX, the new one takes its place."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(mesh):
        yield
