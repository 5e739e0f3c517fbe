"""Eight fake CPU devices, warnings as errors, strict dtype and rank promotion."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Threads for devices that stand in several collectives at once: see distributed.local_cpu_devices.
os.environ.setdefault("NPROC", "64")
# Compiling is most of what tests do on a CPU; this halves it and changes no collective.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
)

import jax
import pytest

ON_GPU = "cuda" in os.environ["JAX_PLATFORMS"]

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(config, items):
    """Runs `gpu` tests only where a GPU is at hand, and `soak` tests only when asked for."""
    asked = config.getoption("-m")
    for item in items:
        if "gpu" in item.keywords and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs JAX_PLATFORMS=cuda and an NVIDIA GPU"))
        if "soak" in item.keywords and "soak" not in asked:
            item.add_marker(pytest.mark.skip(reason="runs with -m soak"))
