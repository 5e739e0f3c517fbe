"""Functions that shardlib partitions compute what one device does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardlib as sl
from shardlib.errors import ModelError, PartitionError
from shardlib.partitioner import partitioned

P = PartitionSpec
BATCH = ("data", "fsdp")


def numbers(*shape):
    return (np.random.default_rng(shape).standard_normal(shape) / 2).astype(np.float32)


def same(mesh, fn, args, specs, out_specs=None, params=(), tolerance=2e-5):
    """Compares a function with itself on one device; returns the compiled text."""
    want = jax.jit(fn)(*args)
    with sl.use(mesh, sl.rules.STANDARD):
        jitted = jax.jit(partitioned(fn, specs, out_specs, params=params))
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)
        ]
        compiled = jitted.lower(*placed).compile()
        got = compiled(*placed)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Sums of at most 64 float32 terms in another order: 64 roundings of 6e-8, chained.
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    return compiled.as_text()


def gradient(fn, count):
    return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), argnums=tuple(range(count)))


def test_the_matmul_whose_rows_are_permuted(mesh):
    """Fault A of XLA's partitioner: operands and result pinned, rows in another order."""
    specs = (P(BATCH, "tensor"), P("tensor", "fsdp"))
    same(mesh, jnp.matmul, (numbers(16, 16), numbers(16, 16)), specs, P(BATCH, "tensor"))


@pytest.mark.parametrize("kernel", [P("fsdp", "tensor"), P("tensor", "fsdp"), P(("fsdp", "data"))])
def test_dense_chains(mesh, kernel):
    def chain(x, *kernels):
        for w in kernels:
            x = jnp.tanh(x @ w)
        return x

    args = (numbers(16, 16), *[numbers(16, 16)] * 4)
    specs = (P(BATCH), *[kernel] * 4)
    text = same(mesh, gradient(chain, 5), args, specs, (P(), specs), params=range(1, 5))
    # What the compiler did not decide it does not send: rows stay where they are.
    assert "collective-permute" not in text


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize(
    "image", [P(BATCH), P("data"), P(None, "data"), P(None, None, None, "tensor")]
)
def test_convolutions(mesh, groups, image):
    def conv(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, (2, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    args = numbers(8, 8, 8, 8), numbers(3, 3, 8 // groups, 16)
    same(mesh, gradient(conv, 2), args, (image, P(None, None, None, "fsdp")), params=(1,))


def test_pools_and_scans_along_cut_dims(mesh):
    def pools(x):
        top = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), "SAME")
        mean = lax.reduce_window(
            top, 0.0, lax.add, (3, 2, 1), (2, 1, 2), [(0, 0), (0, 1), (2, 2)], (1, 2, 2), (2, 2, 2)
        )
        return jnp.sum(mean) * lax.associative_scan(jnp.multiply, x, axis=1)

    spec = P("data", "fsdp", "tensor")
    same(mesh, gradient(pools, 1), (numbers(8, 8, 8),), (spec,), (P(), (spec,)))


def test_slices_beyond_the_end_are_clamped(mesh):
    """Fault D: the sliced dim is cut in the result."""

    def fn(x, start):
        return lax.dynamic_slice(x, (start[0], start[1]), (4, 8))

    start = np.array([13, -3], np.int32)
    same(mesh, fn, (numbers(16, 16), start), (P("data", "fsdp"), P()), P("tensor", "data"))


def test_a_sum_that_starts_at_zero_is_complete_where_it_is_read(mesh):
    """The carry is zero on the first trip alone: what a trip computes from it is not a term."""

    def fn(x, w):
        def body(total, row):
            total = total + row @ w
            return jnp.tanh(total), total

        return lax.scan(body, jnp.zeros((8, 8)), x)

    specs = P(None, None, "tensor"), P("tensor")
    same(mesh, gradient(lambda *a: fn(*a)[1], 2), (numbers(3, 8, 8), numbers(8, 8)), specs)
    same(mesh, fn, (numbers(3, 8, 8), numbers(8, 8)), specs)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 8 * 2**-8)])
def test_a_recurrent_kernel_sends_its_gradient_once(mesh, dtype, tolerance):
    """In bfloat16 a trip rounds the sum so far, and the sum over four devices is rounded too: eight
    roundings of numbers of size 1."""

    def fn(w, x):
        w = w.astype(dtype)

        def trip(h, row):
            return jnp.tanh(row + h @ w.astype(jnp.float32)), None

        return lax.scan(trip, x[0] * 0, x)[0]

    specs = P("fsdp"), P(None, BATCH)
    grad = jax.grad(lambda *a: jnp.sum(fn(*a) ** 2))
    args = numbers(16, 16), numbers(4, 16, 16)
    text = same(mesh, grad, args, specs, specs[0], params=(0,), tolerance=tolerance)
    sums = [line for line in text.splitlines() if re.search(r"(all-reduce|reduce-scatter)\(", line)]
    assert sums
    assert not any("while/body" in line for line in sums)


