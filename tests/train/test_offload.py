"""The optimizer state in host memory: the same updates, and where every leaf is between them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.checkpoint import CheckpointConfig, RunCheckpoints
from shardlib.errors import MeshError
from shardlib.explain.aot.topology import devices_of
from shardlib.hardware import parse_cluster
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.optim.ema import average_params, ema_params
from shardlib.registry import DataSpec
from shardlib.sharding.host_memory import check_host_memory, missing_host_memory
from shardlib.train.offload import offload_optimizer
from shardlib.train.state import abstract_state, materialize
from shardlib_models.transformer import FAMILY

WIDTH = 8
BATCH = {
    "x": np.random.default_rng(0).standard_normal((16, WIDTH), dtype=np.float32),
    "y": np.random.default_rng(1).standard_normal((16, WIDTH), dtype=np.float32),
}
EPS = float(jnp.finfo(jnp.float32).eps)


class Layer(nnx.Module):
    def __init__(self, rngs):
        kernel = jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH**0.5
        self.kernel = nnx.Param(kernel, out_sharding=("embed", "mlp"), eager_sharding=False)
        self.bias = nnx.Param(jnp.zeros(WIDTH), out_sharding=("norm",), eager_sharding=False)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = stack_layers(Layer, 3, rngs)
        self.first, self.last = Layer(rngs), Layer(rngs)

    def __call__(self, x):
        def call(layer, x, _=None):
            return jnp.tanh(x @ layer.kernel[...] + layer.bias[...][None]), None

        x = scan_layers(call, self.layers, call(self.first, x)[0])[0]
        return call(self.last, x)[0]


def loss(model, batch, rng):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def coupled():
    """Every update depends on the optimizer state of every parameter."""

    def update(grads, state, params=None):
        moment = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        scale = 0.1 / (1.0 + optax.tree.norm(moment) + optax.tree.norm(state))
        return jax.tree.map(lambda m: -scale * m, moment), moment

    return optax.GradientTransformation(optax.tree.zeros_like, update)


OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=WIDTH),
    "averaged": lambda: optax.chain(optax.sgd(0.1, momentum=0.9), average_params(0.9)),
    "coupled": coupled,
    "no state": lambda: optax.sgd(0.1),
}


def abstract(optimizer, *, offloads, mesh="data=2,fsdp=2,tensor=2", rules=sl.rules.STANDARD):
    state = abstract_state(Model, optimizer, mesh=sl.make_mesh(mesh), rules=rules)
    return offload_optimizer(state) if offloads else state


def trained(optimizer, steps=2, **options):
    state = materialize(abstract(optimizer, **options), seed=0)
    step = sl.make_train_step(loss)
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return state


def kinds(tree):
    return jax.tree.map(lambda leaf: leaf.sharding.memory_kind, tree)


def assert_close(found, expected):
    """Up to the rounding of sums and products that two programs fuse differently: a chain of some
    ten operations in each of two steps, relative to the largest number of the leaf."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=20 * EPS, atol=20 * EPS * np.max(np.abs(b)))


@pytest.mark.mesh
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_a_state_on_the_devices(name):
    found = trained(OPTIMIZERS[name](), offloads=True)
    expected = trained(OPTIMIZERS[name](), offloads=False)
    assert_close((found.params, found.opt_state), (expected.params, expected.opt_state))
    moved = {k for k in jax.tree.leaves(kinds(found.opt_state)) if k == "pinned_host"}
    assert moved == (set() if name == "no state" else {"pinned_host"})


def test_only_what_is_as_large_as_parameters_moves_and_it_stays_there():
    start = materialize(abstract(optax.adam(1e-2), offloads=True))
    placed = jax.tree.map(lambda leaf: leaf.sharding, start)
    adam = kinds(start.opt_state)[0]
    assert set(jax.tree.leaves((adam.mu, adam.nu))) == {"pinned_host"}
    assert adam.count == "device"
    assert set(jax.tree.leaves(kinds(start.params))) == {"device"}
    state, _ = sl.make_train_step(loss)(start, BATCH)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == placed
    on_devices = abstract(optax.adam(1e-2), offloads=False)
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(on_devices.opt_state)]
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(state.opt_state)] == specs


@pytest.mark.mesh
def test_with_a_table_of_its_own_for_the_optimizer_state():
    options = {"mesh": "data=4,fsdp=2", "rules": sl.rules.ZERO1}
    found = trained(optax.adamw(1e-2), offloads=True, **options)
    expected = trained(optax.adamw(1e-2), offloads=False, **options)
    assert_close((found.params, found.opt_state), (expected.params, expected.opt_state))


