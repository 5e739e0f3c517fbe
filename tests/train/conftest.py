"""A disk without room, and the programs compiled so far."""

import resource
import signal

import jax
import pytest


@pytest.fixture
def small_files():
    """Files may grow to a number of bytes, as on a disk with no more room: `limit(n)`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def compilations(caplog):
    """The messages on training steps and other programs compiled so far."""
    caplog.set_level("WARNING", "jax")
    with jax.log_compiles():
        yield lambda: [r.message for r in caplog.records if "Finished XLA comp" in r.message]
