"""A disk without room."""

import resource
import signal

import pytest


@pytest.fixture
def small_files():
    """Files may grow to a number of bytes, as on a disk with no more room: `limit(n)`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)
