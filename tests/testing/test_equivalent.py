"""What is equal passes, and what is wrong is found where it is wrong."""

import re

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.errors import DataError, MeshError, ModelError
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.sharding.constrain import constrain
from shardlib.sharding.manual import axis_size, manual
from shardlib.testing import assert_equivalent

WIDTH, HIDDEN, LAYERS, BATCH = 8, 16, 4, 16
MESHES = ["data=8", "data=2,tensor=4", "tensor=8"]


def batch(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, ::-1])}


def kernel(rngs, *shape, axes):
    value = jax.random.normal(rngs.params(), shape) / np.sqrt(shape[0])
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


class Layer(nnx.Module):
    """Up, down, drop; `fault` says how `down` is wrong on a mesh, in layer `at` alone."""

    def __init__(self, rngs, fault, at):
        self.up = kernel(rngs, WIDTH, HIDDEN, axes=("embed", "mlp"))
        self.down = kernel(rngs, HIDDEN, WIDTH, axes=("mlp", "embed"))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.fault, self.at = fault, at

    def __call__(self, x, index):
        hidden = jax.nn.gelu(constrain(x @ self.up[...], "batch", "mlp"))
        down = self.down[...]
        y = hidden @ down
        if self.fault is not None:
            y = jnp.where(index == self.at, self.fault(hidden, down), y)
        return x + self.dropout(constrain(y, "batch", "embed"))


class Model(nnx.Module):
    def __init__(self, rngs, fault=None, at=2):
        self.layers = stack_layers(lambda rngs: Layer(rngs, fault, at), LAYERS, rngs)
        self.head = kernel(rngs, WIDTH, WIDTH, axes=("embed", None))

    def __call__(self, x):
        indices = jnp.arange(LAYERS, dtype=jnp.int32)
        x, _ = scan_layers(lambda layer, x, i: (layer(x, i), None), self.layers, x, indices)
        return x @ self.head[...]


def loss(model, batch, rng):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def sum_forgotten(hidden, down):
    """The partial product of one device along `tensor`, as if it were the whole."""
    if axis_size("tensor") == 1:
        return hidden @ down
    specs = (P(None, "tensor"), P("tensor", None))
    return manual(lambda h, w: h @ w, ("tensor",), specs, P())(hidden, down)


def mask_by_device(hidden, down):
    """A random mask that every device along `data` draws for itself."""
    if axis_size("data") == 1:
        return _masked(hidden, 0) @ down

    def masked(h):
        return _masked(h, jax.lax.axis_index("data"))

    return manual(masked, ("data",), P("data"), P("data"))(hidden) @ down


def _masked(hidden, index):
    key = jax.random.fold_in(jax.random.key(0), index)
    return jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0.0)


def gradient_missing(hidden, down):
    return hidden @ (jax.lax.stop_gradient(down) if axis_size("tensor") > 1 else down)


@jax.custom_vjp
def local_gradient(hidden, down):
    """The gradient of `down` from the examples of one device along `data` alone."""
    return hidden @ down


def _backward(residuals, dy):
    hidden, down = residuals
    if axis_size("data") == 1:
        return dy @ down.T, hidden.T @ dy
    specs = (P("data"), P("data"))
    return dy @ down.T, manual(lambda h, d: h.T @ d, ("data",), specs, P())(hidden, dy)


local_gradient.defvjp(lambda hidden, down: (hidden @ down, (hidden, down)), _backward)


def slightly_wrong(hidden, down):
    """One part in ten thousand too much."""
    return hidden @ down * (1.0001 if axis_size("data") > 1 else 1.0)


def failure(model, loss=loss, meshes=MESHES, **options):
    """The lines of the error, without numbers."""
    with pytest.raises(AssertionError) as error:
        assert_equivalent(model, loss, batch(), meshes, **options)
    return re.sub(r"\d\.\de[+-]\d\d", "#", str(error.value)).splitlines()


@pytest.mark.mesh
def test_a_correct_model_passes_and_the_report_says_how_nearly():
    report = assert_equivalent(
        Model,
        loss,
        [batch(0), batch(1)],
        ["data=4,tensor=2", {"fsdp": -1}],
        steps=4,
        microbatches=2,
    )
    assert [len(c.deviations) for c in report.comparisons] == [0, 0]
    lines = str(report).splitlines()
    assert [line.split(":")[0] for line in lines] == ["mesh data=4,tensor=2", "mesh fsdp=8"]
    for line in lines:
        assert re.fullmatch(
            r"mesh [\w=,]+: equal to one device in \d+ quantities(?: \(\d+ blurred by rounding\))?;"
            r" at most \d+% of what rounding explains, in the [\w/, ]+",
            line,
        )
    # Of 9 leaves, stacks by layer: gradients, and at both ends parameters and Adam's two moments;
    # Adam's counter at both ends, and a loss a step.
    assert report.comparisons[0].num_compared == 9 * (2 * 3 + 1) + 2 * 1 + 4


