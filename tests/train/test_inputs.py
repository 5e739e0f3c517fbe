"""Inputs of a step that are not a batch: teachers, target networks, adversaries."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import DataError, ModelError
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.train.evaluate import evaluate

RNG = np.random.default_rng(0)
BATCHES = [{"x": RNG.standard_normal((16, 8), dtype=np.float32)} for _ in range(4)]
MESH = "data=2,fsdp=2,tensor=2"
# A few steps in float32 with sums in another order.
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def names(*axes):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class MLP(nnx.Module):
    """Constrained where it computes, so that the partitioner has nothing to guess."""

    def __init__(self, rngs, hidden=16, out=8):
        self.up = nnx.Linear(8, hidden, kernel_init=names("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(hidden, out, kernel_init=names("mlp", None), rngs=rngs)

    def __call__(self, x):
        x = sl.constrain(x, "batch", "embed")
        h = sl.constrain(jnp.tanh(self.up(x)), "batch", "mlp")
        return sl.constrain(self.down(h), "batch", None)


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.layers = stack_layers(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 2, rngs)

    def __call__(self, x):
        call = lambda layer, x, _: (jnp.tanh(layer(x)), None)  # noqa: E731
        return scan_layers(call, self.layers, x)[0]


def start(make, mesh, seed=0, optimizer=None):
    devices = jax.devices()[:1] if mesh == "data=1" else None
    with sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD):
        return sl.init_state(make, optimizer or optax.adam(1e-2), seed=seed)


def distil(model, batch, rng, teacher, weight):
    return weight * jnp.mean(jnp.square(model(batch["x"]) - teacher.model(batch["x"])))


def students(mesh, make=MLP, **options):
    state, teacher = start(make, mesh), start(lambda rngs: MLP(rngs, 32), mesh, seed=1)
    step, losses = sl.make_train_step(distil, **options), []
    for index, batch in enumerate(BATCHES):
        state, metrics = step(state, batch, teacher, 1.0 + index)
        losses.append(float(metrics["loss"]))
    assert len(step._programs) == 1
    last = sl.make_eval_step(distil)
    losses.append(evaluate(last, state, BATCHES[:1], teacher, 1.0)["loss"])
    assert not any(x.is_deleted() for x in jax.tree.leaves(teacher))
    return jax.device_get(state.params), losses


@pytest.fixture(scope="module")
def alone():
    return students("data=1")


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MESH, {}),
        (MESH, {"microbatches": 4}),
        ("data=4,fsdp=2", {"reduction": sl.ReductionConfig(dtype="f32")}),
    ],
)
def test_knowledge_distillation_is_that_of_one_device(alone, mesh, options):
    found = students(mesh, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, alone)
    assert found[1][-1] < found[1][0]


@pytest.mark.mesh
def test_distillation_over_stages():
    expected = students("data=1", Deep, microbatches=4)
    found = students("stage=2,data=2,tensor=2", Deep, microbatches=4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, expected)


def test_where_inputs_lie():
    state = start(MLP, MESH)
    mesh = state.definition.scope.mesh
    kept = jax.device_put(np.ones((8, 8), np.float32), jax.NamedSharding(mesh, jax.P(None, "data")))
    inputs = {"host": np.ones((128, 256), np.float32), "kept": kept, "one": jnp.ones((128, 256))}

    def loss_fn(model, batch, rng, inputs, scale):
        total = sum(jnp.sum(x) for x in jax.tree.leaves(inputs)) * scale
        return jnp.mean(model(batch["x"])) + 0.0 * total, {"total": total}

    step = sl.make_train_step(loss_fn)
    placed = step._program(state, BATCHES[0], (inputs, 0.5)).placed[1]
    assert placed["kept"] == kept.sharding
    assert placed["host"].spec == placed["one"].spec == jax.P(None, "fsdp")
    inputs["one"] = jax.device_put(inputs["one"], jax.devices()[3])  # Committed to one device.
    _, metrics = step(state, BATCHES[0], inputs, 0.5)
    assert float(metrics["total"]) == (2 * 128 * 256 + 64) / 2


def generator_loss(generator, batch, rng, critic):
    fake = generator(batch["x"])
    return jnp.mean(jax.nn.softplus(-critic.model(fake))), {"fake": jnp.mean(fake)}


def critic_loss(critic, batch, rng, generator):
    fake = jax.nn.softplus(critic(generator.model(batch["x"])))
    real = jax.nn.softplus(-critic(jnp.tanh(batch["x"])))
    return jnp.mean(fake) + jnp.mean(real)


def adversaries(mesh):
    generator = start(MLP, mesh, seed=1)
    critic = start(lambda rngs: MLP(rngs, 32, 1), mesh, seed=2, optimizer=optax.sgd(0.1))
    generator_step = sl.make_train_step(generator_loss, microbatches=2)
    critic_step = sl.make_train_step(critic_loss)
    found = []
    for batch in BATCHES:
        critic, of_critic = critic_step(critic, batch, generator)
        generator, of_generator = generator_step(generator, batch, critic)
        found.append([float(of_critic["loss"]), float(of_generator["loss"])])
    return jax.device_get((found, generator.params, critic.params))


@pytest.mark.mesh
def test_two_models_that_train_each_other_are_those_of_one_device():
    found, expected = adversaries(MESH), adversaries("data=1")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, expected)
    losses = np.array(found[0])
    assert (np.abs(np.diff(losses, axis=0)) > 1e-4).all()


def test_two_optimizers_for_one_model():
    def by_part(params):
        return {"up": jax.tree.map(lambda _: "slow", params["up"])} | {
            "down": jax.tree.map(lambda _: "fast", params["down"])
        }

    parts = {"slow": optax.sgd(1e-3), "fast": optax.adam(1e-2)}

    def train(mesh):
        state = start(MLP, mesh, optimizer=optax.multi_transform(parts, by_part))
        step = sl.make_train_step(lambda model, batch: jnp.mean(jnp.square(model(batch["x"]) - 1)))
        for batch in BATCHES:
            state, _ = step(state, batch)
        return jax.device_get(state.params)

    found, expected = train(MESH), train("data=1")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, expected)


def test_inputs_that_cannot_be_taken():
    state, step = start(MLP, MESH), sl.make_train_step(distil)
    taken = start(MLP, MESH, seed=1)
    sl.make_train_step(lambda model, batch: jnp.mean(model(batch["x"])))(taken, BATCHES[0])
    for inputs, text in (
        ((), r"0 inputs after the batch, .*\n  Call step\(state, batch, \*inputs\)"),
        ((state, 1.0), "is an array of the state, which the step donates"),
        (({"name": "teacher"}, 1.0), r"0/name \(str\).\n  Pass pytrees of arrays"),
        ((taken, 1.0), "\n  Pass the state that the step returned"),
    ):
        with pytest.raises((ModelError, DataError), match=text):
            step(state, BATCHES[0], *inputs)
    with pytest.raises(ModelError, match="the step was given 0 inputs"):
        sl.make_eval_step(distil)(state, BATCHES[0])
