"""A step compiled ahead of time, for devices at hand or for a cluster that is not there."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.errors import ConfigError, MeshError
from shardlib.explain import cache
from shardlib.explain.call import NO_KEYWORDS, Call, abstract_leaf, bound, jitted
from shardlib.explain.captured import captured_errors
from shardlib.explain.hlo import Module, parse
from shardlib.explain.moving import AnyMesh, Move, is_state, lies_on, mesh_of, mesh_over
from shardlib.explain.oversized import compile_larger, needed_bytes
from shardlib.explain.parameters import parameter_paths
from shardlib.explain.topology import devices_of as devices_of
from shardlib.hardware import Cluster, cluster_of
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
        cluster: What it was compiled for; None for devices at hand whose chip is not known, as that
            of CPUs.
        arguments: Those that hold arrays, as pytrees of `ShapeDtypeStruct`s with shardings on that
            mesh, and those by keyword last. A number beside arrays is an array.
        argument_names: What each array is for, by path and in order, as in
            `state/params/head/kernel`: one of `params`, `optimizer`, `model_state`, `batch`,
            `other`.
        donated: Of each array of the arguments, in order, whether the step takes its memory.
        warnings: What the compiler wrote to the standard error, such as of involuntary full
            rematerialization; None where TF_CPP_MIN_LOG_LEVEL hid it.
        compiled_for: The cluster that the text is for. Of a step far too large for its chip that is
            one of as many devices with more memory; only `memory["peak"]` is of the chip itself.
        jaxpr: What the step was traced to, a `ClosedJaxpr`.
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
    warnings: str | None = ""
    compiled_for: str = ""
    jaxpr: Any = None
    compiled: Any = None

    def argument_paths(self, module: Module | None = None) -> dict[int, str]:
        """Returns the path in `argument_names` of each argument of the program, by its number.
        Arrays that the step does not read are no arguments of the program."""
        return parameter_paths(module or parse(self.text), self.argument_names)

    def argument_categories(self, module: Module | None = None) -> dict[int, str]:
        """Returns what each argument of the program is for, by its number."""
        paths = self.argument_paths(module)
        return {number: self.argument_names[path] for number, path in paths.items()}


def compile_step(
    step: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] = NO_KEYWORDS,
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
            `NamedSharding`s, and whatever else it takes. Their mesh may be abstract; where they lie
            on none, it is that of the `in_shardings` or `out_shardings` of the step.
        keywords: What it is called with by name.
        on: The cluster. The step is compiled for a mesh of the same axes over its devices, unless
            its arguments lie there already. None for the devices of the arguments.
        optimize: Whether a program for TPUs is optimized as one that is run, which takes five
            times as long. Otherwise its collectives are the same and its peak differs by a few
            percent.
        keep: Whether to look in, and add to, the cache of reports.

    Raises:
        MeshError: If the step's mesh does not have as many devices as the cluster, or there is no
            mesh, or there are several.
        MissingExtraError: If the compiler of the cluster's platform is not installed.
        ConfigError: If the step needs a library for its compilation that is not installed.
        DoesNotFitError: If it exceeds the largest TPU so far that it cannot be compiled.
    """

    def compile_on(other: Cluster) -> CompiledStep:
        return compile_step(step, arguments, keywords, on=other, optimize=optimize, keep=keep)

    found = _lower(step, tuple(arguments), keywords, on, optimize=optimize)
    program, compiled = _program(found, on, compile_on, keep=keep)
    return _described(found, on or cluster_of(found.devices), program, compiled)


@dataclasses.dataclass(frozen=True)
class _Lowering:
    """A step on its mesh, to be compiled."""

    lowered: Any
    mesh: Mesh
    call: Call
    jaxpr: Any
    options: dict[str, Any]
    """For the compiler."""

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.lowered.as_text(debug_info=True).encode()).hexdigest()

    def key(self) -> str:
        devices = [f"{device.device_kind} {device.id}" for device in self.devices]
        return cache.program_key(self.digest, [*devices, repr(sorted(self.options.items()))])


def _lower(
    step: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    on: Cluster | None,
    *,
    optimize: bool,
) -> _Lowering:
    # Tracing may start JAX, and with it as many CPU devices as are asked for by then.
    devices = None if on is None else devices_of(on)
    arguments, keywords = bound(step, arguments, keywords)
    with _named_cudnn():
        old = mesh_of((arguments, keywords))
        if old is None:
            call = Call.of(jitted(step, arguments, keywords), arguments, keywords)
            old = mesh_of(call.shardings)
        mesh = _mesh_for(old, on, devices)
        function, arguments, keywords = _on_mesh(step, arguments, keywords, old, mesh)
        with _active_mesh(mesh):
            traced = function.trace(*arguments, **keywords)
            call = Call.of(function, arguments, keywords)
            lowered = traced.lower()
    # What `nnx.jit` traces keeps its jaxpr to itself.
    jaxpr = getattr(traced, "jaxpr", call.jaxpr)
    options = _options(mesh, optimize=optimize) | call.compiler_options
    return _Lowering(lowered, mesh, call, jaxpr, options)


