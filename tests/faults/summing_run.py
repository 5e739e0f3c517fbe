"""One process of a run that sums over all devices, step by step, and is easily made to fail.

Arguments: directory for stacks, heartbeat in seconds, limit of a step in seconds, and what SIGUSR2
makes of the process: `deadlock` (in Python), `lock` (holds the interpreter's lock), or `linger`
(stays when its loop is over).
"""

import ctypes
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp

from shardlib.runtime import distributed
from shardlib.runtime.phases import PhaseClock
from shardlib.runtime.watchdog import Watchdog, WatchdogConfig


def main(directory, heartbeat, limit, fault):
    clock = PhaseClock()
    faulty = threading.Event()
    signal.signal(signal.SIGUSR2, lambda *_: faulty.set())
    group = distributed.initialize(heartbeat_timeout_seconds=int(heartbeat))
    limits = WatchdogConfig(step=None if limit == "none" else float(limit))
    with Watchdog(clock, limits, directory), distributed.StopRequest(poll_seconds=0.05) as stop:
        mesh = jax.make_mesh((group.count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.NamedSharding(mesh, jax.P("data"))
        mean = jax.jit(lambda x: x + jnp.mean(x), out_shardings=sharding)
        x = jax.device_put(jnp.ones((group.count,)), sharding)
        clock.enter("step")
        for step in range(100_000):
            x = jax.block_until_ready(mean(x))
            clock.progress()
            if step == 3:
                sys.stdout.write(f"pid {os.getpid()}\n")
            if faulty.is_set() and fault != "linger":
                fail(fault)
            if stop.agreed(step):
                break
            time.sleep(0.01)
        sys.stdout.write(f"stopped after step {step} by {stop.reason}\n")
    if faulty.is_set():
        fail(fault)
    distributed.shutdown()


def fail(fault):
    sys.stdout.write("faulty\n")
    if fault == "lock":
        ctypes.PyDLL(None).sleep(300)
    lock = threading.Lock()
    with lock:
        lock.acquire()


if __name__ == "__main__":
    main(*sys.argv[1:])
