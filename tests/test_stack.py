import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.errors import ConfigError, ModelError
from shardlib.nn.stack import intercept, scan_layers, stack_layers

WIDTH = 8


class Layer(nnx.Module):
    """Annotated and bare parameters, dropout and batch statistics in one."""

    def __init__(self, rngs):
        kernel = jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH**0.5
        self.kernel = nnx.Param(kernel, out_sharding=("embed", "mlp"), eager_sharding=False)
        self.bias = nnx.Param(jnp.zeros(WIDTH))
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.norm(x) @ self.kernel[...] + self.bias[...][None]))


def make(depth=3, seed=0):
    return stack_layers(Layer, depth, nnx.Rngs(seed))


def run(layers, x, **options):
    return scan_layers(lambda layer, x, _: (layer(x), None), layers, x, **options)[0]


def layer_at(layers, i):
    """One layer of a stack as a module of its own."""
    graphdef, state = nnx.split(layers)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x[i], state))


def inputs():
    return jax.random.normal(jax.random.key(7), (4, WIDTH))


def test_variables_lead_with_layers_and_bare_ones_stay_bare():
    layers = make(3)
    assert layers.kernel.get_metadata("out_sharding") == ("layers", "embed", "mlp")
    assert layers.kernel.shape == (3, WIDTH, WIDTH)
    for variable in (layers.bias, layers.norm.mean, layers.dropout.rngs.key):
        assert variable.get_value().shape[0] == 3
        assert "out_sharding" not in variable.get_metadata()


def test_layers_differ_and_depend_on_the_seed_alone():
    layers, again, other = make(), make(), make(seed=1)
    assert len(np.unique(layers.kernel[...][:, 0, 0])) == 3
    assert jnp.all(layers.kernel[...] == again.kernel[...])
    assert not jnp.any(layers.kernel[...] == other.kernel[...])
    keys = jax.random.key_data(layers.dropout.rngs.key[...])
    assert len(np.unique(keys, axis=0)) == 3


def test_values_do_not_depend_on_the_mesh():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def build():
        with nnx.use_eager_sharding(False):
            return make().kernel[...]

    sharded = jax.jit(build, out_shardings=NamedSharding(mesh, P(None, "fsdp", None)))()
    assert len(sharded.sharding.device_set) == 8
    np.testing.assert_array_equal(sharded, jax.jit(build)())


def test_scan_equals_a_loop_with_dropout_and_batch_statistics():
    layers, looped = make(), make()
    y = x = inputs()
    updated = []
    for i in range(3):
        layer = layer_at(looped, i)
        y = layer(y)
        updated.append(layer)
    np.testing.assert_allclose(run(layers, x), y, rtol=1e-5, atol=1e-6)
    for i, layer in enumerate(updated):
        np.testing.assert_allclose(
            layers.norm.mean[...][i], layer.norm.mean[...], rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(layers.norm.var[...][i], layer.norm.var[...], rtol=1e-5)
    np.testing.assert_array_equal(layers.dropout.rngs.count[...], [1, 1, 1])
    assert layers.kernel.get_metadata("out_sharding") == ("layers", "embed", "mlp")


def test_each_layer_and_each_call_has_a_dropout_mask_of_its_own():
    class Drop(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    layers = stack_layers(Drop, 4, nnx.Rngs(0))
    ones = jnp.ones(64)

    def masks():
        return scan_layers(lambda m, x, _: (x, m.dropout(ones) > 0), layers, jnp.zeros(()))[1]

    first, second = masks(), masks()
    both = np.concatenate([first, second])
    assert len(np.unique(both, axis=0)) == 8
    layers.eval()
    assert jnp.all(masks())
    np.testing.assert_array_equal(layers.dropout.rngs.count[...], [2] * 4)


def test_evaluation_updates_nothing():
    layers = make()
    layers.eval()
    before = jax.tree.map(lambda x: x, nnx.state(layers, nnx.BatchStat))
    first, second = run(layers, inputs()), run(layers, inputs())
    assert jnp.all(first == second)
    after = nnx.state(layers, nnx.BatchStat)
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.array_equal(a, b), before, after))


def test_per_layer_inputs_and_outputs():
    layers = make()
    layers.eval()
    scales = jnp.array([1.0, 2.0, 3.0])
    x, outputs = scan_layers(
        lambda layer, x, scale: (layer(x) * scale, x.sum()), layers, inputs(), scales
    )
    y = inputs()
    for i, scale in enumerate(scales):
        np.testing.assert_allclose(outputs[i], y.sum(), rtol=1e-4)
        y = layer_at(layers, i)(y) * scale
    np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("policy", ["dots", "full", "save:hidden", "0:full,1-:dots"])