@pytest.mark.mesh
def test_averaged_parameters_are_fetched_to_evaluate():
    optimizer = OPTIMIZERS["averaged"]()
    evaluate = sl.make_eval_step(loss, params_of=lambda state: ema_params(state.opt_state))
    found = [evaluate(trained(optimizer, offloads=o), BATCH)["loss"].value for o in (True, False)]
    np.testing.assert_allclose(*found, rtol=20 * EPS)


@pytest.mark.mesh
def test_checkpoints_go_from_and_to_host_memory(tmp_path):
    optimizer = optax.adamw(1e-2)
    offloaded, plain = (abstract(optimizer, offloads=offloads) for offloads in (True, False))
    state = trained(optimizer, offloads=True)
    with RunCheckpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(2, state, {})
        checkpoints.wait()
        for target in (offloaded, plain):
            found = checkpoints.restore(2, target)
            assert kinds(found) == kinds(target)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
                assert a.dtype == b.dtype
                if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                    np.testing.assert_array_equal(a, b)


def test_explain_tells_host_memory_from_the_devices():
    report = sl.explain(abstract(optax.adam(1e-2), offloads=True))
    plain = sl.explain(abstract(optax.adam(1e-2), offloads=False))
    count = 4
    assert report.bytes_per_device("opt_state") == count
    assert report.host_bytes_per_device("opt_state") == plain.bytes_per_device("opt_state") - count
    assert plain.host_bytes_per_device() == 0
    assert report.bytes_per_device("params") == plain.bytes_per_device("params")
    assert "4 B on each device, 960 B for each in host memory" in str(report)
    assert "host" not in str(plain)


def test_a_platform_without_host_memory_is_named():
    check_host_memory(sl.make_mesh("data=8"), "this")
    assert missing_host_memory("cpu", ["device", "pinned_host"], "this") is None
    text = missing_host_memory("neuron", ["device"], "an optimizer state in host memory")
    assert re.search("needs pinned_host memory, but the neuron .*\n  Leave it out, or", text)


@pytest.mark.aot
def test_gpus_that_are_not_attached_have_host_memory_for_activations_alone():
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    mesh = sl.make_mesh("data=8", devices=devices_of(parse_cluster("8xh100")))
    check_host_memory(mesh, "this", on_absent_gpus=True)
    with pytest.raises(MeshError, match=r"^this needs pinned_host .* none that is known"):
        check_host_memory(mesh, "this")


@pytest.fixture
def tpu_step(tpu_devices):
    """Compiles the step of a small transformer for four TPU v5e, none of which is there."""
    mesh = sl.make_mesh("fsdp=4", devices=tpu_devices("v5e:2x2"))
    data = DataSpec(vocab_size=256, sequence_length=LENGTH)
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)

    def compiled(remat="full", *, offloads=False):
        sizes = {"num_layers": LAYERS, "embed_dim": EMBED, "mlp_dim": MLP, "vocab_size": 256}
        config = FAMILY.config(num_heads=2, attention="xla", remat=remat, **sizes)
        state = abstract_state(
            lambda rngs: FAMILY.make(config, data, rngs),
            optax.adamw(1e-2),
            mesh=mesh,
            rules=sl.rules.STANDARD,
            precision="bf16",
        )
        step = sl.make_train_step(functools.partial(FAMILY.loss, train=True), precision="bf16")
        state = offload_optimizer(state) if offloads else state
        batch = {"tokens": tokens, "targets": tokens}
        return state, step.lower(state, batch).compile().memory_analysis()

    return compiled


ROWS, LENGTH, LAYERS, EMBED, MLP = 32, 512, 16, 256, 1024


@pytest.mark.mesh
def test_on_tpu_activations_leave_the_devices(tpu_step):
    _, saved = tpu_step("save:mlp_hidden")
    _, offloaded = tpu_step("offload:mlp_hidden")
    hidden = LAYERS * (ROWS // 4) * LENGTH * MLP * 2  # bf16, the rows of one device
    assert offloaded.host_temp_size_in_bytes == hidden
    # Those of a few layers are on their way, so that the copies run beside the computation.
    less = saved.temp_size_in_bytes - offloaded.temp_size_in_bytes
    assert less >= hidden * (1 - 4 / LAYERS)


@pytest.mark.mesh
def test_on_tpu_an_optimizer_state_is_never_whole_on_a_device(tpu_step):
    _, on_devices = tpu_step()
    state, offloaded = tpu_step(offloads=True)
    moments = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state.opt_state)
        if leaf.sharding.memory_kind == "pinned_host"
    )
    assert offloaded.host_argument_size_in_bytes >= moments
    assert offloaded.host_alias_size_in_bytes == offloaded.host_argument_size_in_bytes
    less = on_devices.argument_size_in_bytes - offloaded.argument_size_in_bytes
    assert less >= 0.99 * moments
    more = offloaded.temp_size_in_bytes - on_devices.temp_size_in_bytes
    # The largest piece: an MLP's matrix is an eighth of the parameters.
    assert more <= moments / 4
