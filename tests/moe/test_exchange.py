"""What arrives is what was sent: any counts, there and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.mesh import abstract_mesh
from shardlib.nn.moe.exchange import ExchangeGroup, exchange, plan_exchange, resolve_method
from shardlib.sharding.manual import manual

DEVICES, GROUPS, ROWS, WIDTH = 4, 2, 12, 3
LINK = ExchangeGroup(("expert",), pair_rows=ROWS, method="padded")


@functools.cache
def program():
    """There and back, and the gradient of what went there, on four devices."""
    mesh = sl.make_mesh("expert=4", devices=jax.devices()[:DEVICES])

    def local(rows, counts, weights):
        plan = plan_exchange(counts[0], ("expert",))

        def there(rows):
            return exchange(rows, plan, DEVICES * ROWS, LINK)

        arrived, transpose = jax.vjp(there, rows[0])
        back = exchange(arrived, plan.reversed(), ROWS, LINK)
        gradient = transpose(weights[0])[0]
        return arrived[None], back[None], gradient[None], plan.recv_sizes[None]

    @jax.jit
    def run(rows, counts, weights):
        with sl.use(mesh, sl.rules.STANDARD):
            return manual(local, ("expert",), (P("expert"),) * 3, (P("expert"),) * 4)(
                rows, counts, weights
            )

    return run


@st.composite
def counts_of_all(draw):
    """[source, destination, group], of which no source has more than ROWS."""
    counts = np.zeros((DEVICES, DEVICES, GROUPS), np.int32)
    for source in range(DEVICES):
        left = draw(st.integers(0, ROWS))
        for at in draw(st.permutations(range(DEVICES * GROUPS))):
            taken = draw(st.integers(0, left))
            counts[source].flat[at], left = taken, left - taken
    return counts


def expected_arrivals(rows, counts):
    """By group, then by source, without gaps; zeros behind."""
    ends = np.cumsum(counts.reshape(DEVICES, -1), axis=1).reshape(counts.shape)
    out = np.zeros((DEVICES, DEVICES * ROWS, WIDTH), np.float32)
    for device in range(DEVICES):
        parts = [
            rows[source, ends[source, device, g] - counts[source, device, g] :][
                : counts[source, device, g]
            ]
            for g in range(GROUPS)
            for source in range(DEVICES)
        ]
        arrived = np.concatenate(parts)
        out[device, : len(arrived)] = arrived
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(counts_of_all())
def test_what_arrives_is_what_was_sent(counts):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(DEVICES, ROWS, WIDTH)).astype(np.float32)
    weights = rng.normal(size=(DEVICES, DEVICES * ROWS, WIDTH)).astype(np.float32)
    arrived, back, gradient, sizes = jax.device_get(program()(rows, counts, weights))
    np.testing.assert_array_equal(arrived, expected_arrivals(rows, counts))
    np.testing.assert_array_equal(sizes, counts.transpose(1, 0, 2))
    sent = np.arange(ROWS) < counts.sum(axis=(1, 2))[:, None]
    np.testing.assert_array_equal(back, np.where(sent[..., None], rows, 0))
    # <weights, there(rows)> = <transpose(weights), rows>, for the rows that were sent.
    assert (gradient[~sent] == 0).all()
    np.testing.assert_allclose(
        np.sum(gradient * rows, dtype=np.float64),
        np.sum(weights * arrived, dtype=np.float64),
        atol=1e-4,
    )


def test_all_rows_may_go_to_one_device_and_from_one_device():
    counts = np.zeros((DEVICES, DEVICES, GROUPS), np.int32)
    counts[:, 2, 1] = ROWS
    rows = np.arange(DEVICES * ROWS * WIDTH, dtype=np.float32).reshape(DEVICES, ROWS, WIDTH)
    weights = np.zeros((DEVICES, DEVICES * ROWS, WIDTH), np.float32)
    arrived, back, _, _ = jax.device_get(program()(rows, counts, weights))
    np.testing.assert_array_equal(arrived[2], rows.reshape(-1, WIDTH))
    assert (arrived[[0, 1, 3]] == 0).all()
    np.testing.assert_array_equal(back, rows)


def test_rows_keep_their_dtype():
    mesh = sl.make_mesh("expert=4", devices=jax.devices()[:DEVICES])

    def local(rows):
        plan = plan_exchange(jnp.full((DEVICES, 1), 2, jnp.int32), ("expert",))
        return exchange(rows, plan, 8, ExchangeGroup(("expert",), 2, "padded"))

    rows = jnp.arange(32 * WIDTH, dtype=jnp.bfloat16).reshape(32, WIDTH)
    with sl.use(mesh, sl.rules.STANDARD):
        arrived = jax.jit(manual(local, ("expert",), P("expert"), P("expert")))(rows)
    assert arrived.dtype == jnp.bfloat16
    expected = np.asarray(rows).reshape(4, 4, 2, WIDTH).transpose(1, 0, 2, 3)
    np.testing.assert_array_equal(arrived, expected.reshape(32, WIDTH))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "method"), [("v5e:4x4", "ragged"), ("v5e:4x8", "padded"), ("v6e:4x8", "ragged")]
)
def test_slices_of_v5e_have_no_ragged_exchange_above_16_chips(topology, method, tpu_devices):
    devices = tpu_devices(topology)
    with sl.use(sl.make_mesh(f"expert={len(devices)}", devices=devices), sl.rules.STANDARD):
        assert resolve_method("auto") == method
        if method == "padded":
            with pytest.raises(
                ModelError, match=r"cannot run on 32xv5e, .*\n  Use exchange='auto'"
            ):
                resolve_method("ragged")


def test_the_method_follows_the_devices_of_the_mesh():
    with pytest.raises(
        ModelError, match=r"exchange='ragged' cannot run on cpu, .*\n  Use exchange='auto', or"
    ):
        resolve_method("ragged")
    assert resolve_method("auto") == "padded"
    for mesh in (sl.make_mesh("expert=8"), abstract_mesh("expert=8", 8)):
        with sl.use(mesh, sl.rules.STANDARD):
            assert resolve_method("auto") == "padded"