def _options(mesh: Mesh, *, optimize: bool) -> dict[str, Any]:
    platform = mesh.devices.flat[0].platform
    found = dict(_OPTIONS.get(platform, {}))
    if platform == "tpu":
        found["optimization_level"] = _DEFAULT if optimize else _FAST
    return found


def _program(
    found: _Lowering,
    on: Cluster | None,
    compile_on: Callable[[Cluster], CompiledStep],
    *,
    keep: bool,
) -> tuple[cache.Program, Any]:
    """Returns what is kept of a compiled program, and the program itself where it is made now."""
    compiled = None

    def compile_it() -> cache.Program:
        nonlocal compiled
        try:
            with captured_errors() as said, _its_own_sources():
                compiled = found.lowered.compile(compiler_options=found.options or None)
        except jax.errors.JaxRuntimeError:
            is_tpu = found.platform == "tpu"
            needed = needed_bytes(found.lowered, found.options) if is_tpu else None
            if needed is None:
                raise
            other = compile_larger(on, needed, compile_on)
            memory = {**other.memory, "peak": needed}
            return cache.Program(other.text, memory, other.warnings, other.compiled_for)
        memory = memory_of(compiled, found.platform)
        return cache.Program(compiled.as_text() or "", memory, said.text)

    program = cache.cached(found.key(), compile_it) if keep else compile_it()
    return program, compiled


@contextlib.contextmanager
def _its_own_sources() -> Iterator[None]:
    """Keeps JAX's persistent cache from giving a program that differs in its source lines alone:
    the lines of whoever compiled it first."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _described(
    found: _Lowering, cluster: Cluster | None, program: cache.Program, compiled: Any
) -> CompiledStep:
    arguments = found.call.placed()
    return CompiledStep(
        text=program.text,
        memory=program.memory,
        lowered_hash=found.digest,
        mesh_sizes=mesh_sizes(found.mesh),
        mesh=found.mesh,
        cluster=cluster,
        arguments=arguments,
        argument_names=argument_names(arguments, found.call.names),
        donated=found.call.donated,
        warnings=program.warnings,
        compiled_for=program.compiled_for or (cluster.name if cluster else found.platform),
        jaxpr=found.jaxpr,
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
    if platform == "tpu":
        # Arguments that lie in the memory of the hosts are counted.
        peak -= int(getattr(stats, "host_argument_size_in_bytes", 0))
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


def _mesh_for(old: AnyMesh | None, on: Cluster | None, devices: list[Any] | None) -> Mesh:
    if on is None or devices is None:
        if old is None or isinstance(old, AbstractMesh):
            raise MeshError(
                "nothing says which devices to compile the step for: its arguments lie on "
                f"{'no mesh' if old is None else 'an abstract mesh'}.\n"
                "  Name a cluster, as in on='v5e-16', or place the arguments on a mesh."
            )
        return old
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


def _on_mesh(
    step: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    old: AnyMesh | None,
    mesh: Mesh,
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Returns a jitted function that computes the step on a mesh, and what to trace it with."""
    whole = (arguments, keywords)
    if old is None:  # Of one device.
        place = NamedSharding(mesh, PartitionSpec())
        arguments, keywords = jax.tree.map(lambda leaf: abstract_leaf(leaf, lambda _: place), whole)
        return jitted(step, arguments, keywords), arguments, keywords
    move = Move(old, mesh)
    if old is mesh:
        arguments, keywords = move.arguments(whole)
        return jitted(step, arguments, keywords), arguments, keywords
    has_state = any(is_state(node) for node in jax.tree.leaves(whole, is_leaf=is_state))
    if has_state or isinstance(old, AbstractMesh):
        # A state says where the step is to be: traced there, it is what it would be there.
        arguments, keywords = move.arguments(whole)
    function = jitted(step, arguments, keywords)
    call = Call.of(function, arguments, keywords)
    if isinstance(old, Mesh) and (not has_state or Move(old, mesh).is_left(call)):
        return *move.function(call), NO_KEYWORDS
    return function, arguments, keywords


@contextlib.contextmanager
def _named_cudnn() -> Iterator[None]:
    try:
        yield
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
