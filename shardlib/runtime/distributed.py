"""Process groups: start, barriers, exit, and the number of virtual CPU devices."""

import atexit
import dataclasses
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NoReturn

import jax

from shardlib.errors import DistributedError
from shardlib.errors import PeerLostError as PeerLostError
from shardlib.runtime.exit_codes import FAILED, HUNG
from shardlib.runtime.peers import (
    calling_coordination,
    end_when_coordination_fails,
    lost_peers,
    thread_ids,
)
from shardlib.runtime.stopping import StopRequest as StopRequest
from shardlib.runtime.stopping import coordination_client, process_index

LAUNCH_VARIABLES = ("SHARDLIB_COORDINATOR", "SHARDLIB_PROCESS_ID", "SHARDLIB_NUM_PROCESSES")
"""Variables that `shardlib launch` sets for each process: host:port, index from 0, and count."""

_barriers: Counter[str] = Counter()
# Effectively no limit: the watchdog ends such a wait.
_NO_LIMIT_SECONDS = 7 * 24 * 3600.0
# CPU devices of this process that `local_cpu_devices` chose; 0 before.
_emulated = 0


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The index of this process in its group, and the number of processes."""

    index: int
    count: int
    started_by: Literal["single", "launch", "slurm", "tpu", "user"] = "single"

    @property
    def is_primary(self) -> bool:
        """Whether this is the one process that prints and writes shared files."""
        return self.index == 0


def initialize(
    *, heartbeat_timeout_seconds: int = 100, start_timeout_seconds: int = 300
) -> ProcessGroup:
    """Joins the process group that this process was started in, if any.

    It checks, in order: the variables of `shardlib launch`; Slurm with more than one task; a TPU
    pod; otherwise this is a single process and nothing is started. A group that the user has
    already joined by `jax.distributed.initialize` is kept. After joining, an unhandled exception
    ends the process at once: it would otherwise wait for the others, which wait for it. A process
    that has lost others ends with the code `exit_codes.HUNG`.

    Must run before the first use of a device.

    Args:
        heartbeat_timeout_seconds: Silence after which a process counts as dead, which ends all. A
            process is silent when it is gone or frozen, not when its Python code hangs.
        start_timeout_seconds: Time to wait for all processes to start.

    Raises:
        DistributedError: If the environment is inconsistent, a device was used before, or the
            processes do not start in time.
    """
    if jax.distributed.is_initialized():
        return _joined(ProcessGroup(jax.process_index(), jax.process_count(), "user"))
    timeouts = {
        "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        "initialization_timeout": start_timeout_seconds,
    }
    if launched := launch_address(os.environ):
        coordinator, index, count = launched
        port = coordinator.rpartition(":")[2]
        local = coordinator.startswith(("127.0.0.1:", "localhost:"))
        _start(
            coordinator_address=coordinator,
            num_processes=count,
            process_id=index,
            cluster_detection_method="deactivate",
            # By default the service would listen on every interface of the machine.
            coordinator_bind_address=f"127.0.0.1:{port}" if local else None,
            **timeouts,
        )
        return _joined(ProcessGroup(index, count, "launch"))
    if in_slurm_step(os.environ):
        local_ids = slurm_local_devices(os.environ)
        _start(cluster_detection_method="slurm", local_device_ids=local_ids, **timeouts)
        index, count = (int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS"))
        return _joined(ProcessGroup(index, count, "slurm"))
    if in_tpu_pod(os.environ):
        _start(**timeouts)
        return _joined(ProcessGroup(jax.process_index(), jax.process_count(), "tpu"))
    return ProcessGroup(0, 1)


def process_group() -> ProcessGroup:
    """Returns the group of this process. Starts the backend of the devices."""
    started_by = "user" if jax.distributed.is_initialized() else "single"
    return ProcessGroup(jax.process_index(), jax.process_count(), started_by)


def barrier(name: str, *, timeout_seconds: float | None = 600.0) -> None:
    """Waits until every process has reached the barrier of this name, without using devices. Every
    process must use a name equally often. Without a timeout, the limit is left to the watchdog.

    Raises:
        PeerLostError: If some process does not arrive in time; the message names it.
    """
    if not jax.distributed.is_initialized():
        return
    _barriers[name] += 1
    limit = _NO_LIMIT_SECONDS if timeout_seconds is None else timeout_seconds
    try:
        coordination_client().wait_at_barrier(
            f"shardlib/barrier/{name}/{_barriers[name]}", int(limit * 1000)
        )
    except jax.errors.JaxRuntimeError as error:
        raise PeerLostError(
            f"not all processes reached the barrier {name!r} within {limit:g} s: "
            f"{str(error).splitlines()[0]}\n"
            "  Look at the output of the processes named: one has failed or is still busy."
        ) from None


def shutdown() -> None:
    """Leaves the group together with all other processes; does nothing for a single process."""
    if jax.distributed.is_initialized():
        with calling_coordination():
            jax.distributed.shutdown()
        sys.excepthook = sys.__excepthook__


def exit_process(code: int) -> NoReturn:
    """Ends the process: at once if it failed within a group, by a normal exit otherwise.

    A normal exit leaves the group first, and would wait for processes that may be waiting for this
    one in a collective.
    """
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error that ends the process: `exit_codes.HUNG` if other
    processes have gone, 130 for Ctrl-C, `exit_codes.FAILED` for all else."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return HUNG if jax.distributed.is_initialized() and lost_peers(error) else FAILED


def _give_threads(num_devices: int) -> None:
    """Makes XLA's thread pool large enough for virtual devices.

    A device may be in several collectives at once, and each blocks a thread. XLA's default of one
    thread per device deadlocks.
    """
    # XLA reads the pool size from this variable when the CPU is first used.
    if os.environ.get("NPROC", str(8 * _emulated)) == str(8 * _emulated):
        os.environ["NPROC"] = str(8 * num_devices)


def local_cpu_devices(num_devices: int, *, processes: int = 1) -> int:
    """Emulates several devices on the CPU, divided evenly over the processes.

    A number that the user has set (`XLA_FLAGS`, `JAX_NUM_CPU_DEVICES` or the config value) is
    kept. Of several calls, the last decides. Must run before the first use of a device.

    Args:
        num_devices: Total number of devices of all processes.
        processes: Number of processes that share them.

    Returns:
        The CPU devices of this process.

    Raises:
        DistributedError: If the processes do not divide the devices, or JAX already runs with
            another number of devices.
    """
    global _emulated
    pattern = r"--xla_force_host_platform_device_count=(\d+)"
    forced = re.findall(pattern, os.environ.get("XLA_FLAGS", ""))
    chosen = int(forced[-1]) if forced else jax.config.values["jax_num_cpu_devices"]
    if chosen > 0 and chosen != _emulated:
        _give_threads(chosen)
        return chosen
    here, left = divmod(num_devices, processes)
    if left or here < 1:
        raise DistributedError(
            f"{num_devices} CPU devices cannot be divided evenly over {processes} processes.\n"
            f"  Ask for a multiple of {processes} devices (train.cpu_devices in a config)."
        )
    _give_threads(here)
    try:
        jax.config.update("jax_num_cpu_devices", here)
    except RuntimeError:
        running = jax.local_device_count(backend="cpu")
        if running != here:
            raise DistributedError(
                f"{here} CPU devices are requested, but JAX is already running with {running}.\n"
                "  Ask for them before the first use of JAX, or set "
                f"JAX_NUM_CPU_DEVICES={here} before starting Python."
            ) from None
    _emulated = here
    return here


def default_cpu_devices(num_devices: int, *, processes: int = 1) -> int:
    """Emulates CPU devices as `local_cpu_devices` does, unless it was called before."""
    return _emulated or local_cpu_devices(num_devices, processes=processes)


def launch_address(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Returns (coordinator, index, count) as set by `shardlib launch`, or None outside of it.

    Raises:
        DistributedError: If variables are missing or malformed; the message names them all.
    """
    given = {name: environment.get(name, "") for name in LAUNCH_VARIABLES}
    if not any(given.values()):
        return None
    coordinator, index, count = given.values()
    faults = [f"{name} is not set" for name, value in given.items() if not value]
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        faults.append(f"SHARDLIB_COORDINATOR is {coordinator!r}, not host:port")
    faults += [
        f"{name} is {value!r}, not a whole number"
        for name, value in (("SHARDLIB_PROCESS_ID", index), ("SHARDLIB_NUM_PROCESSES", count))
        if value and not value.isdecimal()
    ]
    if not faults and not int(index) < int(count):
        faults.append(f"SHARDLIB_PROCESS_ID is {index}, but SHARDLIB_NUM_PROCESSES is {count}")
    if faults:
        raise DistributedError(
            "the variables of the process group are wrong:\n  "
            + "\n  ".join(faults)
            + "\n  Start processes with `shardlib launch`, or set all three for each of them."
        )
    return coordinator, int(index), int(count)


