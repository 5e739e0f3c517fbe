"""Dispatch against every expert on every token, on one device and on meshes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_experts import EXPERTS, MLP, dense, expert_weights, kept_by_loop, tokens_and_routing
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.errors import RuleError
from shardlib.nn.moe import ExpertWeights, apply_experts, capacity, gated, route
from shardlib.sharding.manual import manual

BATCH, LENGTH, K = 8, 8, 2

# Sums of at most 2 * 64 products of float32 numbers of size about 1: some ulps of the largest.
RELATIVE = 2e-6

AXES = [("expert", *dims.split()) for dims in ("embed mlp", "embed mlp", "mlp embed")]
AXES += [("expert", dim) for dim in ("mlp", "mlp", "embed")]
MESHES = [
    "expert=8",
    "expert=4,fsdp=2",
    "data=2,expert=2,tensor=2",
    "expert=2,context=2,tensor=2",
    "data=2,fsdp=2,context=2",
    "tensor=4,data=2",
]


def value(x, logits, weights, mask, target, **options):
    """A scalar of the results, so that all gradients differ, and which copies were computed."""
    y, kept = apply_experts(x, route(logits, K), weights, gated(jax.nn.silu), mask=mask, **options)
    return jnp.sum(y * target), (y, kept)


def dense_value(x, logits, weights, mask, target, kept=None):
    y = dense(x, logits, weights, mask, kept)
    return jnp.sum(y * target), y


@pytest.fixture(scope="module")
def arguments():
    x, logits, mask = tokens_and_routing(BATCH, LENGTH, K)
    return x, logits, expert_weights(), mask, jax.random.normal(jax.random.key(5), x.shape)


def gradients(function):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True))


def assert_close(found, expected):
    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=RELATIVE * float(jnp.abs(b).max()))

    jax.tree.map(close, found, expected)


# The last of 3 chunks of 64 tokens is filled up, and there are no more chunks than tokens.
@pytest.mark.rest("mesh")
@pytest.mark.parametrize("chunks", [1, 4, 3, 100])
def test_dropless_is_every_expert_on_every_token(arguments, chunks):
    (_, (y, kept)), found = gradients(lambda *a: value(*a, chunks=chunks))(*arguments)
    (_, wanted), expected = gradients(dense_value)(*arguments)
    assert_close((y, found), (wanted, expected))
    mask = arguments[3]
    np.testing.assert_array_equal(kept, np.broadcast_to(mask[..., None], kept.shape))
    assert (np.asarray(y)[~np.asarray(mask)] == 0).all()


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_capacity_drops_whom_the_loop_drops(arguments, factor):
    _, logits, _, mask, _ = arguments
    places = capacity(LENGTH, K, EXPERTS, factor)
    kept = kept_by_loop(route(logits, K).experts, mask, places)
    real = np.broadcast_to(np.asarray(mask)[..., None], kept.shape)
    assert kept.sum() < real.sum()
    options = {"dispatch": "capacity", "capacity_factor": factor}
    (_, (y, found_kept)), found = gradients(lambda *a: value(*a, **options))(*arguments)
    np.testing.assert_array_equal(found_kept, kept)
    (_, wanted), expected = gradients(lambda *a: dense_value(*a, kept))(*arguments)
    assert_close((y, found), (wanted, expected))


def lowered(mesh, arguments, rules=sl.rules.STANDARD, **options):
    """The gradients of `value` on a mesh, and the arguments placed there."""
    mesh = sl.make_mesh(mesh)
    x, logits, weights, mask, target = arguments
    with sl.use(mesh, rules) as scope:

        def place(value, *axes, kind="activations"):
            return jax.device_put(value, scope.sharding(axes, value.shape, kind))

        weights = ExpertWeights(
            *(place(x, *axes, kind="params") for x, axes in zip(weights, AXES, strict=True))
        )
        rows = [place(a, "batch", "length", None) for a in (x, logits, target)]
        mask = place(mask, "batch", "length")
        placed = (rows[0], rows[1], weights, mask, rows[2])
        return gradients(lambda *a: value(*a, **options)).lower(*placed), placed


def on_mesh(mesh, arguments, **options):
    program, placed = lowered(mesh, arguments, **options)
    return program.compile()(*placed)


@pytest.fixture(scope="module")
def on_one_device(arguments):
    return {
        "dropless": gradients(value)(*arguments),
        "capacity": gradients(lambda *a: value(*a, dispatch="capacity", capacity_factor=0.5))(
            *arguments
        ),
    }


@pytest.mark.mesh
@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_nothing(mesh, dispatch, arguments, on_one_device):
    (_, (y, kept)), found = on_mesh(mesh, arguments, dispatch=dispatch, capacity_factor=0.5)
    (_, (wanted, wanted_kept)), expected = on_one_device[dispatch]
    np.testing.assert_array_equal(kept, wanted_kept)
    assert_close((y, found), (wanted, expected))


@pytest.mark.mesh
def test_chunks_on_a_mesh(arguments, on_one_device):
    chunks, mesh = 4, "expert=4,fsdp=2"
    program, placed = lowered(mesh, arguments, chunks=chunks)
    program = program.compile()
    (_, (y, _)), found = program(*placed)
    (_, (wanted, _)), expected = on_one_device["dropless"]
    assert_close((y, found), (wanted, expected))
    # Hidden units of one chunk, for all that four devices may send, and never of all chunks.
    rows = 4 * (BATCH * LENGTH // 8 // chunks) * K
    dims = re.findall(r"f32\[([\d,]+)\]", program.as_text())
    shapes = {tuple(sorted(map(int, d.split(",")))) for d in dims}
    assert tuple(sorted((rows, MLP))) in shapes
    assert tuple(sorted((chunks, rows, MLP))) not in shapes


@pytest.mark.mesh
def test_one_busy_expert_loses_nothing(arguments):
    """The worst case of the buffers: all tokens want the experts of one device."""
    x, _, weights, mask, target = arguments
    logits = jnp.broadcast_to(jnp.arange(EXPERTS, dtype=jnp.float32), (BATCH, LENGTH, EXPERTS))
    (_, (y, kept)), found = on_mesh("expert=8", (x, logits, weights, mask, target))
    (_, wanted), expected = gradients(dense_value)(x, logits, weights, mask, target)
    np.testing.assert_array_equal(kept, np.broadcast_to(mask[..., None], kept.shape))
    assert_close((y, found), (wanted, expected))


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_inside_of_a_region_over_stages(dispatch, arguments, on_one_device):
    """As a pipeline does: stages run the layer at different times, or not at all."""
    x, logits, weights, mask, target = arguments
    mesh = sl.make_mesh("stage=2,expert=2,tensor=2")

    def stage(x, logits, weights, mask, target):
        def busy(args):
            return value(*args, mask, target, dispatch=dispatch, capacity_factor=0.5)[0]

        def one(args):
            here = jax.lax.axis_index("stage")
            return jax.lax.cond(here == 1, busy, lambda args: jnp.float32(0), args)

        total, found = jax.value_and_grad(one)((x, logits, weights))
        return jax.lax.psum((total, found), "stage")

    def run(*args):
        with sl.use(mesh, sl.rules.STANDARD):
            return manual(stage, ("stage",), (P(),) * 5, P())(*args)

    total, found = jax.jit(run)(x, logits, weights, mask, target)
    (wanted, _), expected = on_one_device[dispatch]
    assert_close(found, expected)
    np.testing.assert_allclose(total, wanted, rtol=1e-5)


def test_inside_of_a_region_over_data(arguments, on_one_device):
    x, logits, weights, mask, target = arguments
    mesh = sl.make_mesh("data=2,expert=2,fsdp=2")

    def group(x, logits, weights, mask, target):
        grad = jax.grad(lambda w: value(x, logits, w, mask, target)[0])
        return jax.lax.psum(grad(weights), "data")

    def run(*args):
        with sl.use(mesh, sl.rules.STANDARD):
            specs = (P("data"), P("data"), P(), P("data"), P("data"))
            return manual(group, ("data",), specs, P())(*args)

    found = jax.jit(run)(x, logits, weights, mask, target)
    assert_close(found, on_one_device["dropless"][1][2])


@pytest.mark.mesh
def test_bfloat16_on_a_mesh(arguments):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (arguments[0], arguments[2]))
    x, weights = half
    _, logits, _, mask, target = arguments
    args = (x, logits, weights, mask, target.astype(jnp.bfloat16))
    (_, (wanted, _)), expected = gradients(value)(*args)
    (_, (y, _)), found = on_mesh("expert=4,fsdp=2", args)
    assert y.dtype == jnp.bfloat16
    assert found[2].gate.dtype == jnp.bfloat16
    # Results are the same sums on one device; gradients are added in bfloat16 (8 bits) over 8
    # devices.
    np.testing.assert_array_equal(y.astype(jnp.float32), wanted.astype(jnp.float32))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        wide = b.astype(jnp.float32)
        error = jnp.abs(a.astype(jnp.float32) - wide).max()
        assert error <= 8 * 2.0**-8 * jnp.abs(wide).max()


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
@pytest.mark.parametrize("mesh", ["expert=8", "data=2,expert=2,tensor=2", "context=2,expert=4"])
def test_experts_over_an_axis_without_tokens(mesh, dispatch, arguments, on_one_device):
    """Each device has the same tokens, and what its own experts make of them is added up."""
    rules = sl.rules.STANDARD.override(activations={"batch": "data"})
    options = {"dispatch": dispatch, "capacity_factor": 0.5}
    program, placed = lowered(mesh, arguments, rules=rules, **options)
    program = program.compile()
    (_, (y, kept)), found = program(*placed)
    (_, (wanted, wanted_kept)), expected = on_one_device[dispatch]
    np.testing.assert_array_equal(kept, wanted_kept)
    assert_close((y, found), (wanted, expected))
    # No token travels, and no weight is gathered.
    assert "all-to-all" not in program.as_text()
    assert not re.search(rf"f32\[{EXPERTS},\d+,\d+\]\S* all-gather", program.as_text())


def test_experts_over_axes_with_and_without_tokens_are_refused(arguments):
    x, logits, weights, mask, _ = arguments
    rules = sl.rules.STANDARD.override(params={"expert": "data+expert"})
    rules = rules.override(activations={"batch": "data"})
    with (
        sl.use(sl.make_mesh("data=2,expert=4"), rules),
        pytest.raises(RuleError, match=r"sharded over data, .* over expert.*\n  Let the rule"),
    ):
        jax.eval_shape(
            lambda: apply_experts(x, route(logits, K), weights, gated(jax.nn.silu), mask=mask)
        )


def test_experts_that_the_mesh_does_not_divide_are_refused():
    x, logits, _ = tokens_and_routing(BATCH, LENGTH, K)
    weights = expert_weights(num=6)
    with (
        sl.use(sl.make_mesh("expert=4,data=2"), sl.rules.STANDARD),
        pytest.raises(RuleError, match="expert=4 does not divide 6"),
    ):
        jax.eval_shape(
            lambda: apply_experts(x, route(logits[..., :6], K), weights, gated(jax.nn.silu))
        )
