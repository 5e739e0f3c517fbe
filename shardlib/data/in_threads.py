"""Work on many rows in threads that a read without end cannot turn into a process without end."""

import queue
import threading
from collections.abc import Callable


def in_threads(work: Callable[[int], None], count: int, *, threads: int) -> None:
    """Calls `work` for each of `range(count)`, several at a time, and waits for all of them.

    The threads are daemons, unlike those of `concurrent.futures`, which Python joins at its exit:
    one that waits for a dead file system must not keep the process.

    Args:
        work: What is to be done.
        count: How often.
        threads: How many at a time; 1 works in the thread of the caller.

    Raises:
        BaseException: What `work` raised, for the first index that it failed for. Indices that
            were not begun by then are left out.
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
            except BaseException as error:  # Whatever it is, the caller must hear of it.
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
