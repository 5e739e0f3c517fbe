"""The flags by which GPUs compute the same bits each time."""

import os
import subprocess
import sys

import jax
import pytest

from shardlib.errors import ConfigError
from shardlib.run import devices
from shardlib.run.devices import deterministic_flags, make_deterministic

BOTH = "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_autotune_level=0"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", BOTH),
        ("--xla_dump_to=/tmp/x", f"--xla_dump_to=/tmp/x {BOTH}"),
        (BOTH, BOTH),
        (
            "--xla_gpu_exclude_nondeterministic_ops",
            "--xla_gpu_exclude_nondeterministic_ops --xla_gpu_autotune_level=0",
        ),
        (
            "--xla_gpu_autotune_level=4 --xla_gpu_autotune_level=0",
            "--xla_gpu_autotune_level=4 --xla_gpu_autotune_level=0 "
            "--xla_gpu_exclude_nondeterministic_ops=true",
        ),
    ],
)
def test_flags_are_added_to_those_of_the_user(given, expected):
    assert deterministic_flags(given) == expected
    assert deterministic_flags(expected) == expected


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (
            "--xla_gpu_exclude_nondeterministic_ops=0 --xla_gpu_autotune_level=4",
            r"nondeterministic_ops=0, .*; --xla_gpu_autotune_level=4, .*\n  Remove it from",
        ),
        ("/etc/flags.txt", r"name a file, /etc/flags.txt, .*\n  Write the flags into XLA_FLAGS"),
    ],
    ids=["other values", "a file"],
)
def test_flags_that_say_otherwise_are_refused(flags, fault):
    with pytest.raises(ConfigError, match=fault):
        deterministic_flags(flags)


def python(program, **environment):
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.mesh
def test_this_jax_knows_the_flags_and_starts_with_them():
    done = python(
        "from shardlib.run.devices import make_deterministic\n"
        "import jax, os\n"
        "print(make_deterministic())\n"
        "print(make_deterministic())\n"
        "jax.config.update('jax_platforms', 'cpu')\n"
        "print(os.environ['XLA_FLAGS'], jax.devices()[0].platform)\n"
    )
    assert done.returncode == 0, done.stderr
    said = f"XLA_FLAGS are {BOTH}"
    assert done.stdout.splitlines() == [said, said, f"{BOTH} cpu"]


def test_a_cpu_needs_nothing(monkeypatch):
    jax.devices()
    flags = os.environ.get("XLA_FLAGS")
    assert make_deterministic() == "cpu needs nothing more for it"
    # Where nobody says which platform it is, and JAX already runs: it is asked.
    monkeypatch.setitem(jax.config.values, "jax_platforms", None)
    assert make_deterministic() == "cpu needs nothing more for it"
    assert os.environ.get("XLA_FLAGS") == flags


def test_it_is_known_whether_jax_runs():
    before = jax.config.values["jax_num_cpu_devices"]
    asked = "from shardlib.run import devices; import jax; print(devices._is_running())"
    assert python(asked, JAX_PLATFORMS="cpu").stdout == "False\n"
    jax.devices()
    assert devices._is_running()
    assert jax.config.values["jax_num_cpu_devices"] == before
