"""Attention to keys and values in pages, against a softmax over the keys of each sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.nn.attention import Pages, Rows, attend_pages
from shardlib.nn.attention.mask import Mask

LAYERS, PAGES, KV_HEADS, GROUP, DIM, VALUE_DIM, PAGE = 2, 90, 2, 3, 16, 8, 16
SLOTS, LANES, WIDTH, PAGES_A_ROW = 5, 2, 8, 40


@pytest.fixture(scope="module")
def case():
    """A step of 4 slots with 1 to 600 keys, one without a sequence, and two lanes."""
    rng = np.random.default_rng(0)
    shape = (LAYERS, PAGES, PAGE)
    key = rng.normal(size=(*shape, KV_HEADS * DIM)).astype(np.float32)
    value = rng.normal(size=(*shape, KV_HEADS * VALUE_DIM)).astype(np.float32)
    query = rng.normal(size=(SLOTS + LANES * WIDTH, KV_HEADS * GROUP, DIM)).astype(np.float32)
    last = [599, 0, 130, 0, 17]
    free = iter(rng.permutation(np.arange(1, PAGES)))
    tables = np.zeros((SLOTS, PAGES_A_ROW), np.int32)
    lanes = np.zeros((LANES, PAGES_A_ROW), np.int32)
    for slot in (0, 1, 2, 4):
        for number in range(last[slot] // PAGE + 1):
            tables[slot, number] = next(free)
    starts = [0, 70]
    for lane, start in enumerate(starts):
        for number in range((start + WIDTH - 1) // PAGE + 1):
            lanes[lane, number] = next(free)
    # Other sequences may leave anything in the pages that are free.
    value[:, list(free)] = np.nan
    positions = np.concatenate([last, *(np.arange(s, s + WIDTH) for s in starts)]).astype(np.int32)
    of_rows = [*tables, *np.repeat(lanes, WIDTH, axis=0)]
    own = [table[at // PAGE] for table, at in zip(of_rows, positions, strict=True)]
    rows = Rows(*map(jnp.asarray, (positions, np.asarray(own, np.int32), tables, lanes)))
    return query, Pages(jnp.asarray(key), jnp.asarray(value)), rows, of_rows


def expected(query, pages, layer, positions, tables, *, window=None, softcap=None, sinks=None):
    pages = [np.asarray(cache[layer]).reshape(PAGES, PAGE, KV_HEADS, -1) for cache in pages]
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


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (0, {}),
        (1, {"window": 100}),
        (1, {"softcap": 2.0, "sinks": np.linspace(-2, 3, 6, dtype=np.float32), "window": 3}),
    ],
    ids=["plain", "window", "sinks"],
)
def test_rows_see_the_keys_of_their_sequence(case, layer, options, together):
    query, pages, rows, tables = case
    mask = Mask(scale=None, softcap=options.get("softcap"))
    given = {name: options[name] for name in ("window", "sinks") if name in options}
    found = jax.jit(
        lambda query, pages, rows: attend_pages(
            query, pages, jnp.int32(layer), rows, mask, together=together, **given
        )
    )(query, pages, rows)
    has_sequence = np.asarray(rows.pages) > 0
    wanted = expected(query, pages, layer, rows.positions, tables, **options)
    # Sums of up to 600 products in float32.
    np.testing.assert_allclose(found[has_sequence], wanted[has_sequence], rtol=2e-5, atol=2e-5)
    assert np.isfinite(found[has_sequence]).all()
