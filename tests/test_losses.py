import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardlib.errors import ModelError
from shardlib.explain.analysis.collectives import collectives
from shardlib.explain.aot.topology import devices_of
from shardlib.hardware import parse_cluster
from shardlib.losses import Mean, chunked_cross_entropy, cross_entropy, masked_mean
from shardlib.mesh import make_mesh
from shardlib.rules import SEQUENCE, STANDARD, ZERO2
from shardlib.sharding.constrain import constrain, use

RTOL = 1e-5
ROWS = ("batch", "length")


def example(shape=(3, 5), vocab=11, seed=0):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(3 * rng.normal(size=(*shape, vocab)), jnp.float32)
    return logits, jnp.asarray(rng.integers(0, vocab, shape), jnp.int32)


@pytest.mark.mesh
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), smoothing=st.sampled_from([0.0, 0.1, 0.5]))
def test_equals_optax_with_smoothed_labels(seed, smoothing):
    logits, labels = example(seed=seed)
    loss, metrics = cross_entropy(logits, labels, label_smoothing=smoothing)
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 11), smoothing)
    expected = optax.softmax_cross_entropy(logits, smooth)
    np.testing.assert_allclose(loss.total, expected.sum(), rtol=RTOL)
    assert loss.weight == 15
    plain = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(metrics["nll_nats"].value, plain.mean(), rtol=RTOL)
    hits = (logits.argmax(-1) == labels).mean()
    np.testing.assert_allclose(metrics["accuracy"].value, hits, rtol=RTOL)


@pytest.mark.mesh
def test_z_loss_is_the_squared_log_normaliser_and_has_its_gradient():
    logits, labels = example()

    def added(logits):
        loss, metrics = cross_entropy(logits, labels, z_loss=0.25)
        return loss.total - metrics["nll_nats"].total

    def expected(logits):
        return 0.25 * jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2)

    np.testing.assert_allclose(added(logits), expected(logits), rtol=RTOL)
    np.testing.assert_allclose(jax.grad(added)(logits), jax.grad(expected)(logits), atol=1e-5)


def test_masked_positions_count_nowhere_whatever_they_hold():
    logits, labels = example()
    mask = jnp.asarray(np.random.default_rng(1).random((3, 5)) < 0.5)
    garbage = jnp.where(mask, labels, -100)

    def total(logits, labels):
        return cross_entropy(logits, labels, mask, label_smoothing=0.1, z_loss=1e-3)[0].total

    assert total(logits, garbage) == total(logits, labels)
    gradient = jax.grad(total)(logits, garbage)
    assert jnp.all(gradient[~mask] == 0)
    assert cross_entropy(logits, labels, mask)[0].weight == int(mask.sum())


@pytest.mark.mesh
def test_microbatches_add_up_to_the_batch():
    logits, labels = example((8, 5))
    mask = jnp.asarray(np.random.default_rng(1).random((8, 5)) < 0.5)
    whole, _ = cross_entropy(logits, labels, mask)
    parts = [cross_entropy(logits[i::4], labels[i::4], mask[i::4])[0] for i in range(4)]
    added = Mean(sum(p.total for p in parts), sum(p.weight for p in parts))
    np.testing.assert_allclose(added.value, whole.value, rtol=RTOL)


def test_a_mean_of_nothing_is_zero_with_zero_gradient():
    def value(x):
        return masked_mean(x, jnp.zeros(3, bool)).value

    assert value(jnp.ones(3)) == 0
    assert jnp.all(jax.grad(value)(jnp.ones(3)) == 0)


def test_bfloat16_logits_are_summed_in_float32():
    logits, labels = example()
    loss, _ = cross_entropy(logits.astype(jnp.bfloat16), labels)
    exact, _ = cross_entropy(logits.astype(jnp.bfloat16).astype(jnp.float32), labels)
    assert loss.total.dtype == jnp.float32
    assert loss.total == exact.total


def test_a_tie_counts_as_the_first_of_the_largest():
    logits = jnp.zeros((1, 4))
    assert cross_entropy(logits, jnp.array([0]))[1]["accuracy"].value == 1
    assert cross_entropy(logits, jnp.array([2]))[1]["accuracy"].value == 0


