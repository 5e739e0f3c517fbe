"""Fingerprints: of the bits alone, whatever the sharding; any changed element changes them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.checkpoint import fingerprint
from shardlib.checkpoint.fingerprint import compile_ahead, dispatch, of_host
from shardlib.checkpoint.tree import STORABLE

WIDE = ("int64", "uint64", "float64", "complex128")


def fingerprints(leaves):
    return dispatch(leaves).result()


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def random_array(name, shape, seed=0):
    """An array of random bits, NaNs of every kind among them."""
    generator, dtype = np.random.default_rng(seed), dtype_of(name)
    if name == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if name == "int4":
        return generator.integers(-8, 8, shape).astype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(generator.bytes(size), dtype).reshape(shape).copy()


def mesh_of(*sizes, axis_type=AxisType.Auto):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, ("a", "b"), axis_types=(axis_type,) * 2)


def reference(array):
    """The definition, in integers of any size, element by element."""
    size = max(array.dtype.itemsize, 1)
    planes = [0] * max(1, size // 4)
    if array.dtype == dtype_of("int4"):
        array = array.astype(np.int8)
    for position, element in enumerate(array.reshape(-1)):
        raw = np.asarray(element).tobytes()
        for plane in range(len(planes)):
            word = int.from_bytes(raw[4 * plane : 4 * plane + 4], "little")
            mixed = word ^ (position * 0x9E3779B9 & 0xFFFFFFFF)
            for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
                mixed = (mixed ^ (mixed >> shift)) * factor & 0xFFFFFFFF
            planes[plane] = (planes[plane] + mixed) & 0xFFFFFFFF
    return "".join(f"{plane:08x}" for plane in planes)


@pytest.mark.parametrize("name", STORABLE)
def test_every_dtype_on_host_and_devices(name):
    array = random_array(name, (6, 5))
    expected = reference(array)
    assert of_host(array) == expected
    assert of_host(np.asfortranarray(array)) == expected
    with jax.enable_x64(name in WIDE):
        assert fingerprints({"x": jnp.asarray(array)}) == {"x": expected}


@pytest.mark.mesh
@given(
    st.sampled_from([name for name in STORABLE if name not in WIDE]),
    st.sampled_from([(8,), (16, 3), (8, 8), (2, 4, 8)]),
    st.sampled_from(["a", "b", "ab", None]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=25, deadline=None)
def test_sharding_changes_nothing(name, shape, axes, seed):
    array = random_array(name, shape, seed)
    spec = PartitionSpec(*[None] * (len(shape) - 1), tuple(axes) if axes else None)
    if len(shape) > 1 and shape[-1] % 8:
        spec = PartitionSpec(tuple(axes) if axes else None)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(2, 4, axis_type=axis_type)
        sharded = jax.device_put(array, NamedSharding(mesh, spec))
        assert fingerprints({"x": sharded}) == {"x": of_host(array)}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few words, as large arrays have many of them."""
    monkeypatch.setattr(fingerprint, "_CPU_BLOCK", 24)
    fingerprint._compiled.cache_clear()
    yield
    fingerprint._compiled.cache_clear()


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("name", STORABLE)
def test_blocks_change_nothing(name, small_blocks):
    for shape, spec in (((1000,), "a"), ((14, 5, 8), (None, None, "b")), ((40, 64), ("b", "a"))):
        array = random_array(name, shape)
        sharding = NamedSharding(mesh_of(2, 4), PartitionSpec(*spec))
        with jax.enable_x64(name in WIDE):
            sharded = jax.device_put(array, sharding)
            assert fingerprints({"x": sharded}) == {"x": reference(array)}


@given(st.sampled_from(STORABLE), st.integers(1, 40), st.data())
@settings(max_examples=150, deadline=None)
def test_any_other_bits_of_one_element_change_it(name, size, data):
    seeds = st.integers(0, 2**32 - 1)
    array = random_array(name, (size,), data.draw(seeds))
    changed = array.copy()
    position = data.draw(st.integers(0, size - 1))
    changed[position] = random_array(name, (1,), data.draw(seeds))[0]
    is_same = changed.tobytes() == array.tobytes()
    assert (of_host(changed) == of_host(array)) is is_same


def test_keys_by_their_data():
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 8)
    data = np.asarray(jax.random.key_data(keys))
    sharded = jax.device_put(keys, NamedSharding(mesh_of(2, 4), PartitionSpec(("a", "b"))))
    assert fingerprints({"k": sharded, "l": keys}) == dict.fromkeys("kl", of_host(data))


def test_leaves_of_all_kinds_together_in_order():
    mesh = mesh_of(2, 4)
    on_host_memory = NamedSharding(mesh, PartitionSpec("a"), memory_kind="pinned_host")
    table = random_array("float32", (8, 8))
    leaves = {
        "number": 3,
        "offloaded": jax.device_put(table, on_host_memory),
        "numpy": table,
        "sharded": jax.device_put(table, NamedSharding(mesh, PartitionSpec("a", "b"))),
        "local": jnp.int32(7),
        "weak": jnp.asarray(0.5),
        "empty": jnp.zeros((0, 3)),
        "other": jax.device_put(table, NamedSharding(mesh_of(1, 2), PartitionSpec("a", "b"))),
    }
    compile_ahead(leaves)
    found = fingerprints(leaves)
    assert list(found) == list(leaves)
    assert found == {path: of_host(np.asarray(leaf)) for path, leaf in leaves.items()}


def test_leaves_may_be_donated_before_the_result_is_there():
    table = jnp.arange(1e5)
    expected = of_host(np.asarray(table))
    pending = dispatch({"x": table})
    jax.jit(lambda x: x + 1, donate_argnums=0)(table)
    assert table.is_deleted()
    assert pending.result() == {"x": expected}


def test_one_program_for_all_leaves_on_the_same_devices():
    sharding = NamedSharding(mesh_of(2, 4), PartitionSpec("a", "b"))
    leaves = {str(n): jax.device_put(np.ones((8, 4 * n), np.float32), sharding) for n in (1, 2, 3)}
    compile_ahead(leaves)
    compiled = fingerprint._compiled.cache_info()
    pending = dispatch(leaves)
    assert len(pending._device) == 1
    assert fingerprint._compiled.cache_info().misses == compiled.misses
    assert pending.result() == {path: of_host(np.asarray(x)) for path, x in leaves.items()}