def in_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several tasks that `srun` started.

    The shell of `salloc` or `sbatch` sets SLURM_NTASKS too, for later steps. Its own step has one
    task, or no node list.
    """
    needed = ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID")
    if not all(environment.get(f"SLURM_{name}") for name in needed):
        return False
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"]
    return int(tasks) > 1


def slurm_local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Returns the visible GPUs that this Slurm task takes, or None for JAX's default.

    JAX gives each task one GPU, numbered by the task's index on its node: with one task per node, a
    run would train on one GPU of eight. Here the tasks of a node share its GPUs evenly. If Slurm
    has bound GPUs to each task, a task takes all that it sees.

    Raises:
        DistributedError: If the tasks of the node do not divide its GPUs.
    """
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if not on_node.isdecimal():
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    seen = len([entry for entry in visible.split(",") if entry]) if visible else int(on_node)
    if seen < int(on_node):
        return list(range(seen))
    tasks = _tasks_on_node(environment)
    if tasks is None:
        return None
    share, left = divmod(seen, tasks)
    if left or not share:
        raise DistributedError(
            f"{tasks} Slurm tasks cannot share the {seen} GPUs of a node evenly.\n"
            f"  Set --ntasks-per-node to 1 or to {seen}."
        )
    first = int(environment["SLURM_LOCALID"]) * share
    return list(range(first, first + share))


