import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.errors import ModelError
from shardlib.functional import functional
from shardlib.registry import DataSpec
from shardlib_models.resnet import FAMILY, ResNetConfig, flops_per_example, loss, make, validate

DATA = DataSpec(num_classes=10, image_shape=(8, 8, 1))
SMALL = ResNetConfig(depth=18, stem="small", width=4)
IMAGENET = DataSpec(num_classes=1000, image_shape=(224, 224, 3))


def batch_of(batch=8, seed=0):
    rng = np.random.default_rng(seed)
    images = jnp.asarray(rng.normal(size=(batch, 8, 8, 1)), jnp.float32)
    return {"images": images, "labels": jnp.asarray(rng.integers(0, 10, batch), jnp.int32)}


def functions(train):
    """`init(key)` and `step(params, state, batch) -> ((loss, (metrics, new_state)), gradient)`."""
    module = functional(lambda rngs: make(SMALL, DATA, rngs))

    def value(params, state, batch):
        model = module.merge(params, state, jax.random.key(0))
        mean, metrics = loss(model, batch, jax.random.key(0), train=train)
        return mean.value, (metrics, module.collect(model))

    return module.init, jax.value_and_grad(value, has_aux=True)


@functools.cache
def step(train=True):
    """A jitted step, with the parameters and state that it starts from."""
    init, run = functions(train)
    return jax.jit(run), *jax.jit(init)(jax.random.key(0))


@pytest.mark.mesh
def test_batch_statistics_move_in_training():
    run, params, state = step()
    (_, (_, trained)), _ = run(params, state, batch_of())
    assert jax.tree.structure(trained) == jax.tree.structure(state)
    moved, fresh = trained["stem"]["norm"], state["stem"]["norm"]
    mean = 0.1 * stem_output(params, batch_of()["images"]).mean((0, 1, 2))
    np.testing.assert_allclose(moved["mean"], mean, rtol=1e-4, atol=1e-6)
    assert not jnp.allclose(moved["var"], fresh["var"])


def stem_output(params, images):
    return jax.lax.conv_general_dilated(
        images, params["stem"]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.mesh
def test_in_evaluation_an_image_stands_alone():
    run, params, state = step(train=False)
    batch = batch_of()
    upset = batch | {
        "images": batch["images"].at[4:].multiply(100.0),
        "labels": batch["labels"].at[4:].set(-1),
    }
    (value, (metrics, after)), _ = run(params, state, upset)
    (expected, _), _ = run(params, state, batch | {"labels": upset["labels"]})
    # Images without a label count nowhere, and nothing of the others rubs off.
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert metrics["accuracy"].weight == 4
    jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.mesh
def test_statistics_are_those_of_the_global_batch():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    run, params, state = step()
    expected = run(params, state, batch_of())
    sharded = jax.device_put(batch_of(), NamedSharding(mesh, P("data")))
    actual = run(*jax.device_put((params, state), NamedSharding(mesh, P())), sharded)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected
    )


def test_bfloat16_computes_in_bfloat16_with_float32_statistics():
    init, run = functions(train=True)

    def narrow(x):
        return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

    def start(key, batch):
        params, state = init(key)
        return run(jax.tree.map(narrow, params), state, jax.tree.map(narrow, batch))

    (value, (_, state)), gradient = jax.eval_shape(start, jax.random.key(0), batch_of())
    assert value.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
def test_published_number_of_parameters(depth, parameters):
    config = ResNetConfig(depth=depth)
    shapes = nnx.eval_shape(lambda: make(config, IMAGENET, nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param))) == parameters


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_flops_are_those_of_the_convolutions_that_run(depth, stem):
    config = ResNetConfig(depth=depth, stem=stem, width=4)
    data = DataSpec(num_classes=10, image_shape=(30, 33, 3))
    module = functional(lambda rngs: make(config, data, rngs))
    arguments = jax.eval_shape(module.init, jax.random.key(0))

    def forward(params, state, images):
        return module.merge(params, state, jax.random.key(0))(images)

    jaxpr = jax.make_jaxpr(forward)(*arguments, jnp.ones((1, 30, 33, 3)))
    multiplied = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            multiplied += np.prod(eqn.outvars[0].aval.shape) * np.prod(kernel[:3])
        elif eqn.primitive.name == "dot_general":
            multiplied += np.prod(eqn.invars[1].aval.shape)
    assert flops_per_example(config, data) == 6 * multiplied


def test_flops_of_the_published_models():
    # He et al. count multiply-adds of a forward pass: 3.8e9 with the stride in the 1x1, 4.1e9 here.
    assert flops_per_example(ResNetConfig(depth=50), IMAGENET) / 6 == pytest.approx(
        4.09e9, rel=1e-3
    )
    assert flops_per_example(ResNetConfig(depth=18), IMAGENET) / 6 == pytest.approx(
        1.81e9, rel=3e-3
    )


def test_logical_axes_name_every_dim():
    module = functional(lambda rngs: make(SMALL, DATA, rngs))
    shapes = jax.eval_shape(module.init, jax.random.key(0))
    for tree in shapes:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            assert len(module.axes["/".join(key.key for key in path)]) == leaf.ndim, path
    assert module.axes["stem/kernel"] == ("kernel_h", "kernel_w", "conv_in", "conv_out")


def test_all_faults_at_once():
    config, data = ResNetConfig(width=0, num_classes=5, bn_momentum=1.0), DataSpec(num_classes=10)
    starts = [
        "width is 0",
        "bn_momentum is 1.0",
        "the data have no image_shape",
        "the data have 10",
    ]
    faults = validate(config, data)
    assert len(faults) == len(starts)
    assert all(map(str.startswith, faults, starts))
    with pytest.raises(ModelError) as error:
        make(config, data, nnx.Rngs(0))
    assert str(error.value) == "the ResNet cannot be made:\n  " + "\n  ".join(faults)
    (fault,) = validate(ResNetConfig(), DataSpec(image_shape=(8, 8, 1)))
    assert fault.startswith("num_classes is unknown")
    assert FAMILY.validate(SMALL, DATA) == []
