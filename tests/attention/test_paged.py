"""Attention to keys and values in pages, against a softmax over the keys of each sequence."""

import concurrent.futures
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardlib as sl
from shardlib.nn.attention import (
    Pages,
    Rows,
    attend_pages,
    empty_pages,
    page_reader,
    pages_read,
)
from shardlib.nn.attention.mask import Mask
from shardlib.nn.attention.page_kernel import has_page_kernel, page_sums

LAYERS, PAGES, KV_HEADS, GROUP, DIM, VALUE_DIM, PAGE = 2, 90, 2, 3, 8, 16, 16
SLOTS, LANES, WIDTH, PAGES_A_ROW = 5, 2, 8, 40


class Step(NamedTuple):
    """The work of a group, and the pages after it, on the host."""

    arrays: tuple
    """Query, key, value and rows."""
    before: tuple
    after: tuple
    tables: list
    """Of each row."""


def step_of_group(seed):
    """Returns a step of 4 slots with 1 to 600 keys, one without a sequence, and two lanes."""
    rng = np.random.default_rng(seed)
    count = SLOTS + LANES * WIDTH

    def random(*shape):
        return rng.normal(size=shape).astype(np.float32)

    before = tuple(random(LAYERS, PAGES, PAGE, KV_HEADS * dim) for dim in (DIM, VALUE_DIM))
    query = random(count, KV_HEADS * GROUP, DIM)
    new = random(count, KV_HEADS, DIM), random(count, KV_HEADS, VALUE_DIM)
    last = [599 - seed, 0, 130, 0, 17 + seed]
    free = iter(rng.permutation(np.arange(1, PAGES)))
    tables = np.zeros((SLOTS, PAGES_A_ROW), np.int32)
    lanes = np.zeros((LANES, PAGES_A_ROW), np.int32)
    for slot in (0, 1, 2, 4):
        for number in range(last[slot] // PAGE + 1):
            tables[slot, number] = next(free)
    starts = [0, 250]
    for lane, start in enumerate(starts):
        for number in range((start + WIDTH - 1) // PAGE + 1):
            lanes[lane, number] = next(free)
    # Other sequences may leave anything in the pages that are free.
    before[1][:, list(free)] = np.nan
    positions = np.concatenate([last, *(np.arange(s, s + WIDTH) for s in starts)]).astype(np.int32)
    of_rows = [*tables, *np.repeat(lanes, WIDTH, axis=0)]
    own = np.asarray([table[at // PAGE] for table, at in zip(of_rows, positions, strict=True)])
    after = tuple(np.copy(cache) for cache in before)
    for cache, written in zip(after, new, strict=True):
        cache[:, own, positions % PAGE] = written.reshape(count, -1)
    rows = Rows(positions, own.astype(np.int32), tables, lanes)
    return Step((query, *new, rows), before, after, of_rows)


@pytest.fixture(scope="module")
def steps():
    return [step_of_group(seed) for seed in (0, 1)]


def in_int8(cache, kv_heads):
    """Returns pages [..., page_size, kv_heads * dim] as int8, their scales, and what they stand
    for."""
    heads = cache.reshape(*cache.shape[:-1], kv_heads, -1)
    largest = np.nan_to_num(np.abs(heads)).max(axis=-1, keepdims=True)
    scales = np.where(largest > 0, largest, np.float32(1)) / np.float32(127)
    values = np.round(np.nan_to_num(heads) / scales).astype(np.int8)
    of_heads = np.moveaxis(scales[..., 0], -1, -2).reshape(*cache.shape[:-2], -1)
    return values.reshape(cache.shape), of_heads, (values * scales).reshape(cache.shape)


def by_head(cache):
    """Returns pages as on a CPU: [kv_heads, page_size, dim] in place of
    [page_size, kv_heads * dim]."""
    return np.moveaxis(cache.reshape(*cache.shape[:-1], KV_HEADS, -1), -2, -3)


def attended(steps, layer, options, reading):
    """Returns the attention [groups, rows, heads, value_dim] of the steps of groups, and pages."""
    query, key, value, rows = jax.tree.map(lambda *x: np.stack(x), *(s.arrays for s in steps))
    pages = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *(step.before for step in steps))
    mask = Mask(scale=None, softcap=options.get("softcap"))
    given = {name: options[name] for name in ("window", "sinks") if name in options}
    return jax.jit(
        lambda *arrays: attend_pages(
            *arrays[:3],
            Pages(*arrays[3]),
            jnp.int32(layer),
            arrays[4],
            mask,
            reading=reading,
            **given,
        )
    )(query, key, value, pages, rows)


def check(found, pages, steps, layer, options):
    for group, step in enumerate(steps):
        query, _, _, rows = step.arrays
        has_sequence = rows.pages > 0
        wanted = expected(query, step.after, layer, rows.positions, step.tables, **options)
        # Sums of up to 600 products in float32.
        np.testing.assert_allclose(
            found[group][has_sequence], wanted[has_sequence], rtol=2e-5, atol=2e-5
        )
        for cache, before, after in zip(pages, step.before, step.after, strict=False):
            np.testing.assert_array_equal(cache[layer, group, 1:], after[layer, 1:])
            np.testing.assert_array_equal(cache[1 - layer, group], before[1 - layer])


def expected(query, pages, layer, positions, tables, *, window=None, softcap=None, sinks=None):
    pages = [cache[layer].reshape(PAGES, PAGE, KV_HEADS, -1) for cache in pages]
    out = np.zeros((len(query), KV_HEADS * GROUP, VALUE_DIM))
    for row, (at, table) in enumerate(zip(positions, tables, strict=True)):
        first = 0 if window is None else max(at - window + 1, 0)
        places = [(table[n // PAGE], n % PAGE) for n in range(first, at + 1)]
        for head in range(KV_HEADS * GROUP):
            read = [np.stack([x[page, n, head // GROUP] for page, n in places]) for x in pages]
            scores = read[0].astype(np.float64) @ query[row, head] / np.sqrt(DIM)
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            extra = -np.inf if sinks is None else sinks[head]
            peak = max(scores.max(), extra)
            weights = np.exp(scores - peak)
            out[row, head] = weights @ read[1] / (weights.sum() + np.exp(extra - peak))
    return out


@pytest.mark.rest("mesh", keep=3)
@pytest.mark.parametrize("reading", ["rows", "lanes", "all"])
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (0, {}),
        (1, {"window": 100}),
        (1, {"softcap": 2.0, "sinks": np.linspace(-2, 3, 6, dtype=np.float32), "window": 3}),
    ],
    ids=["plain", "window", "sinks"],
)
def test_rows_see_the_keys_of_their_sequence(steps, layer, options, reading):
    found, pages = attended(steps[:1], layer, options, reading)
    check(found, pages, steps[:1], layer, options)


@pytest.mark.rest("mesh", keep=2)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 2.0, "window": 3}])
@pytest.mark.parametrize("reading", ["rows", "lanes"])
def test_pages_by_head_give_the_same_bits(steps, reading, options, monkeypatch):
    """As on a CPU without the kernel."""
    monkeypatch.setattr(page_reader, "has_page_kernel", lambda: False)
    (step,) = steps[:1]
    before, after = (tuple(map(by_head, of)) for of in (step.before, step.after))
    found, pages = attended([step._replace(before=before)], 1, options, reading)
    wanted, _ = attended([step], 1, options, reading)
    has_sequence = step.arrays[-1].pages > 0
    np.testing.assert_array_equal(found[0][has_sequence], wanted[0][has_sequence])
    for cache, expected_cache in zip(pages, after, strict=False):
        np.testing.assert_array_equal(cache[1, 0, 1:], expected_cache[1, 1:])


@pytest.fixture
def kernel():
    # A kernel that does not compile warns, which is an error here.
    if not has_page_kernel():
        pytest.skip("needs a C++ compiler")


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 100}, {"window": 3, "sinks": np.linspace(-2, 3, 6, dtype=np.float32)}],
    ids=["plain", "window", "sinks"],
)
def test_a_kernel_reads_the_pages_of_a_cpu(steps, options):
    (step,) = steps[:1]
    ours = step._replace(before=tuple(map(by_head, step.before)))
    assert "ffi_call" in str(jax.make_jaxpr(lambda: attended([ours], 1, options, "lanes"))())
    found, _ = attended([ours], 1, options, "lanes")
    check(found, (), [step], 1, options)


@pytest.mark.parametrize(
    ("reading", "options", "dtype"),
    [
        ("rows", {}, np.float32),
        ("lanes", {"softcap": 2.0}, np.float32),
        ("lanes", {}, jnp.bfloat16),
        ("lanes", {"value_dim": 8}, np.float32),
    ],
)
def test_what_the_kernel_does_not_know_is_left_to_xla(steps, reading, options, dtype):
    query, key, value, rows = steps[0].arrays
    of_value = slice(options.get("value_dim"))
    keys, values = (by_head(cache).astype(dtype) for cache in steps[0].before)
    step = steps[0]._replace(
        arrays=(query, key, value[..., of_value], rows), before=(keys, values[..., of_value])
    )
    program = jax.make_jaxpr(lambda: attended([step], 1, options, reading))()
    assert "ffi_call" not in str(program)


def test_pages_are_left_to_xla_where_it_is_asked_for(steps):
    step = steps[0]._replace(before=tuple(map(by_head, steps[0].before)))
    with pages_read("xla"):
        program = jax.make_jaxpr(lambda: attended([step], 1, {}, None))()
    assert "ffi_call" not in str(program)


@pytest.mark.rest("mesh")
def test_pages_on_several_devices_are_left_to_xla(steps):
    step = steps[0]._replace(before=tuple(map(by_head, steps[0].before)))
    with sl.use(sl.make_mesh("tensor=2", devices=jax.devices()[:2]), sl.rules.STANDARD):
        program = jax.make_jaxpr(lambda: attended([step], 1, {}, "lanes"))()
    assert "ffi_call" not in str(program)


def test_threads_use_the_kernel_at_a_time(steps):
    """As several engines of a process do."""
    ours = [step._replace(before=tuple(map(by_head, step.before))) for step in steps]
    wanted = [attended([step], 1, {}, "lanes")[0] for step in ours]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: attended([ours[n % 2]], 1, {}, "lanes")[0], range(16)))
    for number, result in enumerate(found):
        np.testing.assert_array_equal(result, wanted[number % 2])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("page_size", [3, 16, 40])
@pytest.mark.parametrize(("width", "group"), [(1, 1), (1, 9), (5, 1), (2, 4), (21, 1)])
def test_sums_of_the_kernel_are_those_of_a_softmax(page_size, width, group):
    """The rows stand apart or in lanes, and see whole and partial blocks of 256 keys, or no key."""
    rng = np.random.default_rng(width + group)
    tables, dims, pages_a_row = 3, (7, 32), -(-700 // page_size)
    num_pages = tables * pages_a_row

    def random(*shape):
        return rng.normal(size=shape).astype(np.float32)

    query = random(tables * width, KV_HEADS, group, dims[0])
    key, value = (random(2, 1, num_pages, KV_HEADS, page_size, dim) for dim in dims)
    owned = rng.permutation(num_pages).reshape(tables, pages_a_row)
    starts = np.array([0, 250, 699 - width])[:, None]
    last = (starts + np.arange(width)).reshape(-1)
    first = np.maximum(last - np.array([300, 100, 600])[:, None].repeat(width, 1).reshape(-1), 0)
    # Positions that no row of a table sees may hold anything.
    for own, start, end in zip(owned, first[::width], last[width - 1 :: width] + 1, strict=True):
        at = np.setdiff1d(np.arange(pages_a_row * page_size), np.arange(start, end))
        key[:, :, own[at // page_size], :, at % page_size] = np.nan
        value[:, :, own[at // page_size], :, at % page_size] = np.nan
    last[0] = -1
    given = (np.asarray(x, np.int32) for x in (first, last, owned))
    found = page_sums(query, key, value, 1, *given)
    assert found.total[0].tolist() == [[0.0] * group] * KV_HEADS
    assert not np.any(found.values[0])
    for row in range(1, tables * width):
        at = np.arange(first[row], last[row] + 1)
        of_row = owned[row // width][at // page_size], slice(None), at % page_size
        keys, values = (np.moveaxis(x[1, 0][of_row].astype(np.float64), 0, 1) for x in (key, value))
        scores = np.einsum("kgd,ksd->kgs", query[row], keys)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = scores.max(-1), weights.sum(-1), np.einsum("kgs,ksd->kgd", weights, values)
        for ours, theirs in zip(found, wanted, strict=True):
            # Sums of up to 600 products in float32.
            np.testing.assert_allclose(ours[row], theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("kernel")
def test_values_that_vectors_do_not_divide_are_refused_by_the_kernel():
    pages = [np.zeros((1, 1, 4, 1, PAGE, n), np.float32) for n in (8, 24)]
    query, at = np.zeros((1, 1, 1, 8), np.float32), np.zeros(1, np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="16 must divide the dims of values"):
        page_sums(query, *pages, 0, at, at, at[None]).values.block_until_ready()


@pytest.mark.usefixtures("kernel")
def test_places_outside_of_the_pages_are_read_as_the_nearest_ones():
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, KV_HEADS, GROUP, DIM)).astype(np.float32)
    shape = 1, 1, 4, KV_HEADS, PAGE
    caches = [rng.normal(size=(*shape, n)).astype(np.float32) for n in (DIM, VALUE_DIM)]
    first = np.zeros(2, np.int32)
    tables = np.array([[9, -1], [3, 0]], np.int32)
    found = page_sums(query, *caches, 7, first - 5, np.array([99, 31], np.int32), tables)
    wanted = page_sums(query, *caches, 0, first, np.full(2, 31, np.int32), np.array([[3, 0]] * 2))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.fixture
def nothing_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path))
    yield tmp_path
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_compiler_that_fails_is_reported(monkeypatch, nothing_compiled):
    compiler = nothing_compiled.parent / "failing-c++"
    compiler.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    said = r"computed by XLA, which takes longer: .*failing-c\+\+ fails: no such option\n  Set CXX"
    with pytest.warns(UserWarning, match=said):
        assert not has_page_kernel.__wrapped__()
    compiler.unlink()


@pytest.mark.parametrize("compiler", ["", "no-such-compiler"])
def test_without_a_compiler_there_is_no_kernel(monkeypatch, nothing_compiled, compiler):
    monkeypatch.setenv("CXX", compiler)
    assert not has_page_kernel.__wrapped__()


def test_a_cpu_reads_rows_apart_where_it_is_told_to(steps):
    """A row of a slot then has the bits of the same row in a lane."""
    (step,) = steps[:1]
    query, key, value, rows = step.arrays
    table, lane = rows.lanes[-1:], np.arange(-WIDTH, 0)
    twice = np.concatenate([lane, lane])
    both = Rows(rows.positions[twice], rows.pages[twice], np.repeat(table, WIDTH, axis=0), table)
    step = step._replace(arrays=(*(x[twice] for x in (query, key, value)), both))
    with pages_read(apart=True):
        found, _ = attended([step], 0, {}, None)
    np.testing.assert_array_equal(found[0, :WIDTH], found[0, WIDTH:])
    found, _ = attended([step], 0, {}, None)
    assert not np.array_equal(found[0, :WIDTH], found[0, WIDTH:])


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("reading", ["rows", "lanes", "all"])
def test_groups_have_pages_of_their_own(steps, reading):
    with sl.use(sl.make_mesh("data=2,tensor=2", devices=jax.devices()[:4]), sl.rules.STANDARD):
        found, pages = attended(steps, 1, {"window": 200}, reading)
    check(found, pages, steps, 1, {"window": 200})


@pytest.mark.parametrize("reading", ["rows", "lanes", "all"])
def test_keys_and_values_in_8_bits(steps, reading):
    """Rows see what int8 and scales stand for, also of the keys that they write themselves."""
    (step,) = steps[:1]
    kept = [in_int8(cache, KV_HEADS) for cache in step.before]
    before = (*(one[0] for one in kept), *(one[1] for one in kept))
    after = tuple(in_int8(cache, KV_HEADS)[2] for cache in step.after)
    found, pages = attended([step._replace(before=before)], 1, {"window": 100}, reading)
    check(found, (), [step._replace(after=after)], 1, {"window": 100})
    for number, cache in enumerate(step.after):
        values, scales, _ = in_int8(cache, KV_HEADS)
        np.testing.assert_array_equal(pages[number][1, 0, 1:], values[1, 1:])
        np.testing.assert_allclose(pages[2 + number][1, 0, 1:], scales[1, 1:], rtol=1e-7)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
@pytest.mark.parametrize("reading", ["rows", "lanes", "all"])
def test_a_loop_over_layers_updates_its_pages_in_place(reading, dtype):
    layers, pages = 4, 2048
    cache = empty_pages(
        layers, 1, pages, PAGE, (KV_HEADS * GROUP, KV_HEADS), (DIM, VALUE_DIM), dtype
    )
    count = SLOTS + LANES * WIDTH
    rows = Rows(
        *(jnp.zeros((1, count), jnp.int32) for _ in range(2)),
        *(jnp.zeros((1, n, PAGES_A_ROW), jnp.int32) for n in (SLOTS, LANES)),
    )
    key, value = (jnp.ones((1, count, KV_HEADS, dim)) for dim in (DIM, VALUE_DIM))
    query = jnp.ones((1, count, KV_HEADS * GROUP, DIM))

    def step(pages, query):
        def layer(carry, number):
            total, pages = carry
            y, pages = attend_pages(
                query, key, value, pages, number, rows, Mask(None, None), reading=reading
            )
            return (total + jnp.sum(y), pages), None

        first = jnp.zeros(()), pages
        return jax.lax.scan(layer, first, jnp.arange(layers, dtype=jnp.int32))[0]

    program = jax.jit(step, donate_argnums=0).lower(cache, query).compile()
    memory, held = program.memory_analysis(), sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= held
    # Neither the keys nor the values are copied, whose bytes are at least a third.
    assert memory.temp_size_in_bytes < held / 3