@pytest.mark.parametrize(("words", "gathers"), [(64, False), (2, True)])
def test_a_large_table_is_not_gathered_for_a_lookup(mesh, words, gathers):
    """A device looks up its columns for all rows, if the words of the table are more."""

    def fn(table, ids):
        return jnp.tanh(table[ids]) * table[ids[::-1]]

    def grad(table, ids):
        return jax.value_and_grad(lambda table: jnp.sum(fn(table, ids) ** 2))(table)

    ids = np.random.default_rng(0).integers(0, words, 16).astype(np.int32)
    specs = P(None, "fsdp"), P(BATCH)
    text = same(mesh, fn, (numbers(words, 16), ids), specs, P(BATCH), params=(0,))
    assert bool(re.search(r"f32\S* all-gather\(", text)) == gathers
    same(mesh, grad, (numbers(words, 16), ids), specs, (P(), specs[0]), params=(0,))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_recomputed_layers(mesh, policy):
    def fn(stack, x):
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), policy=policy)
        return lax.scan(layer, x, stack)[0]

    kernels = jnp.stack([numbers(3, 16, 16), numbers(3, 16, 16)], 1)
    specs = P(None, None, "fsdp", "tensor"), P(BATCH)
    same(mesh, gradient(fn, 2), (kernels, numbers(8, 16)), specs, (P(), specs), params=(0,))


def test_dropout_is_bit_for_bit_that_of_one_device(mesh):
    def fn(x, w):
        y = x @ w
        keep = jax.random.bernoulli(jax.random.key(3), 0.5, y.shape)
        return jnp.where(keep, y, 0), keep

    args, specs = (numbers(16, 8), numbers(8, 8)), (P(BATCH), P(None, "tensor"))
    with sl.use(mesh, sl.rules.STANDARD):
        kept, keep = jax.jit(partitioned(fn, specs))(*args)
    np.testing.assert_array_equal(keep, fn(*args)[1])
    assert kept.sharding.spec == P(BATCH, "tensor")


def test_branches_and_loops(mesh):
    def fn(x, w):
        y = lax.cond(jnp.sum(x) > 0, lambda: jnp.tanh(x @ w), lambda: x @ w * 2)
        _, z = lax.while_loop(
            lambda s: (s[0] < 9) & (jnp.sum(s[1]) < 50), lambda s: (s[0] + 1, s[1] @ w), (0, y)
        )
        return z, lax.switch(2, [jnp.sin, jnp.cos, lambda v: v * 2], y)

    args = numbers(16, 16), numbers(16, 16)
    same(mesh, fn, args, (P(BATCH, "tensor"), P("tensor", "fsdp")), tolerance=2e-4)


def test_custom_derivatives_are_kept(mesh):
    @jax.custom_vjp
    def doubled(x):
        return jnp.sin(x)

    doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))

    def fn(x, w):
        y = doubled(x @ w)
        return jax.nn.relu(y) + jax.nn.logsumexp(y, -1, keepdims=True)

    specs = P(BATCH, None), P("fsdp", "tensor")
    same(mesh, gradient(fn, 2), (numbers(8, 16), numbers(16, 16)), specs, params=(1,))


def test_what_has_no_rule_is_computed_whole(mesh):
    def fn(x, w):
        eigen = jnp.linalg.eigvalsh(x @ x.T + w @ w.T)
        return eigen, lax.reduce(x, jnp.float32(0), lambda a, b: jnp.maximum(a, b), (0,))

    same(mesh, fn, (numbers(8, 8), numbers(8, 8)), (P(BATCH), P("tensor")), tolerance=2e-4)


def test_collectives_over_an_axis_of_vmap(mesh):
    def fn(x):
        def row(x):
            return (x - lax.pmean(x, "rows")) / (1 + lax.pmax(x, "rows")), lax.psum(x, "rows")

        return jax.vmap(row, axis_name="rows")(x)

    same(mesh, fn, (numbers(16, 8),), (P(BATCH, "tensor"),))


def test_constraints_of_the_user_stand(mesh):
    sharding = NamedSharding(mesh, P("tensor", None))

    def fn(x, w):
        return lax.with_sharding_constraint(jnp.tanh(x @ w), sharding)

    args = numbers(16, 16), numbers(16, 16)
    specs = P(BATCH), P(None, "tensor")
    same(mesh, gradient(fn, 2), args, specs)
    with sl.use(mesh, sl.rules.STANDARD):
        assert jax.jit(partitioned(fn, specs))(*args).sharding.spec == P("tensor")


