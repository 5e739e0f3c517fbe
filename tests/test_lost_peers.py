import signal
import subprocess
import sys
import textwrap

import jax
import pytest

from shardlib.errors import CheckpointError, DistributedError, PeerLostError
from shardlib.runtime.exit_codes import FAILED, HUNG
from shardlib.runtime.launch.local import group_variables
from shardlib.runtime.peers import lost_peers

GLOO = (
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection "
    "closed by peer [127.0.0.1]:15234"
)
UNHEALTHY = "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1\n"


@pytest.mark.parametrize(
    "error",
    [
        ValueError(GLOO),
        jax.errors.JaxRuntimeError(UNHEALTHY),
        jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out."),
        RuntimeError("NCCL failed: remote process exited or there was a network error"),
        PeerLostError("process 1 does not answer"),
    ],
)
def test_peers_that_have_gone(error):
    assert lost_peers(error)
    outer = CheckpointError("step 3 cannot be saved")
    outer.__cause__ = error
    assert lost_peers(outer)
    on_the_way_out = KeyError("x")
    on_the_way_out.__context__ = outer
    assert lost_peers(on_the_way_out)


@pytest.mark.parametrize(
    "error",
    [
        # As storage may say it too.
        ValueError("UNAVAILABLE: Error writing 'gs://bucket/x'"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        DistributedError("8 CPU devices cannot be divided evenly over 3 processes."),
        KeyError(GLOO),
        ValueError("nothing of the kind"),
    ],
)
def test_other_failures(error):
    assert not lost_peers(error)


def in_group_of_one(code, before=""):
    """A group all the same, with JAX's coordination service."""
    text = textwrap.dedent(before) + "import os\nfrom shardlib.runtime import distributed\n"
    text += "group = distributed.initialize()\n" + textwrap.dedent(code)
    (variables,) = group_variables({}, 1)
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False,
        env=variables | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def test_an_abort_of_its_own_stays_an_abort():
    ended = in_group_of_one("os.abort()", "import faulthandler\nfaulthandler.enable()\n")
    assert ended.returncode == -signal.SIGABRT
    # The handler that was there before has its turn.
    assert ended.stderr.startswith("Fatal Python error: Aborted\n\nCurrent thread ")
    assert in_group_of_one("os.abort()").returncode == -signal.SIGABRT


def test_codes_of_errors():
    ended = in_group_of_one("""
        import jax
        lost = jax.errors.JaxRuntimeError("UNAVAILABLE: gone")
        print(*(distributed.exit_code(error) for error in (
            lost, distributed.PeerLostError("gone"), ValueError(), KeyboardInterrupt())))
        distributed.shutdown()
        print(distributed.exit_code(lost))
    """)
    assert ended.stdout == f"{HUNG} {HUNG} {FAILED} 130\n{FAILED}\n"
    assert ended.stderr == ""