@pytest.mark.mesh
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_logits_sharded_over_the_vocabulary_stay_where_they_are(axis_type):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    logits, labels = example((4, 6), vocab=16)
    at = jax.device_put(logits, NamedSharding(mesh, P("data", None, "tensor")))
    labels_at = jax.device_put(labels, NamedSharding(mesh, P("data", None)))

    def run(logits, labels):
        def loss(logits):
            return cross_entropy(logits, labels, label_smoothing=0.1, z_loss=1e-3)[0].value

        return jax.value_and_grad(loss)(logits), cross_entropy(logits, labels)[1]

    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(at, labels_at).compile()
        (value, gradient), metrics = compiled(at, labels_at)
    text = compiled.as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    (expected, expected_gradient), expected_metrics = run(logits, labels)
    np.testing.assert_allclose(value, expected, rtol=RTOL)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    np.testing.assert_allclose(
        metrics["accuracy"].value, expected_metrics["accuracy"].value, rtol=RTOL
    )


CHUNKED = {"label_smoothing": 0.1, "z_loss": 1e-3}


def project(weights, x):
    logits = jax.lax.dot_general(x, weights, (((2,), (0,)), ((), ())))
    return constrain(logits, "batch", "length", "vocab")


def chunked_example(batch=4, length=12, embed=8, vocab=16, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    weights = jnp.asarray(rng.normal(size=(embed, vocab)), dtype)
    x = jnp.asarray(rng.normal(size=(batch, length, embed)), dtype)
    labels = jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32)
    return weights, x, labels, jnp.asarray(rng.random((batch, length)) < 0.7)


def in_chunks(weights, x, labels, mask, num_chunks):
    options = {"axes": ("embed", "vocab"), "num_chunks": num_chunks, **CHUNKED}
    return chunked_cross_entropy(project, weights, x, labels, mask, **options)


def whole(weights, x, labels, mask):
    return cross_entropy(project(weights, x), labels, mask, **CHUNKED)


def value_and_gradients(loss):
    def value(weights, x, labels, mask):
        mean, metrics = loss(weights, x, labels, mask)
        return mean.value, metrics

    return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)


def assert_same(found, expected):
    # Sums of at most 192 float32 terms in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=RTOL, atol=1e-6 * abs(b).max()),
        jax.device_get(found),
        jax.device_get(expected),
    )


@pytest.mark.mesh
@settings(max_examples=12, deadline=None)
@given(
    vocab=st.integers(2, 40),
    num_chunks=st.integers(1, 12),
    smoothing=st.sampled_from([0.0, 0.1]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    softcap=st.sampled_from([None, 2.0]),
    masked=st.booleans(),
    tied=st.booleans(),
    seed=st.integers(0, 99),
)
def test_chunks_of_any_vocabulary(
    vocab, num_chunks, smoothing, z_loss, softcap, masked, tied, seed
):
    """With ties between classes, labels that no class has where masked, and arrays without classes:
    one with a gradient, and a random key."""
    weights, x, labels, mask = chunked_example(vocab=vocab, seed=seed)
    labels, mask = (jnp.where(mask, labels, -1), mask) if masked else (labels, None)
    # Sums of whole numbers are exact, so that equal columns give equal logits.
    weights, x = jnp.round(weights), jnp.round(2 * x)
    head = {
        "kernel": weights.T if tied else weights,
        "bias": jnp.arange(vocab, dtype=jnp.float32) % 3,
        "scale": jnp.full(8, 0.5),
        "key": jax.random.key(seed),
    }
    axes = {
        "kernel": ("vocab", "embed") if tied else ("embed", "vocab"),
        "bias": ("vocab",),
        "scale": ("embed",),
        "key": (),
    }

    def project(head, x):
        x = x * head["scale"][None, None] + jax.random.randint(head["key"], x.shape, 0, 2).astype(
            x.dtype
        )
        logits = jax.lax.dot_general(x, head["kernel"], (((2,), (tied,)), ((), ())))
        logits = logits + head["bias"][None, None]
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)

    options = {"label_smoothing": smoothing, "z_loss": z_loss}

    def chunked(head, x):
        n = min(num_chunks, vocab)
        options_of_chunks = {"axes": axes, "num_chunks": n, **options}
        mean, metrics = chunked_cross_entropy(project, head, x, labels, mask, **options_of_chunks)
        return mean.value, metrics

    def plain(head, x):
        mean, metrics = cross_entropy(project(head, x), labels, mask, **options)
        return mean.value, metrics

    found, expected = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True))(head, x)
        for loss in (chunked, plain)
    )
    for result in (found, expected):
        del result[1][0]["key"]  # Its gradient has the dtype float0.
    assert_same(found, expected)