def test_constraints_to_a_mesh_of_other_sizes_are_refused(mesh):
    other = NamedSharding(sl.make_mesh("data=4,fsdp=2"), P("data"))

    def fn(x):
        return jax.lax.with_sharding_constraint(x, other) * 2

    with sl.use(mesh, sl.rules.STANDARD), pytest.raises(PartitionError, match="another mesh"):
        jax.eval_shape(sl.partitioned(fn, (P(),)), jnp.zeros((8, 8)))


def test_a_compute_placement_is_that_of_the_operation_alone(mesh):
    """The sum of `y` is not part of what runs on the host."""

    def fn(x, w):
        y = x @ w
        with compute_on("device_host"):
            z = jnp.sin(y)
        return z * 2

    specs = P(None, "tensor"), P("tensor")
    with sl.use(mesh, sl.rules.STANDARD):
        jitted = jax.jit(partitioned(fn, specs))
        text = jitted.lower(numbers(8, 8), numbers(8, 8)).as_text()
    placed = [line for line in text.splitlines() if "_xla_compute_type" in line]
    assert "stablehlo.all_reduce" in text
    assert ["sine" in line for line in placed] == [True]


@pytest.mark.parametrize("axis_types", ["explicit", "mixed"])
def test_explicit_axes_place_what_lies_elsewhere(axis_types):
    mixed = (AxisType.Explicit, AxisType.Auto, AxisType.Auto)
    kinds = mixed if axis_types == "mixed" else (AxisType.Explicit,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=kinds)
    x, w = numbers(8, 8), numbers(8, 16)
    with sl.use(mesh, sl.rules.STANDARD):
        fn = jax.jit(sl.partitioned(jnp.matmul, (P("data"), P("fsdp", "tensor"))))
        result = fn(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(result, x @ w, rtol=1e-5, atol=1e-5)


def test_source_lines_survive(mesh):
    def fn(x, w):
        return jnp.tanh(x @ w)  # this line

    text = same(mesh, fn, (numbers(8, 8), numbers(8, 8)), (P(BATCH), P("tensor")))
    assert __file__.rsplit("/", 1)[-1] in text


def test_manual_regions_run_as_they_are(mesh):
    """A loop in the region sends pieces of the rows around a ring; what is whole in it is summed
    backward."""

    def on_device(x, w):
        def hop(carry, _):
            total, x = carry
            x = lax.ppermute(x, "tensor", [(0, 1), (1, 0)])
            return (total + jnp.tanh(x @ w), x), None

        return lax.scan(hop, (jnp.tanh(x @ w), x), length=1)[0][0]

    def fn(x, v, w):
        rows = P(("data", "fsdp", "tensor"), None)
        region = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(rows, P()),
            out_specs=rows,
            check_vma=False,
        )
        return region(x @ v, w) @ w

    args = numbers(16, 8), numbers(8, 16), numbers(16, 16)
    specs = P(BATCH), P(None, "tensor"), P("fsdp", "tensor")
    with sl.use(mesh, sl.rules.STANDARD):
        want = jax.jit(gradient(fn, 3))(*args)
        got = jax.jit(partitioned(gradient(fn, 3), specs))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("other", "axes", "fault"),
    [
        ("data=4,tensor=2", {"data", "tensor"}, "another mesh"),
        (None, {"tensor"}, "not manual over data, fsdp"),
    ],
    ids=["another mesh", "some of the axes"],
)
def test_regions_that_are_not_of_the_whole_mesh_are_refused(mesh, other, axes, fault):
    """XLA runs them. A device of the mesh would hold other rows, or compute those of others."""
    region = jax.shard_map(
        lambda v: v * 2,
        mesh=sl.make_mesh(other) if other else mesh,
        in_specs=P(None, "tensor"),
        out_specs=P(None, "tensor"),
        axis_names=axes,
        check_vma=False,
    )
    with sl.use(mesh, sl.rules.STANDARD), pytest.raises(PartitionError, match=fault):
        jax.jit(partitioned(region, (P(BATCH),)))(numbers(8, 8))


def test_collectives_of_regions_are_in_order(mesh):
    """On CPU devices, collectives that run at once take each other's data."""

    def on_device(x):
        def hop(carry, _):
            return lax.ppermute(carry, "tensor", [(0, 1), (1, 0)]), None

        rows = lax.all_gather(x, "data", tiled=True)
        return x * 2, lax.scan(hop, x, length=2)[0] + rows.sum()

    every = ("data", "fsdp", "tensor")
    region = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(every), out_specs=P(every), check_vma=False
    )

    def fn(x):
        doubled, sent = region(x)
        return doubled.sum() + (sent**2).sum()

    with sl.use(mesh, sl.rules.STANDARD):
        want = jax.jit(jax.value_and_grad(fn))(numbers(16, 4))
        made = jax.jit(partitioned(jax.value_and_grad(fn), (P(every),)))
        got = made(numbers(16, 4))
        text = made.lower(numbers(16, 4)).as_text()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    # Sums after the region wait for its loop.
    assert text.count("stablehlo.select") >= 1


