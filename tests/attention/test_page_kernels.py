"""Kernels that read pages on TPUs and GPUs, against XLA's attention to the same pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as jax_kernel

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.nn.attention import Pages, Rows, attend_pages, empty_pages, page_cudnn, ragged
from shardlib.nn.attention.group_pages import GroupPages
from shardlib.nn.attention.mask import Mask

LAYERS, PAGES, PAGE, HEADS, KV_HEADS = 2, 64, 16, 4, 2
SLOTS, LANES, WIDTH, PAGES_A_ROW = 8, 3, 8, 40
LAST = [583, 0, 17, 31, 5, 1, 15, 16]
"""The position of the row of each slot; the second has no sequence."""
READ = [(0, 8), (21, 5), (0, 0)]
"""The first position of each lane and how many of its rows have a sequence."""


def rows_of_step(rng, last_of_slots, of_lanes):
    """Returns the rows of a step, and the pages that nobody owns."""
    free = iter(rng.permutation(np.arange(1, PAGES)))
    tables, lanes = (np.zeros((n, PAGES_A_ROW), np.int32) for n in (SLOTS, LANES))
    positions, pages = [], []
    for slot, last in enumerate(last_of_slots):
        owned = [next(free) for _ in range(last // PAGE + 1)] if last else [0]
        tables[slot, : len(owned)] = owned
        positions.append(last)
        pages.append(owned[-1])
    for lane, (start, count) in enumerate(of_lanes):
        end = start + count
        owned = [next(free) for _ in range(-(-end // PAGE))] if count else [0]
        lanes[lane, : len(owned)] = owned
        for at in range(start, start + WIDTH):
            positions.append(min(at, max(end - 1, 0)))
            pages.append(owned[at // PAGE] if at < end else 0)
    arrays = np.asarray(positions, np.int32), np.asarray(pages, np.int32), tables, lanes
    return Rows(*(x[None] for x in arrays)), list(free)


def step(dim, *, in_turn, heads=(HEADS, KV_HEADS), longest=LAST[0], of_lanes=READ):
    """Returns query, key, value, pages and rows of one group."""
    rng, kv_heads = np.random.default_rng(0), heads[1]
    rows, free = rows_of_step(rng, [longest, *LAST[1:]], of_lanes)
    count = SLOTS + LANES * WIDTH
    arrays = [
        rng.normal(size=(1, count, number, dim)).astype(np.float32) for number in (*heads, kv_heads)
    ]
    both = rng.normal(size=(LAYERS, 1, PAGES, PAGE, kv_heads, 2, dim)).astype(np.float32)
    # Another sequence may have left anything in pages that are free.
    both[:, :, free] = np.nan
    if in_turn:
        pages = Pages(jnp.asarray(both.reshape(*both.shape[:4], -1, dim)), None)
    else:
        apart = (both[..., n, :].reshape(*both.shape[:4], -1) for n in range(2))
        pages = Pages(*map(jnp.asarray, apart))
    return *arrays, pages, rows


def attended(given, reading, **options):
    query, key, value, pages, rows = given
    mask = Mask(scale=options.pop("scale", None), softcap=options.pop("softcap", None))
    # Rows without a sequence see what the others wrote to page 0.
    return jax.jit(
        lambda query, key, value, pages: attend_pages(
            query, key, value, pages, jnp.int32(1), rows, mask, reading=reading, **options
        )
    )(query, key, value, pages)


def check(found, wanted, rows, tolerance):
    has_sequence = rows.pages[0] > 0
    ours, theirs = (np.asarray(y, np.float32)[0, has_sequence] for y, _ in (found, wanted))
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


class _Flat:
    """A block of pages as rows: the interpreter does not read references in other shapes."""

    def __init__(self, reference):
        self._reference = reference
        self.dtype = reference.dtype

    def reshape(self, *shape):
        self.shape = shape
        return self

    def __getitem__(self, index):
        return self._reference[:, :, index[0].start, :].reshape(-1, self.shape[-1])


@pytest.fixture
def interpreted(monkeypatch):
    """Runs JAX's kernel on a CPU. Its interpreter knows neither references in other shapes nor
    masked stores to a part of a reference."""
    fetch = jax_kernel.MultiPageAsyncCopyDescriptor
    wait = fetch.wait
    monkeypatch.setattr(fetch, "wait", lambda self: _Flat(wait(self)))

    def store(reference, value, *, mask):
        reference[...] = jnp.where(mask, value, reference[...])

    monkeypatch.setattr(pltpu, "store", store)
    with pltpu.force_tpu_interpret_mode():
        yield


@pytest.mark.mesh
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 20, "softcap": 2.0, "scale": 0.2},
        {"window": 20, "is_local": jnp.asarray(True)},
        {"window": 20, "is_local": jnp.asarray(False)},
    ],
    ids=["plain", "window", "local", "global"],
)
def test_the_kernel_of_tpus_reads_what_xla_reads(options):
    given = step(128, in_turn=True)
    found = attended(given, "ragged", **options)
    wanted = attended(given, "all", **options)
    # Sums of up to 584 products in float32.
    check(found, wanted, given[-1], 2e-5)
    np.testing.assert_array_equal(found[1].key, wanted[1].key)


@pytest.mark.mesh
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "of_lanes", [READ, [(0, 8), (21, 8), (5, 8)]], ids=["an empty last lane", "full lanes"]
)
def test_the_kernel_of_tpus_reads_all_tiles_of_heads(of_lanes):
    """32 rows are one block of queries, and 8 heads of keys two tiles."""
    given = step(128, in_turn=True, heads=(16, 8), of_lanes=of_lanes)
    check(attended(given, "ragged"), attended(given, "all"), given[-1], 2e-5)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "page_size", "is_read"),
    [
        ((4, 1), (128, 128), "bfloat16", 16, True),
        ((56, 8), (128, 128), "bfloat16", 16, True),
        ((32, 32), (128, 128), "bfloat16", 16, True),
        ((5, 5), (128, 128), "bfloat16", 16, False),
        ((32, 32), (128, 128), "float32", 16, False),
        ((32, 8), (128, 128), "float32", 16, True),
        ((4, 1), (256, 256), "bfloat16", 16, True),
        ((4, 2), (256, 256), "bfloat16", 16, False),
        ((4, 1), (256, 256), "float32", 16, False),
        ((4, 2), (64, 64), "bfloat16", 16, False),
        ((4, 4), (192, 128), "bfloat16", 16, False),
        ((32, 8), (128, 128), "int8", 16, False),
        ((32, 8), (128, 128), "bfloat16", 512, True),
        ((32, 8), (128, 128), "bfloat16", 1024, False),
    ],
)
def test_what_the_kernel_of_tpus_can_hold(heads, dims, dtype, page_size, is_read):
    """As programs compiled for v5e show."""
    assert ragged.can_hold(*heads, dims, dtype, page_size) == is_read


@pytest.mark.parametrize(
    ("tables", "fits"), [((32, 8, 4096), True), ((8, 8, 8192), True), ((10, 8, 8192), False)]
)
def test_tables_that_scalar_memory_holds(tables, fits):
    assert ragged.can_read(*tables) == fits


def test_cudnn_refuses_what_it_cannot_read():
    query, *_, pages, _ = step(16, in_turn=False)
    with pytest.raises(ModelError, match=r"the dtype is float32.*softcap.*sinks") as raised:
        page_cudnn.check(query, GroupPages(*pages), Mask(softcap=2.0), is_plain=False)
    assert "Use attention='auto' or 'xla'." in str(raised.value)


@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=["plain", "window"])
def test_keys_and_values_in_turn_are_read_as_those_apart(options):
    found = attended(step(16, in_turn=True), "all", **options)
    wanted = attended(given := step(16, in_turn=False), "all", **options)
    check(found, wanted, given[-1], 0.0)
    keys = np.asarray(found[1].key).reshape(LAYERS, 1, PAGES, PAGE, KV_HEADS, 2, -1)
    for number, apart in enumerate(wanted[1][:2]):
        of_heads = np.asarray(apart).reshape(LAYERS, 1, PAGES, PAGE, KV_HEADS, -1)
        np.testing.assert_array_equal(keys[:, :, 1:, ..., number, :], of_heads[:, :, 1:])


@pytest.mark.rest("mesh", keep=3)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=["even", "odd"])
@pytest.mark.parametrize("longest", [583, 300], ids=["all pages", "first pages"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20, "is_local": jnp.asarray(True)}, {"window": 20, "scale": 0.2}],
    ids=["plain", "local", "window"],
)
def test_gathered_pages_give_what_xla_reads(options, longest, heads):
    """By XLA: cuDNN is given the same arrays on a GPU."""
    given = step(16, in_turn=False, heads=heads, longest=longest)
    found = attended(given, "cudnn", **options)
    wanted = attended(given, "all", **options)
    check(found, wanted, given[-1], 2e-5)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("devices", [2, 4])
def test_a_device_holds_the_key_value_head_that_its_query_heads_need(devices):
    query, key, value, _, rows = step(16, in_turn=False)
    dims, heads = (16, 16), (HEADS, KV_HEADS)
    blank = empty_pages(LAYERS, 1, PAGES, PAGE, heads, dims, jnp.float32)
    wanted = attended((query, key, value, blank, rows), None)
    with sl.use(sl.make_mesh(f"tensor={devices}", devices=jax.devices()[:devices]), sl.rules.SERVE):
        make = jax.jit(lambda: empty_pages(LAYERS, 1, PAGES, PAGE, heads, dims, jnp.float32))
        pages = make()
        assert pages.key.shape[3] == devices
        assert pages.key.sharding.shard_shape(pages.key.shape)[3] == 1
        found = attended((query, key, value, pages, rows), None)
    # Sums of 16 products, and of up to 584.
    check(found, wanted, rows, 2e-5)
    repeated = np.repeat(wanted[1].key, devices // KV_HEADS, axis=3)
    np.testing.assert_array_equal(np.asarray(found[1].key)[:, :, 1:], repeated[:, :, 1:])