LOSS = "the loss of step 1 is off by # (of #); rounding explains #."
FIRST = {
    "forward": [LOSS, "    The forward pass goes wrong in layer 2; its inputs agree."],
    "backward": [
        "the gradient of layers/down, layer 2 is off by # (of #); rounding explains #.",
        "    The loss of that step agrees; the error is in the backward pass.",
    ],
}


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    ("fault", "where", "right", "wrong", "others"),
    [
        (gradient_missing, "backward", ["data=8"], ["tensor=8"], "1 deviates: 1 parameter"),
        (
            sum_forgotten,
            "forward",
            ["data=8"],
            ["data=2,tensor=4", "tensor=8"],
            "18 deviate: 9 gradients, 9 parameters",
        ),
        (mask_by_device, "forward", ["tensor=8"], ["data=8"], None),
        (local_gradient, "backward", [], ["data=8", "data=2,tensor=4"], None),
        # One part in ten thousand is more than rounding.
        (slightly_wrong, "forward", [], ["data=8"], None),
    ],
)
def test_a_fault_is_found_in_its_layer(fault, where, right, wrong, others):
    model = lambda rngs: Model(rngs, fault)  # noqa: E731
    head, *lines = failure(model, meshes=right + wrong, steps=1, optimizer=optax.sgd(0.1))
    count, num_meshes = len(wrong), len(right + wrong)
    verb = "differs" if count == 1 else "differ"
    meshes = "mesh" if num_meshes == 1 else "meshes"
    assert head == f"{count} of {num_meshes} {meshes} {verb} from one device:"
    for mesh, at in zip(wrong, range(0, len(lines), 3), strict=True):
        assert lines[at : at + 2] == [f"  mesh {mesh}: {FIRST[where][0]}", FIRST[where][1]]
        if others is not None:
            assert lines[at + 2] == f"    Of 27 others {others}."


@pytest.mark.mesh
def test_what_goes_into_the_layers_and_what_comes_behind():
    def before(model, batch, rng):
        wrong = batch["x"] * (1.01 if axis_size("data") > 1 else 1.0)
        return loss(model, {**batch, "x": wrong}, rng)

    def behind(model, batch, rng):
        return loss(model, batch, rng) * (1.01 if axis_size("data") > 1 else 1.0)

    for wrong, hint in {
        before: "The inputs of the layers differ already.",
        behind: "The outputs of the layers agree; the error comes after them.",
    }.items():
        assert failure(Model, wrong, "data=8", steps=1)[2] == f"    {hint}"


class UsersModel(nnx.Module):
    """As written for one device: no names, no stack."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Centred(UsersModel):
    """Subtracts the mean of the batch, of which each device takes that of its own rows."""

    def __call__(self, x):
        y = super().__call__(x)
        if axis_size("data") == 1:
            return y - y.mean(0, keepdims=True)
        local = lambda y: y - y.mean(0, keepdims=True)  # noqa: E731
        return manual(local, ("data",), P("data"), P("data"))(y)


@pytest.mark.mesh
def test_a_model_as_written_for_one_device():
    report = assert_equivalent(UsersModel, loss, batch(), ["data=8", "data=2,fsdp=4"])
    # Kernels and biases of two layers: gradients, and parameters and two moments at both ends.
    assert {c.num_compared for c in report.comparisons} == {4 * (1 + 2 * 3) + 2 + 3}


@pytest.mark.mesh
def test_a_mean_of_the_rows_of_one_device():
    meshes = ["fsdp=8", "data=2,fsdp=4"]
    assert failure(Centred, meshes=meshes, steps=1, optimizer=optax.sgd(0.1)) == [
        "1 of 2 meshes differs from one device:",
        f"  mesh data=2,fsdp=4: {LOSS}",
        "    To find the layer, run the layers by shardlib.scan_layers.",
        "    Of 12 others 6 deviate: 3 gradients, 3 parameters.",
    ]


@pytest.mark.mesh
def test_initial_values_that_are_not_of_the_seed():
    draws = np.random.default_rng(0)

    def make(rngs):
        model = Model(rngs)
        model.head.set_value(jnp.asarray(draws.normal(size=(WIDTH, WIDTH)), jnp.float32))
        return model

    assert failure(make, meshes="data=8", steps=1, optimizer=optax.sgd(0.1))[1] == (
        "  mesh data=8: the initial parameter head is off by # (of #); it must not differ at all."
    )


class ConvNet(linen.Module):
    """A user's linen model: batch statistics and dropout."""

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Conv(8, (3, 3), use_bias=False)(x)
        x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
        x = linen.Dropout(0.1, deterministic=not train)(x.reshape(x.shape[0], -1))
        return linen.Dense(8)(x)


