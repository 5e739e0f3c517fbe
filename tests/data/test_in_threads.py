"""Work in threads: all of it, its first error, and no thread left."""

import threading

import pytest

from shardlib.data.loader import in_threads


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "shardlib-read"]


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_every_index_once(threads, count):
    done = []
    in_threads(done.append, count, threads=threads)
    assert sorted(done) == list(range(count))
    assert readers() == []


def test_as_many_at_a_time_as_asked_for():
    meeting = threading.Barrier(4, timeout=10)
    in_threads(lambda index: meeting.wait(), 8, threads=4)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_error_of_the_first_index_that_fails(threads):
    # Both of the first two fail, in whichever order they are done.
    meeting = threading.Barrier(2, timeout=10)

    def work(index):
        if index < 2 and threads > 1:
            meeting.wait()
        raise ValueError(f"{index} fails")

    with pytest.raises(ValueError, match=r"^0 fails$"):
        in_threads(work, 100, threads=threads)
    assert readers() == []
