"""Real processes on loopback; each start of two costs a few seconds, so scenes share them."""

import io
import os
import subprocess
import sys
import textwrap
import time

import pytest

from shardlib.errors import DistributedError
from shardlib.runtime import distributed
from shardlib.runtime.distributed import (
    in_slurm_step,
    in_tpu_pod,
    launch_address,
    local_cpu_devices,
    slurm_local_devices,
)
from shardlib.runtime.launch import run_local

PRELUDE = """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
from shardlib.runtime import distributed
group = distributed.initialize(heartbeat_timeout_seconds=20)

def say(*words):
    # In one write: gloo prints on its own from other threads.
    sys.stdout.write("".join(f">> {line}\\n" for line in " ".join(map(str, words)).splitlines()))
"""


def said(text, index):
    """The lines that one process said."""
    lines = (line for line in text.splitlines() if line.startswith(f"[{index}]"))
    return [line.partition(">> ")[2] for line in lines if ">> " in line]


def clean_environment(**variables):
    names = ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"JAX_PLATFORMS": "cpu"} | variables


def launch(code, processes=2, **variables):
    output = io.StringIO()
    exit_code = run_local(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        processes,
        environment=clean_environment(**variables),
        output=output,
    )
    return exit_code, output.getvalue()


def run_alone(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=clean_environment(**variables), text=True, capture_output=True, check=False,
    )  # fmt: skip


# Groups of processes


@pytest.mark.process
def test_two_processes_compute_together():
    code, text = launch("""
        # No backend is up yet: the number of devices can still be chosen.
        assert distributed.local_cpu_devices(4, processes=group.count) == 2
        say(group.index, group.count, group.is_primary, group.started_by)
        assert (jax.process_index(), jax.process_count()) == (group.index, group.count)
        assert distributed.process_group().index == group.index
        assert (jax.local_device_count(), jax.device_count()) == (2, 4)
        from shardlib.mesh import draw, make_mesh
        mesh = make_mesh("data=2x1,fsdp=2")
        if group.is_primary:
            say(draw(mesh))
        sharding = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
        x = jax.make_array_from_callback((8,), sharding, lambda i: np.arange(8.0)[i])
        say("sum", float(jax.jit(jnp.sum)(x)))
        distributed.barrier("here")
        distributed.barrier("here", timeout_seconds=None)
        if group.index == 0:
            try:
                distributed.barrier("never", timeout_seconds=0.5)
            except distributed.PeerLostError as error:
                say(error)
        distributed.shutdown()
    """)
    assert code == 0, text
    assert said(text, 1) == ["1 2 False launch", "sum 28.0"]
    own = said(text, 0)
    assert own[:-2] == [
        "0 2 True launch",
        "data=2,fsdp=2 over 4 cpu devices on 2 processes",
        "  data\\fsdp       0       1",
        "          0     0:0     0:1",
        "          1  1:2048  1:2049",
        "  cells: process:device",
        "sum 28.0",
    ]
    assert own[-2].startswith("not all processes reached the barrier 'never' within 0.5 s: ")
    assert own[-1] == (
        "  Look at the output of the processes named: one has failed or is still busy."
    )


