"""Compiler options of the programs of a step, by platform.

They are options of one program, not of the process: XLA_FLAGS and LIBTPU_INIT_ARGS stay unchanged.
An option that these set keeps their value. CPU programs have no default options.
"""

import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.errors import ConfigError, did_you_mean

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """A compiler option with its default value, its effect and the source of the value."""

    name: str
    value: Value
    effect: str
    source: str


# Both compilers have latency hiding schedulers and asynchronous collectives by default. Pipelined
# gathers are left out: with them, libtpu 0.0.42 makes the gathers of a backward scan synchronous,
# and a program of jaxlib 0.10.2 for GPUs takes a sixth more memory (Llama 3 8B, 4 layers).
OPTIONS: Mapping[str, tuple[CompilerOption, ...]] = {
    "tpu": (
        CompilerOption(
            "xla_jf_spmd_threshold_for_windowed_einsum_mib",
            100_000,
            "collective matmuls are off: they hide more, but send more and take more memory",
            "OpenXLA, docs/flags_guidance.md; MaxText, DISABLE_COLLECTIVE_MATMUL",
        ),
    ),
    "gpu": (),
}
"""The default options of a step, by platform."""
_ALL = {option.name: option for options in OPTIONS.values() for option in options}

# The options of the published sets for overlap (MaxText, benchmarks/xla_flags_library.py; AXLearn,
# axlearn/common/compiler_options.py; NVIDIA JAX-Toolbox, "GPU performance"), for suggestions.
_PUBLISHED = (
    "xla_enable_async_all_gather",
    "xla_enable_async_all_reduce",
    "xla_enable_async_collective_permute",
    "xla_tpu_data_parallel_opt_different_sized_ops",
    "xla_tpu_enable_ag_backward_pipelining",
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_enable_data_parallel_all_reduce_opt",
    "xla_tpu_enable_latency_hiding_scheduler",
    "xla_tpu_overlap_compute_collective_tc",
    "xla_tpu_scoped_vmem_limit_kib",
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_all_reduce_combine_threshold_bytes",
    "xla_gpu_enable_latency_hiding_scheduler",
    "xla_gpu_enable_pipelined_all_gather",
    "xla_gpu_enable_pipelined_all_reduce",
    "xla_gpu_enable_pipelined_reduce_scatter",
    "xla_gpu_memory_limit_slop_factor",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)


def options_on(mesh: Mesh, changes: Mapping[str, Value | None] | None = None) -> dict[str, Any]:
    """Returns the compiler options of a step on a mesh.

    A default that the installed compiler does not know is left out.

    Args:
        mesh: Devices of one platform, attached or descriptions of absent ones.
        changes: Options by name that replace or complete the defaults. None removes a default.

    Raises:
        ConfigError: If the compiler refuses the name or the value of an option in `changes`.
    """
    changes = changes or {}
    given = {name: value for name, value in changes.items() if value is not None}
    defaults = {option.name: option.value for option in OPTIONS.get(_platform(mesh), ())}
    elsewhere = {*changes, *_of_the_process()}
    kept = {name: value for name, value in defaults.items() if name not in elsewhere}
    faults = [_not_removable(name) for name in changes if name not in given | _ALL]
    if not faults and not _refusal(mesh, kept | given):
        return kept | given
    kept = {name: value for name, value in kept.items() if not _refusal(mesh, {name: value})}
    if why := _refusal(mesh, kept | given):
        alone = {name: _refusal(mesh, {name: value}) for name, value in given.items()}
        refused = [_fault(mesh, name, given[name], each) for name, each in alone.items() if each]
        faults += refused or [f"together they are refused: {why}."]
    if faults:
        fix = "  Correct or remove each of them." if len(faults) > 1 else "  Correct or remove it."
        raise ConfigError("compiler_options: " + "\n  ".join([*faults, fix.strip()]))
    return kept | given


def described(options: Mapping[str, Value]) -> list[str]:
    """Returns options as text, defaults with their effect."""
    lines = []
    for name, value in options.items():
        default = _ALL.get(name)
        is_default = default is not None and default.value == value
        effect = f": {default.effect}" if default is not None and is_default else ""
        lines.append(f"{name}={value}{effect}")
    return lines


def _of_the_process() -> list[str]:
    """Returns the names of the options that environment variables set for all programs."""
    flags = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    return [flag.lstrip("-").partition("=")[0] for flag in flags.split()]


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def _not_removable(name: str) -> str:
    return f"null removes a default, and no default is named {name!r}.{did_you_mean(name, _ALL)}"


def _fault(mesh: Mesh, name: str, value: Value, why: str) -> str:
    if "No such compile option" not in why:
        return f"{name}={value!r} is refused: {why}."
    hint = did_you_mean(name, [*_ALL, *_PUBLISHED])
    return f"the compiler for {_platform(mesh).upper()} has no option {name!r}.{hint}"


def _refusal(mesh: Mesh, options: Mapping[str, Value]) -> str:
    """Returns the reason why the compiler refuses options, or an empty string."""
    return _compiled(mesh, tuple(options.items())) if options else ""


@functools.cache
def _compiled(mesh: Mesh, options: tuple[tuple[str, Value], ...]) -> str:
    place, given = NamedSharding(mesh, PartitionSpec()), dict[str, Any](options)
    lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32", sharding=place))
    try:
        with warnings.catch_warnings():
            # JAX's cache cannot give a program for absent devices, warns and compiles it.
            text = "Error (reading|writing) persistent compilation cache entry"
            warnings.filterwarnings("ignore", text, UserWarning)
            lowered.compile(compiler_options=given)
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        return first.removeprefix("INVALID_ARGUMENT: ").rstrip(".: ")
    return ""
