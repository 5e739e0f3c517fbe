"""NNX and linen modules as plain trees of arrays, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from shardlib.errors import ModelError
from shardlib.functional import functional
from shardlib.paths import named_leaves

KEY = jax.random.key(3)
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        into = nnx.with_metadata(
            nnx.initializers.normal(), out_sharding=("embed", "mlp"), eager_sharding=False
        )
        self.into = nnx.Linear(4, 6, kernel_init=into, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(6, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norms[0](self.into(x)))


class Linen(linen.Module):
    train: bool = True

    @linen.compact
    def __call__(self, x):
        into = linen.with_logical_partitioning(linen.initializers.normal(), ("embed", "mlp"))
        x = linen.Dense(6, kernel_init=into)(x)
        x = linen.BatchNorm(use_running_average=not self.train)(x)
        self.sow("intermediates", "normed", x)
        return linen.Dropout(0.5, deterministic=not self.train)(x)


def view(kind):
    return functional(Nnx) if kind == "nnx" else functional(Linen(), (X,))


PARAMS = {
    "nnx": ["into/bias", "into/kernel", "norms/0/bias", "norms/0/scale"],
    "linen": ["BatchNorm_0/bias", "BatchNorm_0/scale", "Dense_0/bias", "Dense_0/kernel"],
}
STATE = {
    "nnx": ["norms/0/mean", "norms/0/var"],
    "linen": ["batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var"],
}


@pytest.mark.parametrize("kind", PARAMS)
class TestBothKinds:
    def test_trees_are_plain(self, kind):
        module = view(kind)
        params, model_state = module.init(KEY)
        assert list(named_leaves(params)) == PARAMS[kind]
        assert list(named_leaves(model_state)) == STATE[kind]
        for tree in (params, model_state):
            paths = jax.tree_util.tree_flatten_with_path(tree)[0]
            assert all(type(key) is jax.tree_util.DictKey for path, _ in paths for key in path)
            assert all(type(key.key) is str for path, _ in paths for key in path)
            assert all(isinstance(leaf, jax.Array) for _, leaf in paths)

    def test_axes_come_from_metadata(self, kind):
        module = view(kind)
        assert set(module.axes) == {*PARAMS[kind], *STATE[kind]}
        named = {path: axes for path, axes in module.axes.items() if axes is not None}
        (kernel,) = (path for path in PARAMS[kind] if path.endswith("kernel"))
        assert named == {kernel: ("embed", "mlp")}

    def test_merge_and_collect_are_inverse(self, kind):
        module = view(kind)
        params, model_state = module.init(KEY)
        merged = module.merge(params, model_state, KEY)
        jax.tree.map(np.testing.assert_array_equal, module.collect(merged), model_state)

    def test_a_call_updates_the_model_state_alone(self, kind):
        module = view(kind)

        @jax.jit
        def call(params, model_state, key):
            merged = module.merge(params, model_state, key)
            return merged(X), module.collect(merged)

        params, model_state = module.init(KEY)
        before = jax.device_get((params, model_state))
        _, new = call(params, model_state, KEY)
        assert jax.tree.structure(new) == jax.tree.structure(model_state)
        changed = jax.tree.map(lambda a, b: bool((a != b).any()), new, model_state)
        assert all(jax.tree.leaves(changed))
        jax.tree.map(np.testing.assert_array_equal, (params, model_state), before)

    def test_randomness_is_that_of_the_key_alone(self, kind):
        module = view(kind)
        params, model_state = module.init(KEY)

        def call(seed):
            return module.merge(params, model_state, jax.random.key(seed))(X)

        np.testing.assert_array_equal(call(0), call(0))
        assert (call(0) != call(1)).any()

    def test_initialisation_is_that_of_the_key_alone(self, kind):
        first, again = view(kind).init(KEY), view(kind).init(KEY)
        jax.tree.map(np.testing.assert_array_equal, first, again)
        other, _ = view(kind).init(jax.random.key(4))
        different = jax.tree.map(lambda a, b: bool((a != b).any()), first[0], other)
        (kernel,) = (v for p, v in named_leaves(different).items() if p.endswith("kernel"))
        assert kernel

    def test_nothing_is_allocated_before_init(self, kind):
        before = len(jax.live_arrays())
        module = view(kind)
        assert len(jax.live_arrays()) <= before + 1  # the key of the shapes
        jax.eval_shape(module.init, KEY)


def test_an_active_mesh_of_jax_changes_nothing():
    """Flax would otherwise take logical names for axes of that mesh."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for kind in PARAMS:
        expected = view(kind).init(KEY)
        with jax.set_mesh(mesh):
            found = jax.jit(view(kind).init)(KEY)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_linen_uses_each_stream_that_a_module_asks_for():
    class Noisy(linen.Module):
        @linen.compact
        def __call__(self, x):
            self.param("w", linen.initializers.zeros, (1,))
            return x + jax.random.normal(self.make_rng("noise"), x.shape)

    module = functional(lambda rngs: Noisy(), (X,))
    params, model_state = module.init(KEY)
    assert model_state == {}
    a, b = (module.merge(params, {}, jax.random.key(i))(X) for i in (0, 1))
    assert (a != b).any()