@pytest.mark.process
def test_all_stop_after_the_same_step_whoever_is_asked():
    code, text = launch("""
        distributed.local_cpu_devices(2, processes=2)
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.NamedSharding(mesh, jax.P("data"))
        total = jax.jit(lambda x: x + jnp.sum(x), out_shardings=sharding)
        x = jax.device_put(jnp.zeros((2,)), sharding)

        def run(scene, steps, at, number, process):
            global x
            y = x
            with distributed.StopRequest(poll_seconds=0.05) as stop:
                for step in range(steps):
                    y = jax.block_until_ready(total(y))
                    time.sleep(0.01)
                    if step == at and group.index == process:
                        os.kill(os.getpid(), number)
                    if stop.agreed(step):
                        break
                say(f"{scene}:", step, stop.requested, stop.reason)

        run("interrupted", 1000, 5, signal.SIGINT, 0)
        run("terminated", 1000, 7, signal.SIGTERM, 1)
        # Both run to their last step, after which only one of them is asked.
        run("too late", 4, 3, signal.SIGTERM, 1)
        run("never", 3, -1, signal.SIGTERM, 1)
        # In host-only loops one process may be far ahead of the other.
        with distributed.StopRequest(poll_seconds=0.05) as stop:
            for step in range(100000):
                time.sleep(0.001 if group.index else 0.005)
                if step == 20 and group.index == 0:
                    stop.request()
                if stop.agreed(step):
                    break
            say("ahead:", step)
    """)
    assert code == 0, text
    first, second = (
        {line.partition(": ")[0]: line.partition(": ")[2] for line in said(text, index)}
        for index in (0, 1)
    )
    for scene, at in (("interrupted", 5), ("terminated", 7)):
        (step, asked, why), (other, other_asked, other_why) = (
            said_by[scene].split(maxsplit=2) for said_by in (first, second)
        )
        assert step == other
        assert at < int(step) < at + 200
        assert (asked, other_asked) == ("True", "True")
        assert (why, other_why) == (
            ("SIGINT", "SIGINT (process 0)") if at == 5 else ("SIGTERM (process 1)", "SIGTERM")
        )
    assert second["too late"].split()[0] == first["too late"].split()[0] == "3"
    assert first["never"] == second["never"] == "2 False None"
    assert first["ahead"] == second["ahead"]
    assert int(first["ahead"]) > 20
    assert "SIGINT: stopping after this step; Ctrl-C again ends at once." in text
    assert "SIGTERM: stopping after this step." in text


@pytest.mark.process
def test_a_process_that_fails_does_not_wait_for_the_others():
    start = time.monotonic()
    code, text = launch("""
        if group.index == 1:
            raise ValueError("broken here")
        distributed.barrier("the other never comes")
    """)
    assert code == 1
    assert "[1] ValueError: broken here" in text
    assert "[launch] process 1 ended with exit code 1; ending the other 1" in text
    # The normal end would wait for the barrier's 600 s.
    assert time.monotonic() - start < 30


def test_a_single_process_joins_nothing():
    result = run_alone("""
        import sys
        from shardlib.runtime import distributed
        group = distributed.initialize()
        assert group == distributed.ProcessGroup(0, 1, "single")
        assert group.is_primary
        distributed.barrier("alone")
        assert distributed.local_cpu_devices(3) == 3
        import jax
        assert jax.device_count() == 3
        assert distributed.local_cpu_devices(3) == 3
        distributed.shutdown()
        distributed.exit_process(5)
    """)
    assert (result.returncode, result.stderr) == (5, "")


@pytest.mark.process
def test_a_group_cannot_start_after_the_devices():
    result = run_alone(
        """
        import jax
        jax.devices()
        from shardlib.runtime import distributed
        distributed.initialize()
        """,
        SHARDLIB_COORDINATOR="127.0.0.1:1", SHARDLIB_PROCESS_ID="0", SHARDLIB_NUM_PROCESSES="2",
    )  # fmt: skip
    assert "DistributedError: the process group could not start: jax.distributed" in result.stderr
    assert "join before the first use of JAX's devices" in result.stderr


# CPU devices


@pytest.mark.process
@pytest.mark.parametrize(
    "variables", [{"JAX_NUM_CPU_DEVICES": "3"},
                  {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}]
)  # fmt: skip
def test_the_users_own_number_of_cpu_devices_is_kept(variables):
    result = run_alone(
        """
        from shardlib.runtime.distributed import local_cpu_devices
        print(local_cpu_devices(8))
        import jax
        print(jax.device_count())
        """,
        **variables,
    )
    assert (result.stdout, result.stderr) == ("3\n3\n", "")


@pytest.mark.process
def test_the_last_number_of_cpu_devices_counts_until_they_are_used():
    result = run_alone("""
        import os
        os.environ.pop("NPROC", None)
        from shardlib.runtime import distributed
        from shardlib.runtime.distributed import DistributedError, local_cpu_devices
        print(local_cpu_devices(8), local_cpu_devices(3), os.environ["NPROC"])
        assert distributed.default_cpu_devices(8) == 3  # That of a config.
        import jax
        print(jax.device_count(), local_cpu_devices(3))
        try:
            local_cpu_devices(8)
        except DistributedError as error:
            print(str(error).splitlines()[0])
    """)
    assert result.stdout.splitlines() == [
        "8 3 24",
        "3 3",
        "8 CPU devices are requested, but JAX is already running with 3.",
    ], result.stderr


