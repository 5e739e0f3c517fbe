"""Steps on one CPU multiply by the kernels of each layer where they lie."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_decoder import VOCAB, made

import shardlib as sl
from shardlib.engine import Engine, Sampling
from shardlib.engine import engine as of_engine
from shardlib.engine import layer_kernels as of_kernels
from shardlib.engine.layer_kernels import layer_kernels, stored_by_column, with_kernels
from shardlib.jaxprs import equations
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib_models.moe import MoEConfig

LAYERS, WIDTH = 3, 32


class Layer(nnx.Module):
    """Products with a kernel on either side, in a called function, and a kernel that is added."""

    def __init__(self, rngs):
        def kernel(*axes):
            value = rngs.params.normal((WIDTH, WIDTH)) / 8
            return nnx.Param(value, out_sharding=axes, eager_sharding=False)

        self.right, self.left, self.called = (kernel("embed", "mlp") for _ in range(3))
        self.added = kernel("embed", "mlp")
        self.scale = nnx.Param(jnp.ones(WIDTH), out_sharding=("embed",), eager_sharding=False)

    def __call__(self, x):
        x = x @ self.right[...] * self.scale[...][None] + self.added[...]
        x = (self.left[...] @ x.T).T
        return jnp.tanh(jax.jit(lambda x, kernel: x @ kernel)(x, self.called[...]))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = stack_layers(Layer, LAYERS, rngs)
        head = rngs.params.normal((WIDTH, 4))
        self.head = nnx.Param(head, out_sharding=("embed", "vocab"), eager_sharding=False)

    def __call__(self, x):
        x, outputs = scan_layers(lambda layer, x, _: ((y := layer(x)), y[0]), self.layers, x)
        return x @ self.head[...], outputs


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch):
    monkeypatch.setattr(of_kernels, "_LEAST_BYTES", 1)


@pytest.fixture
def stack():
    return Stack(nnx.Rngs(0))


def test_a_loop_multiplies_by_the_kernels_of_its_layers(stack):
    graphdef, params = nnx.split(stack)

    def call(params, x):
        return nnx.merge(graphdef, params)(x)

    kernels, x = layer_kernels(params), jax.random.normal(jax.random.key(1), (WIDTH, WIDTH))
    assert sum(map(bool, kernels)) == 4

    def apart(params, x, kernels):
        return with_kernels(call, kernels)(params, x)

    found, expected = jax.jit(apart)(params, x, kernels), jax.jit(call)(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), found, expected)
    names = [
        e.primitive.name for e, _ in equations(jax.make_jaxpr(apart)(params, x, kernels).jaxpr)
    ]
    # Three products have a branch for each layer; that of the head has none.
    assert names.count("cond") == 3
    assert names.count("dot_general") == 3 * LAYERS + 1
    # Other kernels give other results.
    twice = jax.tree.map(lambda kernel: 2 * kernel, kernels)
    other = jax.jit(apart)(params, x, twice)[0]
    assert float(jnp.max(jnp.abs(other - found[0]))) > 0.1


def test_kernels_share_the_memory_of_their_stack(stack):
    params = nnx.state(stack)
    for leaf, kernels in zip(jax.tree.leaves(params), layer_kernels(params), strict=True):
        pointers = [kernel.unsafe_buffer_pointer() for kernel in kernels]
        size = leaf.nbytes // len(leaf)
        assert pointers == [leaf.unsafe_buffer_pointer() + n * size for n in range(len(pointers))]
        for kernel, part in zip(kernels, leaf, strict=False):
            np.testing.assert_array_equal(kernel, part)


def test_wide_kernels_are_stored_by_column():
    """Rows of 1,024 numbers lie 4 KiB apart, and rows of 32 do not; the head has rows of 64 KiB."""

    class Wide(nnx.Module):
        def __init__(self, rngs):
            def stack(*shape):
                axes = {"out_sharding": ("layers", None, None), "eager_sharding": False}
                return nnx.Param(rngs.params.normal((LAYERS, *shape)) / 32, **axes)

            self.wide, self.narrow = stack(WIDTH, 1024), stack(1024, WIDTH)
            self.head = nnx.Param(rngs.params.normal((WIDTH, 2**14)) / 32)
            # Not kernels: a vector of each layer, and a table.
            axes = {"out_sharding": ("layers", None), "eager_sharding": False}
            self.bias = nnx.Param(jnp.ones((LAYERS, 2**14)), **axes)
            self.table = nnx.Param(jnp.ones((2**14, 2**14 // 2**10)))

        def __call__(self, x):
            def layer(x, kernels):
                return jnp.tanh(x @ kernels[0]) @ kernels[1], None

            x = jax.lax.scan(layer, x, (self.wide[...], self.narrow[...]))[0]
            many = jnp.concatenate([x, x])
            scores = jax.lax.cond(
                x[0, 0] < 9, lambda: many @ self.head[...], lambda: jnp.zeros((2 * len(x), 2**14))
            )
            return x @ self.head[...], scores

    graphdef, params = nnx.split(Wide(nnx.Rngs(0)))
    narrower = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    pairs = zip(jax.tree.leaves(stored_by_column(narrower)), jax.tree.leaves(narrower), strict=True)
    assert all(ours is theirs for ours, theirs in pairs)
    stored = stored_by_column(params)
    bias, head, narrow, table, wide = jax.tree.leaves(stored)
    same = [jax.tree.leaves(params)[number] for number in (0, 2, 3)]
    assert all(ours is theirs for ours, theirs in zip((bias, narrow, table), same, strict=True))
    assert wide.format.layout.major_to_minor == (0, 2, 1)
    assert head.format.layout.major_to_minor == (1, 0)
    kernels = layer_kernels(stored)
    assert kernels[1].transposed.unsafe_buffer_pointer() == head.unsafe_buffer_pointer()
    np.testing.assert_array_equal(kernels[1].transposed.T, head)
    start, size = wide.unsafe_buffer_pointer(), wide.nbytes // LAYERS
    for number, kernel in enumerate(kernels[4]):
        assert kernel.transposed.unsafe_buffer_pointer() == start + number * size
        np.testing.assert_array_equal(kernel.transposed.T, wide[number])

    def call(params, x):
        return nnx.merge(graphdef, params)(x)

    x = jax.random.normal(jax.random.key(1), (WIDTH, WIDTH))
    step = jax.jit(lambda p, x, k: with_kernels(call, k)(p, x)).lower(stored, x, kernels).compile()
    # It reads the head as it is, and so does the branch.
    assert not re.search(r"f32\[32,16384\]\{\S+ (copy|transpose)\(", step.as_text())
    found, expected = step(stored, x, kernels), jax.jit(call)(params, x)
    for ours, theirs in zip(found, expected, strict=True):
        # Sums of 32 and 1,024 products in float32.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_parameters_on_several_devices_have_no_kernels_apart():
    sharded = sl.shard(made().model, sl.make_mesh("data=4,tensor=2"), sl.rules.STANDARD)
    assert layer_kernels(nnx.state(sharded)) == []


def test_small_kernels_are_copied(stack, monkeypatch):
    monkeypatch.setattr(of_kernels, "_LEAST_BYTES", 4 * WIDTH * WIDTH + 1)
    assert layer_kernels(nnx.state(stack)) == []


def copied(engine, kernels):
    """Whether a compiled step slices a kernel of the MLP from its stack."""
    arrays = engine._arranger.arrays(of_engine.EngineStep((of_engine.GroupStep((), ()),)))
    lowered = engine._programs.program().lower(engine._params, engine._state, arrays, kernels)
    text = lowered.compile().as_text()
    return any("dynamic-slice" in x and "f32[64,96]" in x for x in text.splitlines())


@pytest.mark.mesh
def test_a_step_copies_no_kernel_and_answers_alike(monkeypatch):
    served, prompts = made(), np.random.default_rng(0).integers(0, VOCAB, (6, 20)).tolist()
    engine = Engine(served, context=64, chunk=64)
    answers = engine.generate(prompts, max_tokens=12, logprobs=1)
    assert copied(engine, None)
    assert not copied(engine, engine._kernels)
    monkeypatch.setattr(of_engine, "layer_kernels", lambda _: [])
    stacked = Engine(served, context=64, chunk=64).generate(prompts, max_tokens=12, logprobs=1)
    for one, other in zip(answers, stacked, strict=True):
        assert one.ids == other.ids
        found, expected = ([token.logprob for token in x.tokens] for x in (one, other))
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.mesh
@pytest.mark.parametrize(
    "options", [{}, {"moe": MoEConfig(num_experts=4)}], ids=["dense", "experts"]
)
def test_bits_do_not_depend_on_the_company(options):
    served, rng = made(**options), np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 90)).tolist() for _ in range(12)]
    sampling = Sampling(max_tokens=10, logprobs=2, ignore_end=True)

    def bits(prompts):
        answers = engine.generate(prompts, sampling)
        return [[(token.id, token.logprob, token.top) for token in a.tokens] for a in answers]

    with jax.default_matmul_precision("highest"):
        engine = Engine(served, context=128, deterministic=True)
        assert engine._kernels
        together = bits(prompts)
        assert [bits([prompt])[0] for prompt in prompts] == together


@pytest.mark.mesh
def test_updated_parameters_have_kernels_of_their_own():
    served = made()
    engine = Engine(served, context=64, chunk=64)
    prompts = [[1, 2, 3], [4, 5]]
    before = [one.ids for one in engine.generate(prompts, max_tokens=12, ignore_end=True)]
    params = jax.tree.map(lambda x: x * 1.5, nnx.state(served.model))
    engine.update(params)
    after = [one.ids for one in engine.generate(prompts, max_tokens=12, ignore_end=True)]
    other = made()
    nnx.update(other.model, params)
    new = Engine(other, context=64, chunk=64).generate(prompts, max_tokens=12, ignore_end=True)
    assert before != after == [one.ids for one in new]


class Odd(nnx.Module):
    """Variables without an array and with several, before a stack; the loop runs backward."""

    def __init__(self, rngs):
        stack = {"out_sharding": ("layers", "embed", "mlp"), "eager_sharding": False}
        self.a_few = nnx.Param((jnp.ones(2), jnp.ones(3)))
        self.an_absent = nnx.Param(None)
        self.bits = nnx.Param(jnp.ones((LAYERS, WIDTH, WIDTH), jnp.int8), **stack)
        self.kernel = nnx.Param(rngs.params.normal((LAYERS, WIDTH, WIDTH)) / 8, **stack)

    def __call__(self, x):
        def layer(x, kernel):
            return jax.checkpoint(jnp.tanh)(x @ kernel), x

        x, outputs = jax.lax.scan(layer, x, self.kernel[...], reverse=True, unroll=2)
        return x + jnp.sum(self.a_few.get_value()[1]), outputs


def test_kernels_belong_to_their_parameters():
    graphdef, params = nnx.split(Odd(nnx.Rngs(0)))
    kernels, x = layer_kernels(params), jnp.ones((4, WIDTH))
    assert len(kernels) == len(jax.tree.leaves(params))
    assert [len(stack) for stack in kernels if stack] == [LAYERS]

    def call(params, x):
        return nnx.merge(graphdef, params)(x)

    found, expected = with_kernels(call, kernels)(params, x), call(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), found, expected)
