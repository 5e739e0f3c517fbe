"""Ahead-of-time compilation of a step, for local devices or for a cluster that is not attached."""

import contextlib
import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered
from jaxtyping import PyTree

from shardlib.errors import ConfigError, MeshError
from shardlib.explain.aot import cache
from shardlib.explain.aot.call import NO_KEYWORDS, Call, Step, abstract_leaf, bound, jitted
from shardlib.explain.aot.capture_stderr import captured_errors
from shardlib.explain.aot.oom_fallback import compile_larger, needed_bytes
from shardlib.explain.aot.retarget import AnyMesh, Move, is_state, lies_on, mesh_of, mesh_over
from shardlib.explain.aot.topology import devices_of as devices_of
from shardlib.explain.hlo.parameters import parameter_paths
from shardlib.explain.hlo.text import Module, parse
from shardlib.hardware import Cluster, cluster_of
from shardlib.hardware.compiler_options import Value, options_on
from shardlib.mesh import mesh_sizes
from shardlib.paths import named_leaves

# JAX's `O0` takes a fifth of the time, has the same collectives, and its peak differs by 1-7%.
# 0 is the compiler's default, regardless of JAX_OPTIMIZATION_LEVEL.
_FAST, _DEFAULT = 9, 0
_ABOUT = 1.01
"""Peaks of both memories that differ by less are not told apart: constants are in neither."""
_CATEGORIES = {
    "params": ("params", "parameters", "weights", "model", "kernel", "bias", "scale", "embedding"),
    "optimizer": ("opt_state", "optimizer", "opt", "momentum", "mu", "nu"),
    "model_state": ("model_state", "batch_stats", "buffers"),
    "batch": ("batch", "tokens", "targets", "inputs", "labels", "images", "x", "y"),
}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step compiled for a mesh, with what is known without running it.

    Attributes:
        text: The scheduled program, from `Compiled.as_text()`.
        memory: The bytes in `Compiled.memory_analysis()`, by name without `_size_in_bytes`:
            `argument`, `output`, `alias`, `temp`, `generated_code`, and `peak` if it is known.
        lowered_hash: Digest of the StableHLO that it was compiled from, sources included.
        mesh_sizes: Devices along each axis, in mesh order.
        mesh: The mesh of the devices that it was compiled for.
        cluster: The target cluster; None for local devices of an unknown chip, such as CPUs.
        arguments: The arguments that hold arrays, as pytrees of `ShapeDtypeStruct`s with shardings
            on that mesh, keyword arguments last. A number in such a pytree counts as an array.
        argument_names: The category of each array by path, such as `state/params/head/kernel`, in
            order: one of `params`, `optimizer`, `model_state`, `batch`, `other`.
        donated: Whether each array of the arguments is donated, in order.
        warnings: Compiler logs from the standard error, such as involuntary full
            rematerialization; None if TF_CPP_MIN_LOG_LEVEL hid them.
        compiled_for: The cluster that the text is for. A step far too large for its chip is
            compiled for a cluster of as many devices with more memory; only `memory["peak"]` is
            then for the chip itself.
        jaxpr: The traced step, a `ClosedJaxpr`.
        compiled: The `jax.stages.Compiled`; None when the text is from the cache.
        options: The compiler options of the step.
        scheduled: Whether the order of its instructions is that of a run. Programs for TPUs at
            reduced optimization have no asynchronous collectives.
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
    compiled: Compiled | None = None
    options: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    scheduled: bool = True

    def argument_paths(self, module: Module | None = None) -> dict[int, str]:
        """Returns the path in `argument_names` of each argument of the program, by its number.

        The program has no arguments for arrays that the step does not read.
        """
        return parameter_paths(module or parse(self.text), self.argument_names)

    def argument_categories(self, module: Module | None = None) -> dict[int, str]:
        """Returns the category of each argument of the program, by its number."""
        paths = self.argument_paths(module)
        return {number: self.argument_names[path] for number, path in paths.items()}