def test_linen_inputs_may_be_shapes_and_plain_values():
    class Switch(linen.Module):
        @linen.compact
        def __call__(self, x, wide):
            return linen.Dense(8 if wide else 2)(x)

    module = functional(Switch(), (jax.ShapeDtypeStruct((1, 4), jnp.float32), True))
    params, _ = module.init(KEY)
    assert params["Dense_0"]["kernel"].shape == (4, 8)


def test_layers_of_a_stack_get_keys_of_their_own():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.rngs = rngs.split(3)

        def __call__(self):
            return self.rngs.params.key[...]

    module = functional(Stack)
    params, model_state = module.init(KEY)
    assert (params, model_state) == ({}, {})
    keys = jax.random.key_data(module.merge({}, {}, KEY)())
    assert len({tuple(np.asarray(k)) for k in keys}) == 3


def test_a_shared_parameter_is_one_parameter():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.b = self.a

        def __call__(self, x):
            return self.b(self.a(x))

    module = functional(Tied)
    params, _ = module.init(KEY)
    assert list(named_leaves(params)) == ["a/kernel"]
    merged = module.merge(params, {}, KEY)
    assert merged.a is merged.b


def test_a_variable_may_hold_a_tree():
    class Tree(nnx.Module):
        def __init__(self, rngs):
            self.pair = nnx.Param({"x": jnp.ones(2), "y": jnp.zeros(3)})

    module = functional(Tree)
    params, _ = module.init(KEY)
    assert list(named_leaves(params)) == ["pair/x", "pair/y"]
    assert set(module.axes) == {"pair/x", "pair/y"}
    merged = module.merge(params, {}, KEY)
    np.testing.assert_array_equal(merged.pair.get_value()["x"], np.ones(2))


class Loose(nnx.Module):
    def __init__(self, rngs):
        self.scale = jnp.ones(3)
        self.table = np.ones((2, 2))
        self.inner = nnx.Dict(steps=nnx.List([jnp.ones(1)]), fine=nnx.Param(jnp.ones(1)))


def test_arrays_outside_of_variables_are_state_and_told(caplog):
    """As in Flax, which trains variables alone."""
    view = functional(Loose)
    params, model_state = view.init(KEY)
    assert list(named_leaves(params)) == ["inner/fine"]
    assert list(named_leaves(model_state)) == ["inner/steps/0", "scale", "table"]
    assert view.frozen == frozenset()
    told = "Loose holds arrays outside of variables, which are not trained: inner/steps/0, scale"
    assert told in caplog.text
    collected = view.collect(view.merge(params, model_state, KEY))
    assert list(named_leaves(collected)) == list(named_leaves(model_state))


class NotAModule:
    pass


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda rngs: NotAModule(), r"NotAModule, which is not a Flax module\.\n  Give an `nnx"),
        (Linen(), r"Linen is a linen module: .*\n  Pass them: inputs=\(x,\)"),
    ],
)
def test_refuses(make, fault):
    with pytest.raises(ModelError, match=fault):
        functional(make)


def test_a_module_in_memory_has_a_view_but_is_not_made_anew():
    view, made = functional(Nnx(nnx.Rngs(0))), functional(Nnx)
    assert view.shapes() == made.shapes()
    assert (view.axes, view.name) == (made.axes, made.name)
    with pytest.raises(ModelError, match=r"Nnx was given as a module in memory.*\n  Place its"):
        view.init(KEY)


def test_refuses_a_function_that_returns_arrays_placed_before():
    model = Nnx(nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), jax.devices()[1]))
    with pytest.raises(ModelError, match=r"Nnx returned arrays.*into/bias.*\n  Pass the module"):
        functional(lambda rngs: model)