def _tasks_on_node(environment: Mapping[str, str]) -> int | None:
    """Returns this node's entry of `SLURM_STEP_TASKS_PER_NODE`, such as `8(x2),4`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(repeats or 1)
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def in_tpu_pod(environment: Mapping[str, str]) -> bool:
    """Whether this host may be one of several in a TPU slice or in several slices.

    On GKE the environment says so. On a TPU VM only the metadata server knows, and JAX asks it: JAX
    sets TPU_SKIP_MDS_QUERY itself on a machine without a TPU.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if (platforms and "tpu" not in platforms) or importlib.util.find_spec("libtpu") is None:
        return False
    if int(environment.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        return True
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if hosts:
        return len(hosts.split(",")) > 1
    return not environment.get("TPU_SKIP_MDS_QUERY")


def _start(**arguments: Any) -> None:
    # JAX's preemption service takes over SIGTERM permanently: SIGTERM would then not end the
    # process, and a Python handler would disable the service. StopRequest replaces it.
    jax.config.update("jax_enable_preemption_service", False)
    before = thread_ids()
    try:
        jax.distributed.initialize(**arguments)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DistributedError(
            f"the process group could not start: {reason}\n"
            "  Start all processes at about the same time with one coordinator address, and join "
            "before the first use of JAX's devices."
        ) from error
    end_when_coordination_fails(thread_ids() - before, process_index())
    # Runs before JAX's own shutdown, which differs only in the exit code.
    atexit.register(shutdown)


def _joined(group: ProcessGroup) -> ProcessGroup:
    if group.count > 1:
        sys.excepthook = _end_at_once
    return group


def _end_at_once(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    sys.__excepthook__(kind, error, traceback)
    code = exit_code(error)
    if code == HUNG:
        lost = f"process {process_index()} has lost other processes of its group"
        print(f"{lost}: ending with exit code {HUNG}.", file=sys.stderr)
    exit_process(code)


def must_block() -> bool:
    """Whether each step must finish before the next is dispatched.

    Fake devices of several CPU processes deadlock when many collective steps are in flight.
    """
    return jax.process_count() > 1 and jax.default_backend() == "cpu"
