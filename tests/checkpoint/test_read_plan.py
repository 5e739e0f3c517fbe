"""What a restore reads, worked out without reading."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.checkpoint.read_plan import HostReads, plan_reads
from shardlib.errors import MeshError


def target(shape, spec, dtype=jnp.float32, **sizes):
    types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def reads(struct, chunk, num_hosts, max_buffer_bytes=10**9):
    return plan_reads(
        {"x": struct}, {"x": chunk}, num_hosts=num_hosts, read_bound=lambda _: max_buffer_bytes
    )


def test_each_host_reads_its_own_shards_and_what_is_replicated_once():
    x = target((8, 4), P("fsdp"), data=2, fsdp=4)
    # `data` is outermost: each of two hosts holds every shard, each of four half of them.
    assert reads(x, (2, 4), 2) == [HostReads(128, 128, 128)] * 2
    assert reads(x, (2, 4), 4) == [HostReads(64, 64, 64)] * 4
    replicated = target((8, 4), P(), data=2, fsdp=4)
    assert reads(replicated, (2, 4), 2) == [HostReads(128, 4 * 128, 128)] * 2


def test_storage_gives_whole_chunks():
    x = target((8, 6), P("fsdp", "tensor"), jnp.bfloat16, fsdp=4, tensor=2)
    # A shard is 2 x 3 elements, a chunk 4 x 6: each of the eight shards takes a whole chunk.
    assert reads(x, (4, 6), 1) == [HostReads(8 * 24 * 2, 8 * 6 * 2, 8 * 24 * 2)]
    # Chunks of 3 rows: rows [2, 4) and [4, 6) touch two of them.
    assert reads(x, (3, 3), 8)[2].read_bytes == 2 * 9 * 2
    assert reads(x, (3, 3), 8)[0].read_bytes == 9 * 2


def test_shards_over_two_axes_of_one_dim():
    x = target((8,), P(("tensor", "fsdp")), fsdp=4, tensor=2)
    # The first host has fsdp 0 and 1: shards 0, 4, 1 and 5 of eight.
    assert reads(x, (2,), 2) == [HostReads(4 * 8, 4 * 4, 4 * 8)] * 2


def test_what_is_in_flight_is_bounded_by_the_reader_or_one_shard():
    x = target((8, 4), P("fsdp"), fsdp=4)
    assert reads(x, (2, 4), 1, max_buffer_bytes=100)[0].buffer_bytes == 100
    assert reads(x, (2, 4), 1, max_buffer_bytes=10)[0].buffer_bytes == 2 * 4 * 4


def test_hosts_that_do_not_divide_the_devices():
    with pytest.raises(
        MeshError, match=r"(?s)3 hosts cannot share the devices.*Name a number of hosts"
    ):
        reads(target((8,), P("fsdp"), fsdp=4), (2,), 3)
    assert plan_reads({}, {}, num_hosts=2, read_bound=lambda held: held) == [HostReads(0, 0, 0)] * 2