@pytest.mark.mesh
def test_a_linen_model_with_batch_statistics():
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 4, 4, 3), (16, 8)))

    def loss(model, batch, rng):
        return jnp.mean(jnp.square(model(batch["x"], train=True) - batch["y"]))

    options = {
        "rules": sl.rules.FSDP,
        "inputs": (jax.ShapeDtypeStruct((2, 4, 4, 3), x.dtype), True),
    }
    report = assert_equivalent(ConvNet(), loss, {"x": x, "y": y}, "fsdp=8", **options)
    assert not report.comparisons[0].deviations


@pytest.mark.mesh
def test_rules_and_mesh_axes_of_the_user():
    rules = sl.AxisRules(
        params={"embed": None, "mlp": "model", "layers": None},
        activations={"batch": "replica", "mlp": "model", "embed": None},
    )
    assert_equivalent(Model, loss, batch(), "replica=2,model=4", rules=rules, steps=1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("replica", "model"))
    assert_equivalent(Model, loss, batch(), [mesh], rules=rules, steps=1)


def test_too_few_devices():
    fault = r"tensor=8 needs 16 devices, .*\nmesh fsdp=32 needs 32 .*\n  .*local_cpu_devices\(32\)"
    with pytest.raises(MeshError, match=fault):
        assert_equivalent(Model, loss, batch(), ["data=8", "data=2,tensor=8", "fsdp=32"])
    with pytest.raises(MeshError, match="mesh data=4 needs 4 devices, but there are 2"):
        assert_equivalent(Model, loss, batch(), "data=4", devices=jax.devices()[6:])


@pytest.mark.mesh
def test_what_cannot_be_compared_is_refused():
    def chaotic(model, batch, rng):
        return jnp.mean(jnp.sin(1e6 * model(batch["x"])))

    fault = r"^the loss of step 1 cannot be compared: rounding [^\n]*\n  Take fewer steps"
    with pytest.raises(ModelError, match=fault):
        assert_equivalent(Model, chaotic, batch(), "data=8")
    with pytest.raises(ModelError) as error:
        assert_equivalent(Model, lambda m, b, r: loss(m, b, r) * np.nan, batch(), "data=8")
    assert str(error.value) == (
        "the loss of step 1 is nan on one device, so nothing can be compared.\n"
        "  Lower the learning rate, or take fewer steps."
    )
    short = {name: value[:8] for name, value in batch().items()}
    with pytest.raises(DataError, match=r"batch 1 is .*, but batch 0 is"):
        assert_equivalent(Model, loss, [batch(), short], "data=8")
    with pytest.raises(DataError, match="no batch to train on was given"):
        assert_equivalent(Model, loss, [], "data=8")
    with pytest.raises(ModelError, match="steps=0 compares no training"):
        assert_equivalent(Model, loss, batch(), "data=8", steps=0)
    with pytest.raises(MeshError, match="no mesh to compare was given"):
        assert_equivalent(Model, loss, batch(), [])


class Complex(nnx.Module):
    """A product of complex numbers, as a diagonal state space has one; `fault` is of a mesh."""

    def __init__(self, rngs, fault=None):
        real, imaginary = (
            jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH for _ in range(2)
        )
        value = jax.lax.complex(real, imaginary)
        self.kernel = nnx.Param(value, out_sharding=("embed", "mlp"), eager_sharding=False)
        self.state = nnx.BatchStat(jnp.zeros((), jnp.complex64))
        self.fault = fault

    def __call__(self, x):
        y = x.astype(jnp.complex64) @ self.kernel[...]
        mean = jnp.mean(y)
        if self.fault is not None and axis_size("data") > 1:
            mean = self.fault(mean)
        self.state[...] = mean
        return jnp.real(y) + jnp.square(jnp.imag(y))


def test_complex_numbers_are_compared_with_their_imaginary_parts():
    sgd = optax.sgd(0.1)
    options = {
        "loss_fn": loss,
        "batch": batch(),
        "optimizer": sgd,
        "meshes": ["data=8", "tensor=4"],
    }
    assert_equivalent(Complex, **options)
    with pytest.raises(AssertionError, match="the model state state"):
        assert_equivalent(lambda rngs: Complex(rngs, lambda mean: jnp.conj(mean)), **options)


class ComplexLayer(nnx.Module):
    def __init__(self, rngs):
        self.kernel = Complex(rngs).kernel

    def __call__(self, x):
        return x + jnp.tanh(x @ self.kernel[...])


class ComplexLayers(nnx.Module):
    """Layers whose parameters and activations are complex."""

    def __init__(self, rngs):
        self.layers = stack_layers(ComplexLayer, LAYERS, rngs)

    def __call__(self, x):
        x = jax.lax.complex(x, x[:, ::-1])
        x, _ = scan_layers(lambda layer, x, _: (layer(x), None), self.layers, x, jnp.arange(LAYERS))
        return jnp.real(x) + jnp.square(jnp.imag(x))


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("meshes", "microbatches"), [(["stage=2,data=4"], 4), (["fsdp=4,tensor=2"], 2)]
)
def test_layers_of_complex_numbers_train_alike(meshes, microbatches):
    assert_equivalent(ComplexLayers, loss, batch(), meshes, microbatches=microbatches)