@pytest.mark.process
def test_cpu_devices_that_cannot_be_had():
    result = run_alone("""
        import jax
        from shardlib.runtime.distributed import DistributedError, local_cpu_devices
        for wanted, processes in ((8, 3), (1, 1), (8, 2)):
            try:
                print(local_cpu_devices(wanted, processes=processes))
            except DistributedError as error:
                print(str(error).splitlines()[0])
            if wanted == 8:
                jax.config.update("jax_num_cpu_devices", -1) if processes == 3 else None
                jax.devices()
    """)
    assert result.stdout.splitlines() == [
        "8 CPU devices cannot be divided evenly over 3 processes.",
        "1",
        "4 CPU devices are requested, but JAX is already running with 1.",
    ], result.stderr


# Detection


def test_the_launchers_variables():
    names = ("SHARDLIB_COORDINATOR", "SHARDLIB_PROCESS_ID", "SHARDLIB_NUM_PROCESSES")
    full = dict(zip(names, ("10.0.0.1:1234", "1", "2"), strict=True))
    assert launch_address(full) == ("10.0.0.1:1234", 1, 2)
    assert launch_address({}) is None
    tail = r"\n  Start processes with `shardlib launch`, or set all three for each of them\."
    for faulty, fault in [
        ({names[0]: "10.0.0.1"}, rf"{names[1]} is not set\n  {names[2]} is not set\n  .*host:port"),
        (full | {names[1]: "2"}, "SHARDLIB_PROCESS_ID is 2, but SHARDLIB_NUM_PROCESSES is 2"),
        (full | {names[1]: "one"}, "SHARDLIB_PROCESS_ID is 'one', not a whole number"),
    ]:
        with pytest.raises(DistributedError, match=f"variables of.* wrong:\n  {fault}{tail}"):
            launch_address(faulty)


SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1", "SLURM_GPUS_ON_NODE": "8",
}  # fmt: skip


def test_slurm_steps():
    assert in_slurm_step(SLURM)
    assert in_slurm_step({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NUM_TASKS"})
    # The shell of salloc, the script of sbatch, and one task.
    assert not in_slurm_step(SLURM | {"SLURM_STEP_NUM_TASKS": "1"})
    assert not in_slurm_step({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"})
    assert not in_slurm_step(SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"})
    assert not in_slurm_step({})


def test_slurm_tasks_share_the_gpus_of_their_node():
    assert slurm_local_devices(SLURM) == list(range(8))
    four = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "3"}
    assert slurm_local_devices(four) == [6, 7]
    # Bound by --gpus-per-task: each task sees its own, numbered from 0.
    assert slurm_local_devices(four | {"CUDA_VISIBLE_DEVICES": "6,7"}) == [0, 1]
    uneven = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8,2", "SLURM_LOCALID": "1"}
    assert slurm_local_devices(uneven) == [4, 5, 6, 7]
    assert slurm_local_devices({k: v for k, v in SLURM.items() if "GPUS" not in k}) is None
    with pytest.raises(DistributedError, match=r"3 Slurm tasks cannot.*\n  Set --ntasks-per-node"):
        slurm_local_devices(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)"})


def test_tpu_pods(monkeypatch):
    assert not in_tpu_pod({"JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "a,b"})
    if distributed.importlib.util.find_spec("libtpu") is None:
        assert not in_tpu_pod({"TPU_WORKER_HOSTNAMES": "a,b"})
    found = distributed.importlib.util.find_spec("json")
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: found)
    assert in_tpu_pod({"TPU_WORKER_HOSTNAMES": "a,b"})
    assert in_tpu_pod({"TPU_PROCESS_ADDRESSES": "a:1,b:1", "JAX_PLATFORMS": "tpu,cpu"})
    assert in_tpu_pod({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "2"})
    assert in_tpu_pod({})
    assert not in_tpu_pod({"TPU_WORKER_HOSTNAMES": "localhost"})
    assert not in_tpu_pod({"TPU_SKIP_MDS_QUERY": "1"})


def test_virtual_devices_get_threads(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    assert local_cpu_devices(8) == 8
    assert os.environ["NPROC"] == "64"
    monkeypatch.setenv("NPROC", "9")
    local_cpu_devices(8)
    assert os.environ["NPROC"] == "9"
