"""Training states: made on their shards, equal on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.explain.analysis.params import explain_params
from shardlib.mesh import abstract_mesh
from shardlib.paths import named_leaves
from shardlib.train.state import state_shardings


class Model(nnx.Module):
    def __init__(self, rngs):
        def named(*axes):
            init = nnx.initializers.normal()
            return nnx.with_metadata(init, out_sharding=axes, eager_sharding=False)

        self.up = nnx.Linear(16, 32, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(32, 16, kernel_init=named("mlp", "embed"), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.down(jax.nn.relu(self.up(x)))))


MESHES = ("data=8", "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2")
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def state_on(mesh, num_devices=8, **options):
    mesh = sl.make_mesh(mesh, devices=jax.devices()[:num_devices])
    return sl.init_state(Model, OPTIMIZER, mesh=mesh, rules=sl.rules.STANDARD, **options)


def host(state):
    leaves = named_leaves(state)
    return {p: jax.random.key_data(x) if p == "rng" else x for p, x in leaves.items()}


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("mesh", MESHES)
def test_values_are_bit_identical_on_every_mesh(mesh):
    alone, found = host(state_on("data=1", 1)), host(state_on(mesh))
    assert list(found) == list(alone)
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, alone[path], err_msg=path)


def test_another_seed_gives_another_state():
    a, b = host(state_on("data=8", seed=0)), host(state_on("data=8", seed=1))
    assert (a["params/up/kernel"] != b["params/up/kernel"]).any()
    assert (a["rng"] != b["rng"]).any()


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5], ids=str)
def test_seeds_that_would_be_cut_or_rounded_are_refused(seed):
    with pytest.raises(ModelError, match=r"seed=\S+ is not a whole number.*\n  Choose another"):
        state_on("data=8", seed=seed)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_leaf_is_made_on_its_shards(mesh):
    abstract = sl.abstract_state(Model, OPTIMIZER, mesh=sl.make_mesh(mesh), rules=sl.rules.STANDARD)
    state = state_on(mesh)
    expected = named_leaves(state_shardings(state))
    for path, leaf in named_leaves(state).items():
        planned = named_leaves(abstract)[path]
        assert leaf.shape == planned.shape
        assert leaf.dtype == planned.dtype
        assert leaf.sharding == expected[path] == planned.sharding
        assert leaf.committed
    each = explain_params(state).bytes_per_device()
    for device in jax.devices():
        held = sum(
            shard.data.nbytes
            for section in (state.params, state.model_state, state.opt_state)
            for leaf in jax.tree.leaves(section)
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        assert held == each


def test_no_device_holds_a_whole_parameter_while_they_are_made(monkeypatch):
    """The program that makes the state hands out nothing but shards, and needs little beside."""
    compiled = []
    jit = jax.jit

    def spy(function, **options):
        jitted = jit(function, **options)
        if "out_shardings" not in options:
            return jitted
        return lambda *args: compiled.append(jitted.lower(*args).compile()) or jitted(*args)

    monkeypatch.setattr(jax, "jit", spy)
    state = state_on("fsdp=8")
    (program,) = compiled
    sharded = explain_params(state).bytes_per_device()
    assert program.memory_analysis().output_size_in_bytes <= sharded + 4096
    whole = {tuple(leaf.shape) for leaf in jax.tree.leaves(state.params) if leaf.ndim == 2}
    assert whole == {(16, 32), (32, 16)}


def test_an_abstract_state_needs_no_devices():
    mesh = abstract_mesh("fsdp=8,tensor=8", 64)
    before = len(jax.live_arrays())
    state = sl.abstract_state(Model, optax.sgd(0.1), mesh=mesh, rules=sl.rules.STANDARD)
    assert len(jax.live_arrays()) <= before + 1
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    assert state.params["up"]["kernel"].sharding.spec == P("fsdp", "tensor")


def test_the_active_scope_is_the_default():
    with sl.use(sl.make_mesh("fsdp=8"), sl.rules.FSDP):
        state = sl.init_state(Model, optax.sgd(0.1))
    assert state.params["up"]["kernel"].sharding.spec == P("fsdp", None)
    with pytest.raises(sl.ShardlibError, match="no active mesh and rules"):
        sl.init_state(Model, optax.sgd(0.1))


def test_the_model_of_a_state_can_be_called():
    state = state_on("fsdp=4,tensor=2")
    model = state.model
    model.eval()
    x = jnp.ones((2, 16))
    alone = state_on("data=1", 1).model
    alone.eval()
    np.testing.assert_allclose(model(x), alone(x), rtol=1e-6)


def test_all_faults_are_told_and_nothing_is_made():
    class Odd(nnx.Module):
        def __init__(self, rngs):
            def param(shape, *axes):
                value = jnp.zeros(shape)
                return nnx.Param(value, out_sharding=axes, eager_sharding=False)

            self.a = param((6, 4), "embed", "mlp")
            self.b = param((10, 4), "embed", "mlp")
            self.c = param((8, 4), "embed")
            self.d = param((8, 4), "emebd", "mlp")

    before = len(jax.live_arrays())
    faults = (
        "(?s)a: logical axis 'embed'.*b: logical axis.*c: logical axes.*d: logical axis 'emebd'"
    )
    with pytest.raises(sl.ShardlibError, match=faults + ".*Did you mean 'embed'.*Add one"):
        sl.init_state(Odd, optax.sgd(0.1), mesh=sl.make_mesh("fsdp=8"), rules=sl.rules.FSDP)
    assert len(jax.live_arrays()) <= before + 1