def compile_step(
    step: Step,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] = NO_KEYWORDS,
    *,
    on: Cluster | None = None,
    optimize: bool = False,
    keep: bool = True,
) -> CompiledStep:
    """Compiles a step for a cluster, attached or not, or for the devices of its arguments.

    Args:
        step: Any function, jitted or not, or an object whose `program(*arguments)` returns a jitted
            function, such as a training step of shardlib.
        arguments: The positional arguments: pytrees of arrays or `ShapeDtypeStruct`s with
            `NamedSharding`s, and any other values. Their mesh may be abstract. If they have no
            mesh, the step's `in_shardings` or `out_shardings` give it.
        keywords: The keyword arguments.
        on: The cluster. The step is compiled for a mesh of the same axes over its devices, unless
            its arguments are already there. None for the devices of the arguments.
        optimize: Whether to fully optimize a TPU program, as for a run, which takes five times as
            long. Without it the collectives are the same but not scheduled, and the peak differs by
            a few percent.
        keep: Whether to read and write the cache of reports.

    Raises:
        MeshError: If the step's mesh and the cluster differ in their number of devices, or the step
            has no mesh or several.
        MissingExtraError: If the compiler of the cluster's platform is not installed.
        ConfigError: If compiling the step needs a library that is not installed.
        DoesNotFitError: If the step exceeds even the largest TPU by too much to be compiled.
    """

    def compile_on(other: Cluster) -> CompiledStep:
        return compile_step(step, arguments, keywords, on=other, optimize=optimize, keep=keep)

    lowering = _lower(step, tuple(arguments), keywords, on, optimize=optimize)
    program, compiled = _program(lowering, on, compile_on, keep=keep)
    return _described(lowering, on or cluster_of(lowering.devices), program, compiled)


@dataclasses.dataclass(frozen=True)
class _Lowering:
    """A step lowered for its mesh."""

    lowered: Lowered
    mesh: Mesh
    call: Call
    jaxpr: Any
    options: dict[str, Value]
    """The compiler options of the step."""
    compilation: dict[str, Value]
    """The compiler options that only a report has."""

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.lowered.as_text(debug_info=True).encode()).hexdigest()

    @property
    def all_options(self) -> dict[str, Any]:
        return self.compilation | self.options

    def key(self) -> str:
        devices = [f"{device.device_kind} {device.id}" for device in self.devices]
        return cache.program_key(self.digest, [*devices, repr(sorted(self.all_options.items()))])


def _lower(
    step: Step,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    on: Cluster | None,
    *,
    optimize: bool,
) -> _Lowering:
    # Tracing may start JAX, which fixes the number of CPU devices. They are requested first.
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
    # A traced `nnx.jit` function does not expose its jaxpr.
    jaxpr = getattr(traced, "jaxpr", call.jaxpr)
    # A step of shardlib has chosen its options; the defaults of one are for all other functions.
    defaults = {} if hasattr(step, "program") else options_on(mesh)
    options = defaults | call.compiler_options
    return _Lowering(lowered, mesh, call, jaxpr, options, _compilation(mesh, optimize=optimize))


def _compilation(mesh: Mesh, *, optimize: bool) -> dict[str, Value]:
    if mesh.devices.flat[0].platform != "tpu":
        return {}
    # A step that does not fit is still compiled, so that its peak is known.
    level = _DEFAULT if optimize else _FAST
    return {"xla_tpu_no_crash_on_oom": True, "optimization_level": level}


def _program(
    lowering: _Lowering,
    on: Cluster | None,
    compile_on: Callable[[Cluster], CompiledStep],
    *,
    keep: bool,
) -> tuple[cache.Program, Any]:
    """Returns the cached form of a compiled program, and the `Compiled` if it is made here."""
    compiled = None

    def compile_it() -> cache.Program:
        nonlocal compiled
        try:
            with captured_errors() as log, _its_own_sources():
                options = lowering.all_options or None
                compiled = lowering.lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError:
            is_tpu = lowering.platform == "tpu"
            needed = needed_bytes(lowering.lowered, lowering.all_options) if is_tpu else None
            if needed is None:
                raise
            other = compile_larger(on, needed, compile_on)
            memory = {**other.memory, "peak": needed}
            return cache.Program(other.text, memory, other.warnings, other.compiled_for)
        memory = memory_of(compiled, lowering.platform)
        return cache.Program(compiled.as_text() or "", memory, log.text)

    program = cache.cached(lowering.key(), compile_it) if keep else compile_it()
    return program, compiled