def test_remat_changes_neither_results_nor_gradients(policy):
    graphdef, params, rest = nnx.split(make(), nnx.Param, ...)

    def loss(params, rest, policy):
        layers = nnx.merge(graphdef, params, rest, copy=True)
        return jnp.sum(run(layers, inputs(), remat=policy) ** 2)

    grad = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    plain, with_policy = grad(params, rest, "none"), grad(params, rest, policy)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), plain, with_policy
    )


def program_size(depth, policy="none"):
    """Lines of the program of a stack's gradient."""
    graphdef, params, rest = nnx.split(make(depth), nnx.Param, ...)

    def loss(params, rest, x):
        return run(nnx.merge(graphdef, params, rest, copy=True), x, remat=policy).sum()

    return len(jax.jit(jax.grad(loss)).lower(params, rest, inputs()).as_text().splitlines())


def test_the_program_does_not_grow_with_the_depth():
    assert program_size(2) == program_size(16)


@pytest.mark.mesh
def test_the_program_grows_with_the_ranges_of_remat_and_not_with_their_layers():
    assert program_size(5, "0-1:full,2-:dots") == program_size(16, "0-11:full,12-:dots")
    # Neighbours under one policy are one range.
    assert program_size(4, "0-1:full,2-:full") == program_size(4, "full")


@pytest.mark.parametrize("policy", ["full", "0:full,1-2:none"])
def test_ranges_keep_what_layers_give_and_change_in_order(policy):
    layers = make(3)
    scales = jnp.array([1.0, 2.0, 3.0])

    def call(layer, x, scale):
        return layer(x) * scale, x.sum()

    x, outputs = scan_layers(call, layers, inputs(), scales, remat=policy)
    looped, y = make(3), inputs()
    for i, scale in enumerate(scales):
        layer = layer_at(looped, i)
        np.testing.assert_allclose(outputs[i], y.sum(), rtol=1e-4)
        y = layer(y) * scale
        np.testing.assert_allclose(layers.norm.mean[...][i], layer.norm.mean[...], atol=1e-6)
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(layers.dropout.rngs.count[...], [1, 1, 1])


@pytest.mark.mesh
def test_slices_of_a_stack_keep_their_ranges():
    """As under a pipeline of two stages, each of which has the same two policies."""
    policy = "0:full,1:none,2:full,3:none"
    layers, whole = make(4), make(4)

    def halves(stack):
        carry, changed = stack.carry, []
        for part in (slice(0, 2), slice(2, 4)):
            state = jax.tree.map(lambda leaf, part=part: leaf[part], stack.state)
            carry, _, new = stack.run(state, carry, None)
            changed.append(new)
        return carry, None, jax.tree.map(lambda *parts: jnp.concatenate(parts), *changed)

    with intercept(halves):
        x = run(layers, inputs(), remat=policy)
    np.testing.assert_allclose(x, run(whole, inputs(), remat=policy), rtol=1e-6)
    np.testing.assert_allclose(layers.norm.mean[...], whole.norm.mean[...], rtol=1e-6)
    with (
        intercept(halves),
        pytest.raises(ConfigError, match=r"gives layer 0 'full' and layer 2 'none', but the"),
    ):
        run(make(4), inputs(), remat="0-1:full,2-3:none")


def test_a_layer_that_makes_variables_when_called_is_refused():
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jnp.ones(3))

        def __call__(self, x):
            self.seen = nnx.Intermediate(x)
            return x

    layers = stack_layers(Sowing, 2, nnx.Rngs(0))
    with pytest.raises(ModelError, match=r"Sowing creates variables .*: seen\.\n  Create them in"):
        run(layers, jnp.ones(3))


def test_faults():
    with pytest.raises(ModelError, match=r"a stack of 0 layers is empty\.\n  Ask for 1 or more"):
        make(0)
    with pytest.raises(ConfigError, match=r"remat policy 'ful' is unknown\. Did you mean 'full'\?"):
        run(make(), inputs(), remat="ful")
    layers = stack_layers(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, nnx.Rngs(0))
    with pytest.raises(
        ModelError, match=r"expects \(carry, outputs\) .*\n  Return \(carry, None\)"
    ):
        scan_layers(lambda layer, x, _: layer(x), layers, jnp.ones((1, 4)))
