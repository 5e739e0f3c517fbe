"""Parallel work on rows in daemon threads, so that a hung read cannot keep the process alive."""

import queue
import threading
from collections.abc import Callable


def in_threads(work: Callable[[int], None], count: int, *, threads: int) -> None:
    """Calls `work` on each index of `range(count)` in parallel, and waits for all calls.

    The threads are daemons. Python joins the threads of `concurrent.futures` at exit, but a thread
    that waits for a dead file system must not keep the process alive.

    Args:
        work: The function to call.
        count: Number of calls.
        threads: Maximum parallel calls; 1 runs in the caller's thread.

    Raises:
        BaseException: The error of `work` with the lowest index. Calls that have not started by
            then are skipped.
    """
    if threads == 1 or count <= 1:
        for index in range(count):
            work(index)
        return
    indices: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(count):
        indices.put(index)
    errors: dict[int, BaseException] = {}

    def run() -> None:
        while not errors:
            try:
                index = indices.get_nowait()
            except queue.Empty:
                return
            try:
                work(index)
            except BaseException as error:  # The caller must see every error.
                errors[index] = error

    started = [
        threading.Thread(target=run, name="shardlib-read", daemon=True)
        for _ in range(min(threads, count))
    ]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[min(errors)]