@contextlib.contextmanager
def _its_own_sources() -> Iterator[None]:
    """Keeps JAX's persistent cache from returning a program with the source lines of another one.

    Without metadata in the key, such a program has the lines of whoever compiled it first. A
    program for devices that are not there cannot be read from that cache; JAX then warns and
    compiles it.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        with warnings.catch_warnings():
            text = "Error (reading|writing) persistent compilation cache entry"
            warnings.filterwarnings("ignore", text, UserWarning)
            yield
    finally:
        jax.config.update(name, before)


def _described(
    lowering: _Lowering, cluster: Cluster | None, program: cache.Program, compiled: Compiled | None
) -> CompiledStep:
    arguments = lowering.call.placed()
    return CompiledStep(
        text=program.text,
        memory=program.memory,
        lowered_hash=lowering.digest,
        mesh_sizes=mesh_sizes(lowering.mesh),
        mesh=lowering.mesh,
        cluster=cluster,
        arguments=arguments,
        argument_names=argument_names(arguments, lowering.call.names),
        donated=lowering.call.donated,
        warnings=program.warnings,
        compiled_for=program.compiled_for or (cluster.name if cluster else lowering.platform),
        jaxpr=lowering.jaxpr,
        compiled=compiled,
        options=lowering.options,
        scheduled=lowering.all_options.get("optimization_level") != _FAST,
    )


def memory_of(compiled: Compiled, platform: str) -> dict[str, int]:
    """Returns the memory analysis of a compiled program, in bytes by name.

    The result is empty if the platform has no memory analysis. It has no `peak` for a program with
    more temporaries in host memory than on the device: XLA then reports that of the host.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return {}
    names = ("argument", "output", "alias", "temp", "generated_code")
    sizes = {name: int(getattr(stats, f"{name}_size_in_bytes", 0)) for name in names}
    together = sizes["argument"] + sizes["temp"] + sizes["output"] - sizes["alias"]
    if platform == "cpu":  # The reported peak leaves out the temporaries.
        return {**sizes, "peak": together}
    # The arguments in both memories, and the temporaries of the memory that has more of them.
    peak = int(getattr(stats, "peak_memory_in_bytes", 0))
    peak -= int(getattr(stats, "host_argument_size_in_bytes", 0))
    on_host = int(getattr(stats, "host_temp_size_in_bytes", 0))
    if on_host and peak <= _ABOUT * (together - sizes["temp"] + on_host):
        return sizes
    return {**sizes, "peak": peak}


def argument_names(arguments: tuple[Any, ...], names: tuple[str, ...]) -> dict[str, str]:
    """Returns the category of each array, by its path prefixed with the argument's name."""
    categories = {}
    for name, argument in zip(names, arguments, strict=True):
        for path, leaf in named_leaves(argument).items():
            if not hasattr(leaf, "dtype"):
                continue
            whole = f"{name}/{path}" if path else name
            categories[whole] = _category(whole.split("/"), leaf)
    return categories


def _category(path: list[str], leaf: PyTree) -> str:
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
                "the step has no devices to compile for: its arguments are on "
                f"{'no mesh' if old is None else 'an abstract mesh'}.\n"
                "  Name a cluster, as in on='v5e-16', or place the arguments on a mesh."
            )
        return old
    if old is None:
        if len(devices) > 1:
            raise MeshError(
                f"the step has no sharding over the {len(devices)} devices of "
                f"{on.name}: its arguments are on no mesh.\n  Give them NamedShardings, on an "
                "AbstractMesh if needed, or name a cluster of one device."
            )
        return jax.sharding.Mesh(devices, ("device",))
    if lies_on(old, devices):
        return old  # type: ignore[return-value]
    return mesh_over(old, devices, on.name)


def _on_mesh(
    step: Step,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    old: AnyMesh | None,
    mesh: Mesh,
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Returns a jitted function that computes the step on a mesh, and the arguments to trace it."""
    whole = (arguments, keywords)
    if old is None:  # The mesh has one device.
        place = NamedSharding(mesh, PartitionSpec())
        arguments, keywords = jax.tree.map(lambda leaf: abstract_leaf(leaf, lambda _: place), whole)
        return jitted(step, arguments, keywords), arguments, keywords
    move = Move(old, mesh)
    if old is mesh:
        arguments, keywords = move.arguments(whole)
        return jitted(step, arguments, keywords), arguments, keywords
    has_state = any(is_state(node) for node in jax.tree.leaves(whole, is_leaf=is_state))
    if has_state or isinstance(old, AbstractMesh):
        # A state names the mesh of its step, so the step is traced on the new mesh.
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
            "cuDNN attention cannot be compiled: cuDNN is not installed.\n"
            "  pip install 'shardlib[cuda]', or choose another backend "
            "(model.attention=xla)."
        ) from error


@contextlib.contextmanager
def _active_mesh(mesh: Mesh) -> Iterator[None]:
    """Replaces the mesh that the caller has set for JAX, if any, with the new one."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(mesh):
        yield