def placements(scope, arguments):
    """Shardings of the arguments of a loss as a model has them."""
    residual = ("batch", "residual_length", "embed")
    names = ["embed", "vocab"], residual, ROWS, ROWS
    kinds = ["params", *["activations"] * 3]
    return [
        scope.sharding(tuple(axes), array.shape, kind)
        for array, axes, kind in zip(arguments, names, kinds, strict=True)
    ]


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        ("data=2,fsdp=2,tensor=2", SEQUENCE),
        ("context=2,tensor=4", SEQUENCE),
        ("data=8", STANDARD),
        ("fsdp=8", ZERO2),
        # Weights are stored in another way than they are used.
        ("fsdp=4,tensor=2", STANDARD.override(vocab="fsdp", embed="tensor")),
    ],
)
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_chunks_give_the_loss_of_the_whole(mesh, rules, num_chunks):
    arguments = chunked_example(batch=8, length=24)
    expected = value_and_gradients(whole)(*arguments)
    chunked = value_and_gradients(functools.partial(in_chunks, num_chunks=num_chunks))
    with use(make_mesh(mesh), rules) as scope:
        found = jax.jit(chunked, in_shardings=placements(scope, arguments))(*arguments)
    assert_same(found, expected)


@pytest.mark.parametrize("mesh", ["data=2,fsdp=4", "fsdp=4,tensor=2"])
@pytest.mark.rest("mesh")
def test_each_chunk_of_the_weights_travels_twice_and_its_gradient_once(mesh):
    arguments = chunked_example(batch=8, embed=16, vocab=256)
    with use(make_mesh(mesh), STANDARD) as scope:
        placed = placements(scope, arguments)
        chunked = value_and_gradients(functools.partial(in_chunks, num_chunks=4))
        outputs = None, (placed[0], placed[1])
        step = jax.jit(chunked, in_shardings=placed, out_shardings=outputs)
        compiled = step.lower(*arguments).compile()
    tensor = scope.sizes["tensor"] if "tensor" in mesh else 1
    chunk_bytes = 4 * 16 * 256 // (4 * tensor)
    statistic_bytes = 4 * 8 * 12
    found = [c for c in collectives(compiled, scope.mesh) if c.bytes > statistic_bytes]
    inside, outside = ([c for c in found if c.in_loop is where] for where in (True, False))
    assert all(c.count == 4 for c in inside)
    sent = [(c.kind, c.mesh_axes, c.bytes) for c in inside]
    # XLA for CPU makes no reduce-scatter of an all-reduce of which each device reads its part.
    expected = [("all-gather", ("fsdp",), chunk_bytes)] * 2
    expected += [("all-reduce", ("fsdp",), chunk_bytes)]
    expected += [("all-reduce", ("data",), chunk_bytes // 4)] if "data" in mesh else []
    assert sorted(sent) == sorted(expected)
    # The sum over parts of the gradient of x.
    assert [c.mesh_axes for c in outside] == ([("tensor",)] if tensor > 1 else [])


@pytest.mark.mesh
def test_gradients_of_16_bits_are_added_up_in_float32_over_chunks():
    weights, x, labels, mask = chunked_example(vocab=64, dtype=jnp.bfloat16)
    (_, _), narrow = value_and_gradients(functools.partial(in_chunks, num_chunks=64))(
        weights, x, labels, mask
    )
    _, at_once = value_and_gradients(whole)(weights, x, labels, mask)
    wide = [a.astype(jnp.float32) for a in (weights, x)]
    _, exact = value_and_gradients(whole)(*wide, labels, mask)
    for found, one_sum, expected in zip(narrow, at_once, exact, strict=True):
        assert found.dtype == jnp.bfloat16
        off, least = (jnp.abs(g.astype(jnp.float32) - expected).max() for g in (found, one_sum))
        # Beyond what the logits are off: each chunk's part is rounded once. 64 sums in 16 bits
        # would be off by several times as much.
        assert off <= least + 2**-9 * jnp.abs(expected).max()


@pytest.mark.aot
def test_on_tpus_gradients_of_chunks_are_scattered_and_memory_is_that_of_a_chunk(tpu_devices):
    vocab, embed, length = 128256, 4096, 2048
    shapes = jax.eval_shape(lambda: chunked_example(8, length, embed, 16, jnp.bfloat16))
    weights = jax.ShapeDtypeStruct((embed, vocab), jnp.bfloat16)
    with use(make_mesh("fsdp=8,tensor=2", devices=tpu_devices("v5e:4x4")), STANDARD) as scope:
        placed = placements(scope, [weights, *shapes[1:]])
        chunked = value_and_gradients(functools.partial(in_chunks, num_chunks=8))
        step = jax.jit(chunked, in_shardings=placed, out_shardings=(None, tuple(placed[:2])))
        # Without the loops of overlapped matmuls, which send the same bytes in many small hops.
        options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 100000}
        compiled = step.lower(weights, *shapes[1:]).compile(compiler_options=options)
    part = vocab // 2
    logits_bytes, table_bytes = 4 * length * part, 2 * embed * part
    large = [c for c in collectives(compiled, scope.mesh) if c.sent_bytes > table_bytes / 100]
    kinds = [c.kind for c in large if c.mesh_axes == ("fsdp",)]
    assert sorted(kinds) == ["all-gather", "all-gather", "reduce-scatter"]
    # Each once, but for the classes that fill the last tile.
    sent = sum(c.sent_bytes for c in large if c.mesh_axes == ("fsdp",))
    assert sent == pytest.approx(3 * table_bytes * 7 / 8, rel=0.02)
    held = compiled.memory_analysis()
    assert held is not None
    assert held.temp_size_in_bytes < (logits_bytes + table_bytes) / 2


@pytest.mark.aot
def test_on_gpus_the_gradient_of_the_logits_takes_their_place():
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    device = SingleDeviceSharding(devices_of(parse_cluster("8xh100"))[0])
    batch, length, embed, vocab = 2, 4096, 256, 128256

    def loss(x, weights, labels):
        mean, metrics = cross_entropy(x @ weights, labels)
        return mean.total, metrics

    shapes = {(batch, length, embed): jnp.bfloat16, (embed, vocab): jnp.bfloat16}
    arguments = [jax.ShapeDtypeStruct(*item, sharding=device) for item in shapes.items()]
    labels = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=device)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    held = step.lower(*arguments, labels).compile().memory_analysis()
    # In bfloat16; twice as much where the gradient has memory of its own.
    assert held.temp_size_in_bytes < 1.1 * 2 * batch * length * vocab


