"""Eight fake CPU devices, warnings as errors, strict dtype and rank promotion."""

import collections
import gc
import os
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Threads for devices that stand in several collectives at once: see distributed.local_cpu_devices.
os.environ.setdefault("NPROC", "64")
# Compiling is most of what tests do on a CPU; this halves it and changes no collective.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        # Later XLA does not know the second one, and without optimization it rounds a value in
        # another way where it is cut in another way.
        # LLVM starts anew for each piece into which a program is split.
        "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
        " --xla_cpu_parallel_codegen_split_count=1"
        if version("jax").startswith("0.10.")
        else "--xla_backend_optimization_level=1",
    ]
).strip()

# Compiling for TPUs, none of which is there: optimizing would take five times as long, and libtpu
# wants to know of a machine, whichever it is.
os.environ.setdefault("JAX_OPTIMIZATION_LEVEL", "O0")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# Tests start Python many times, each time with all of the library: it is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Processes of pytest-xdist have 80 columns, others none: reports are as wide as in a pipe.
os.environ.pop("COLUMNS", None)

import jax
import pytest
from ids import faulty_ids
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from shardlib.nn.attention.page_kernel import has_page_kernel

ON_GPU = "cuda" in os.environ["JAX_PLATFORMS"]
TIERS = ("mesh", "process", "aot", "docs", "soak", "gpu")
SLOWEST_SECONDS = float(os.environ.get("SLOWEST_TEST_SECONDS", "inf"))

gc.disable()  # Until the tests are imported, which makes many objects that all stay.
sys.dont_write_bytecode = False
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# Linux gives a process no more mappings than twice these (vm.max_map_count), and XLA crashes where
# it gets none; each compiled program has ten and more.
_MAX_MEMORY_MAPS = 65_530 // 2
_SECONDS_BETWEEN_COUNTS = 10
_counted_at = time.monotonic()

_WHOLE_FILE = re.compile(
    rf"^pytestmark = (?:\[\n    )?pytest\.mark\.({'|'.join(TIERS)}),?$", re.MULTILINE
)


def pytest_ignore_collect(collection_path, config):
    """Leaves out files that belong as a whole to one tier that is not asked for: their imports
    take seconds. A file that the command names is collected."""
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    if collection_path.suffix != ".py" or collection_path in named:
        return None
    tier = _WHOLE_FILE.search(collection_path.read_text(encoding="utf-8"))
    return True if tier and f"not {tier[1]}" in config.getoption("-m") else None


def pytest_collection_finish():
    """Takes what imports made, and tests keep, out of garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown():
    """Drops compiled programs before there are too many of them for one process."""
    global _counted_at
    maps = Path("/proc/self/maps")
    if time.monotonic() - _counted_at < _SECONDS_BETWEEN_COUNTS or not maps.exists():
        return
    _counted_at = time.monotonic()
    if maps.read_bytes().count(b"\n") > _MAX_MEMORY_MAPS:
        jax.clear_caches()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Puts tests into tiers; runs `gpu` tests only on a GPU and `soak` tests only when asked for;
    refuses ids that two processes may not agree on."""
    mark_rest(items)
    if faults := faulty_ids(item.nodeid for item in items):
        lines = "\n  ".join(faults)
        raise pytest.UsageError(
            f"{len(faults)} test ids are not short printable text that is always the same:\n  "
            f"{lines}\n  Name these cases: pytest.param(..., id='cut short'), or ids=[...]."
        )
    asked = config.getoption("-m")
    for item in items:
        if item.get_closest_marker("gpu") and not ON_GPU:
            item.add_marker(
                pytest.mark.skip(reason="needs JAX_PLATFORMS=cuda,cpu and an NVIDIA GPU")
            )
        if item.get_closest_marker("soak") and "soak" not in asked:
            item.add_marker(pytest.mark.skip(reason="runs with -m soak"))


def mark_rest(items):
    """Puts cases of a test into a tier, but for the first `keep`: `@pytest.mark.rest("mesh")`."""
    cases = collections.Counter()
    for item in items:
        if rest := item.get_closest_marker("rest"):
            name = item.nodeid.partition("[")[0]
            if cases[name] >= rest.kwargs.get("keep", 1):
                item.add_marker(getattr(pytest.mark, rest.args[0]))
            cases[name] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Fails a test without a tier that takes too long, where a limit is set."""
    report = yield
    is_slow = report.when == "call" and call.duration > SLOWEST_SECONDS
    if is_slow and report.passed and not any(item.get_closest_marker(tier) for tier in TIERS):
        report.outcome = "failed"
        report.longrepr = (
            f"It took {call.duration:.1f} s; a test without a tier may take {SLOWEST_SECONDS:g} s."
            f"\n  Make it smaller, or mark it: {', '.join(TIERS)}."
        )
    return report


@pytest.fixture(scope="module", autouse=True)
def no_cache_stays_on():
    """A run turns on JAX's cache of compiled programs, which later files would read and write."""
    yield
    if jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@pytest.fixture(scope="session", autouse=True)
def page_kernel():
    """Compiles the kernel of a CPU once for all processes, and in no test."""
    has_page_kernel()


@pytest.fixture(scope="session")
def tpu_devices():
    """`tpu_devices("v5e:2x2")` returns devices to compile for ahead of time."""
    pytest.importorskip("libtpu", reason="needs the extra tpu")

    def devices(topology):
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices

    return devices


@pytest.fixture
def shardlib(capfd):
    """Runs the command line in this process; returns its exit code, stdout and stderr."""
    from shardlib import cli

    def run(*words):
        with pytest.raises(SystemExit) as exited:
            cli.main(list(map(str, words)))
        out, err = capfd.readouterr()
        return exited.value.code, out, err

    return run
