"""A disk without room, and the programs compiled so far."""

import contextlib
import resource
import signal

import jax
import pytest


@pytest.fixture
def small_files():
    """`with small_files as limit: limit(n)` lets files grow to n bytes, as on a disk with no more
    room. Its end comes before pytest reports a test, which may be into a file."""

    @contextlib.contextmanager
    def limited():
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)

    return limited()


@pytest.fixture
def compilations(caplog):
    """The messages on training steps and other programs compiled so far."""
    caplog.set_level("WARNING", "jax")
    with jax.log_compiles():
        yield lambda: [r.message for r in caplog.records if "Finished XLA comp" in r.message]
