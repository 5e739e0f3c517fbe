"""The mesh of most tests of the partitioner."""

import pytest

import shardlib as sl


@pytest.fixture(scope="session")
def mesh():
    return sl.make_mesh("data=2,fsdp=2,tensor=2")
