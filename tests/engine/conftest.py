"""A decoder to serve, and products in full precision."""

import jax
import pytest
from small_decoder import made


@pytest.fixture(scope="session")
def served():
    return made()


@pytest.fixture(autouse=True)
def highest():
    with jax.default_matmul_precision("highest"):
        yield