@pytest.mark.parametrize("recomputed", [False, True])
def test_parameters_are_gathered_before_they_are_widened(mesh, recomputed):
    """A model in bfloat16 multiplies rows in float32 by a kernel that it widens."""

    def fn(x, w):
        def layer(x, w):
            return jnp.tanh(x @ w.T.astype(jnp.float32)) @ w.astype(jnp.float32)

        return (jax.checkpoint(layer) if recomputed else layer)(x, w)

    args = numbers(16, 8), numbers(8, 8).astype(jnp.bfloat16)
    specs = P(BATCH), P("fsdp", "tensor")
    same(mesh, fn, args, specs, params=(1,))
    with sl.use(mesh, sl.rules.STANDARD):
        want = jax.jit(gradient(fn, 2))(*args)
        step = jax.jit(partitioned(gradient(fn, 2), specs, params=(1,)))
        text = step.lower(*args).as_text()
        for a, b in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(want), strict=True):
            # The sum of gradients of w over 4 devices is rounded to 8 bits in each of them.
            tolerance = 4 * 2**-8 if a.dtype == jnp.bfloat16 else 2e-5
            np.testing.assert_allclose(*map(np.float32, (a, b)), rtol=tolerance, atol=tolerance)
    gathered = re.findall(r"all_gather.*-> tensor<\w*x(\w+)>", text)
    assert set(gathered) == {"bf16"}


def test_loops_hold_nothing_before_they_run(mesh):
    """The weights of a loop of the backward pass, and its gradients at zero, come after what is
    sent before it: here the gradient of a head."""
    width, classes = 128, 512

    def fn(x, w, head):
        def trip(h, row):
            return jnp.tanh(row + h @ w), None

        return lax.scan(trip, jnp.zeros_like(x[0]), x)[0] @ head

    args = numbers(2, 8, width), numbers(width, width), numbers(width, classes)
    specs = P(None, "data"), P("fsdp"), P("fsdp")
    with sl.use(mesh, sl.rules.STANDARD):
        step = partitioned(gradient(fn, 3), specs, (P(), specs), params=(1, 2))
        compiled = jax.jit(step).lower(*args).compile()
    # At most a head, the weights of one loop, and small activations.
    most = args[2].nbytes + args[1].nbytes + 8 * args[0].nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < most


def test_refusals(mesh):
    def region(x):
        return jax.shard_map(lambda v: v * 2, mesh=mesh, in_specs=P(), out_specs=P())(x)

    def prints(x):
        jax.debug.print("{}", x)
        return x

    with sl.use(mesh, sl.rules.STANDARD):
        for fn, name in ((region, "shard_map"), (prints, "debug_")):
            with pytest.raises(PartitionError, match=rf"{name}.*test_partitioned.py") as error:
                jax.jit(partitioned(fn, (P(),)))(numbers(8))
            assert "leave the function to XLA" in str(error.value)
        with pytest.raises(ModelError, match="cannot be differentiated"):
            jax.grad(lambda x: partitioned(lambda v: jnp.sum(v**2), (P(),))(x))(numbers(8))


@pytest.mark.mesh
def test_loops_and_collectives_keep_one_order_on_cpu_devices(mesh):
    """Two loops that do not read each other, and sums outside of them."""

    def fn(x, w, v):
        def loop(w):
            return lax.scan(lambda h, row: (jnp.tanh(row @ w + h @ w), None), x[0] * 0, x)[0]

        return jnp.sum(loop(w) * loop(v)), jnp.sum(x @ w @ v), jnp.sum(jnp.tanh(x) ** 2)

    args = numbers(12, 16, 16), numbers(16, 16), numbers(16, 16)
    specs = P(None, "data", "tensor"), P("tensor", "fsdp"), P("fsdp", "tensor")
    with sl.use(mesh, sl.rules.STANDARD):
        grad = jax.value_and_grad(lambda *a: sum(fn(*a)), argnums=(0, 1, 2))
        step = jax.jit(partitioned(grad, specs))
        first = jax.device_get(step(*args))
        for _ in range(10):
            again = jax.device_get(step(*args))
            jax.tree.map(np.testing.assert_array_equal, again, first)
    same(mesh, grad, args, specs, tolerance=2e-4)
