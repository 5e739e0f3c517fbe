"""From loaded weights, and modules in memory, to a training state."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.paths import named_leaves

X = jax.ShapeDtypeStruct((4, 16), jnp.float32)
STEPS = 3


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(1024)(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        return linen.Dense(16)(linen.tanh(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 1024, rngs=rngs), nnx.Linear(1024, 16, rngs=rngs)])
        self.norm = nnx.BatchNorm(1024, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(nnx.tanh(self.norm(self.layers[0](x))))
        return self.layers[1](x)


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(16, 16, rngs=rngs)
        self.lora = nnx.LoRA(16, 4, 16, rngs=rngs, b_initializer=nnx.initializers.normal(0.1))

    def __call__(self, x):
        return self.base(x) + self.lora(x)


def batch():
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    return {"x": x, "y": np.tanh(x)}


def loss_fn(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train(state):
    step, losses = sl.make_train_step(loss_fn), []
    for _ in range(STEPS):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    return state, losses


def mesh_of(text):
    return sl.make_mesh(text, devices=jax.devices()[: 1 if text == "data=1" else 8])


def start(make, mesh="fsdp=8", **options):
    if isinstance(make, linen.Module):
        options["inputs"] = (X,)
    optimizer = options.pop("optimizer", optax.adam(1e-2))
    return sl.init_state(make, optimizer, mesh=mesh_of(mesh), rules=sl.rules.FSDP, **options)


def weights():
    """The variables of a linen module, as somebody else trained them."""
    variables = Net().init(jax.random.key(7), jnp.ones((4, 16)))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), variables)


def flat(tree):
    return {path: np.array(leaf) for path, leaf in named_leaves(tree).items()}


def assert_bits(found, expected):
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        assert leaf.dtype == expected[path].dtype, path
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


def on_one(x):
    return jax.device_put(x, jax.devices()[3])


def on_others(x):
    mesh = mesh_of("data=2,fsdp=4")
    spec = P("fsdp") if x.ndim and x.shape[0] % 4 == 0 else P()
    return jax.device_put(x, NamedSharding(mesh, spec))


HELD = {"numpy": lambda x: x, "jax": jnp.asarray, "one device": on_one, "another mesh": on_others}


@pytest.mark.mesh
@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_weights_are_placed_bit_for_bit(held):
    loaded = weights()
    given = jax.tree.map(held, loaded)
    state = start(Net(), params=given)
    assert_bits(state.params, loaded["params"])
    assert_bits(state.model_state, {"batch_stats": loaded["batch_stats"]})
    kernel = state.params["Dense_0"]["kernel"]
    assert kernel.sharding.spec == P(None, "fsdp")
    assert {s.data.shape for s in kernel.addressable_shards} == {(16, 128)}
    places = [
        {path: x.sharding for path, x in named_leaves(each.params).items()}
        for each in (state, start(Net()))
    ]
    assert places[0] == places[1]
    # A step takes the memory of the state, and must not take that of what was loaded.
    state, losses = train(state)
    assert_bits(given, loaded)
    _, alone = train(start(Net(), "data=1", params=loaded))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_each_form_of_a_tree_will_do():
    loaded = weights()
    for given in (loaded["params"], named_leaves(loaded["params"])):
        assert_bits(start(Net(), params=given).params, loaded["params"])


def test_boxed_variables_of_linen():
    class Boxed(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = linen.with_partitioning(linen.initializers.normal(), ("embed", "mlp"))
            return linen.Dense(32, kernel_init=init)(x)

    variables = Boxed().init(jax.random.key(1), jnp.ones((4, 16)))
    state = start(Boxed(), params=variables)
    np.testing.assert_array_equal(
        state.params["Dense_0"]["kernel"], variables["params"]["Dense_0"]["kernel"].value
    )
    assert state.params["Dense_0"]["kernel"].sharding.spec == P("fsdp", None)


def test_model_state_may_be_left_out_as_a_whole():
    loaded = weights()
    state = start(Net(), params=loaded["params"], seed=5)
    assert_bits(state.params, loaded["params"])
    assert_bits(state.model_state, start(Net(), seed=5).model_state)


def test_the_optimizer_starts_from_the_weights():
    """Also where its state begins as the parameters themselves."""
    loaded = weights()

    def init(params):
        return {"old": params}

    def update(updates, state, params=None):
        return jax.tree.map(lambda u, old: -0.01 * (u + old), updates, state["old"]), state

    state = start(Net(), params=loaded, optimizer=optax.GradientTransformation(init, update))
    assert_bits(state.opt_state["old"], loaded["params"])
    state, _ = train(state)
    assert_bits(state.opt_state["old"], loaded["params"])


class TestModulesInMemory:
    @pytest.mark.mesh
    @pytest.mark.parametrize("held", HELD.values(), ids=HELD)
    def test_their_arrays_become_the_state(self, held):
        model = Model(nnx.Rngs(3))
        nnx.update(model, jax.tree.map(held, nnx.state(model, nnx.Not(nnx.RngState))))
        before = flat(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        state = start(model)
        assert flat(state.params).keys() == before.keys()
        assert_bits(state.params, before)
        kernel = state.params["layers"]["0"]["kernel"]
        assert kernel.sharding.spec == P(None, "fsdp")
        state, losses = train(state)
        assert losses[-1] < losses[0]
        # It stays as it was, and can be called.
        assert_bits(nnx.to_pure_dict(nnx.state(model, nnx.Param)), before)
        assert model(jnp.ones((2, 16))).shape == (2, 16)
        _, alone = train(start(Model(nnx.Rngs(3)), "data=1"))
        np.testing.assert_allclose(losses, alone, rtol=1e-5)

    def test_as_weights_of_a_recipe(self):
        model = Model(nnx.Rngs(3))
        for given in (model, nnx.state(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))):
            state = start(Model, params=given, seed=1)
            assert_bits(state.params, nnx.to_pure_dict(nnx.state(model, nnx.Param)))

    def test_by_materialize(self):
        model = Model(nnx.Rngs(3))
        with sl.use(mesh_of("fsdp=8"), sl.rules.FSDP):
            abstract = sl.abstract_state(model, optax.sgd(0.1))
        with pytest.raises(sl.ShardlibError, match=r"Model was given as a module in memory"):
            sl.materialize(abstract)
        state = sl.materialize(abstract, params=model)
        assert_bits(state.params, start(model).params)


class TestAdapters:
    @pytest.mark.mesh
    def test_the_base_is_loaded_and_the_adapter_fresh(self):
        base = nnx.to_pure_dict(nnx.state(Adapted(nnx.Rngs(9)).base))
        options = {"wrt": nnx.LoRAParam, "params": {"base": base}, "fresh": ("lora/*",)}
        state = start(Adapted, **options)
        assert_bits(state.model_state, {"base": base})
        assert_bits(state.params, start(Adapted, wrt=nnx.LoRAParam).params)
        state, losses = train(state)
        assert_bits(state.model_state, {"base": base})
        _, alone = train(start(Adapted, "data=1", **options))
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
        assert losses[-1] < losses[0]

    def test_patterns_are_checked(self):
        given = nnx.state(Adapted(nnx.Rngs(9)))
        with pytest.raises(sl.ShardlibError) as caught:
            start(Adapted, params=given, fresh=("lora/lora_a", "lro/*"))
        assert "lora/lora_a: given in params and also matched by fresh." in str(caught.value)
        assert "fresh='lro/*' matches no parameter." in str(caught.value)


def test_all_faults_are_told_and_nothing_is_allocated():
    loaded = weights()
    params = loaded["params"]
    params["Dense_0"]["kernel"] = params["Dense_0"]["kernel"].T
    params["Dense_1"]["kernel"] = params["Dense_1"]["kernel"].astype(np.float64)
    params["Dense_1"]["biass"] = params["Dense_1"].pop("bias")
    params["Dense_0"]["bias"] = params["Dense_0"]["bias"].tolist()[0]
    del loaded["batch_stats"]["BatchNorm_0"]["var"]
    before = len(jax.live_arrays())
    with pytest.raises(sl.ShardlibError) as caught:
        start(Net(), params=loaded)
    assert len(jax.live_arrays()) <= before + 1
    lines = str(caught.value).splitlines()
    assert sorted(lines[:-1]) == [
        "Dense_0/bias: a builtins.float, expected an array of numpy or JAX.",
        "Dense_0/kernel: shape (1024, 16), expected (16, 1024).",
        "Dense_1/bias: missing.",
        "Dense_1/biass: not a weight of the model. Did you mean 'Dense_1/bias'?",
        "Dense_1/kernel: dtype float64, expected float32.",
        "batch_stats/BatchNorm_0/var: missing.",
    ]
    assert lines[-1].startswith("  Give every weight of Net under its path, with its shape and dt")


def test_refuses_arrays_that_a_step_took():
    state = start(Net())
    taken = state.params
    train(state)
    with pytest.raises(sl.ShardlibError, match="Dense_0/bias: a donated or deleted array"):
        start(Net(), params=taken)


def test_bfloat16_weights_of_a_bfloat16_state():
    params = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), weights()["params"])
    state = start(Net(), params=params, precision="bf16_params")
    assert_bits(state.params, params)
    with pytest.raises(sl.ShardlibError, match=r"dtype bfloat16, expected float32"):
        start(Net(), params=params)


def test_shard_takes_arrays_from_any_device():
    loaded = weights()
    for held in HELD.values():
        placed = sl.shard(jax.tree.map(held, loaded), mesh_of("fsdp=8"), sl.rules.FSDP)
        assert_bits(placed, loaded)
        assert placed["params"]["Dense_0"]["kernel"].sharding.spec == P(None, "fsdp")
    model = Model(nnx.Rngs(3))
    nnx.update(model, jax.tree.map(on_one, nnx.state(model, nnx.Not(nnx.RngState))))
    before = flat(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    sl.shard(model, mesh_of("fsdp=8"), sl.rules.FSDP)
    assert_bits(nnx.to_pure_dict(nnx.state(model, nnx.Param)), before)
    assert model.layers[0].kernel[...].sharding.spec == P(None, "fsdp")