def test_logits_of_one_chunk_live_at_a_time():
    shapes = jax.eval_shape(lambda: chunked_example(length=256, vocab=512))

    def temporaries(num_chunks):
        loss = value_and_gradients(functools.partial(in_chunks, num_chunks=num_chunks))
        return jax.jit(loss).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits_bytes = 4 * 256 * 512 * 4
    # Of a chunk: its logits, their gradient and what the softmax takes in between.
    assert temporaries(16) < logits_bytes / 2
    assert temporaries(1) > logits_bytes


def test_chunks_that_a_device_cannot_make_are_refused():
    arguments = chunked_example()
    with pytest.raises(ModelError, match=r"17 chunks .* 16 classes of a device.*\n  .* 1 to 16"):
        in_chunks(*arguments, num_chunks=17)
    with (
        use(make_mesh("data=2,tensor=4"), STANDARD),
        pytest.raises(ModelError, match=r"0 chunks .* 4 classes of a device.*\n  .* 1 to 4"),
    ):
        in_chunks(*arguments, num_chunks=0)


@pytest.mark.parametrize("axes", [(), ("vocab",), ("embed", None), ("vocab", "vocab"), "embed"])
def test_axes_that_do_not_fit_the_weights_are_refused(axes):
    weights, x, labels, _ = chunked_example()
    with pytest.raises(ModelError, match=r"\(8, 16\).*\n  Give each array .*'vocab'"):
        chunked_cross_entropy(project, weights, x, labels, axes=axes, num_chunks=2)
