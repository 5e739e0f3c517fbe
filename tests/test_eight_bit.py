"""Products in 8 bits: their values and gradients, on every mesh, and the layers that take them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.errors import ModelError
from shardlib.explain.aot.topology import devices_of
from shardlib.functional import call, functional
from shardlib.functional.eight_bit import FP8, INT8, fp8_dot_general, int8_dot_general
from shardlib.functional.precision import precision
from shardlib.hardware import parse_cluster
from shardlib.jaxprs import flatten
from shardlib.nn import remat

DOTS = {"fp8": fp8_dot_general, "int8": int8_dot_general}
RECIPES = {"fp8": FP8, "int8": INT8}
TOKENS, FEATURES, UNITS = 24, 32, 16
PLAIN = (((1,), (0,)), ((), ()))


def rounded(x, dtype, axis):
    """What a product reads of `x`, in float64: by NumPy, for one scale along `axis`."""
    is_integer = np.issubdtype(dtype, np.integer)
    largest = np.float32(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    peak = np.max(np.abs(x), axis=axis, keepdims=True)
    scale = np.where(peak > 0, peak / largest, np.float32(1))
    scale = scale if is_integer else np.exp2(np.ceil(np.log2(scale)))
    y = np.clip(x / scale, -largest, largest)
    y = np.round(y) if is_integer else y.astype(dtype)
    return y.astype(np.float64) * scale


def reference(name, x, w, g):
    """The product of `x` [tokens, features] and `w` [features, units], and both gradients."""
    recipe = RECIPES[name]

    def product(a, b, dtype):
        rows, columns = (1, 0) if recipe.per_channel else (None, None)
        return rounded(a, dtype, rows) @ rounded(b, recipe.operand, columns)

    of_w = x.T.astype(np.float64) @ g if recipe.exact_weights else product(g.T, x, FP8.gradient).T
    return product(x, w, recipe.operand), product(g, w.T, recipe.gradient), of_w


def operands(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (TOKENS, FEATURES), (FEATURES, UNITS), (TOKENS, UNITS)
    x, w, g = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x * np.exp(rng.standard_normal((TOKENS, 1)).astype(np.float32)), w, g


def value_and_gradients(dot, dims=PLAIN):
    @jax.jit
    def run(x, w, g):
        y, pull = jax.vjp(lambda x, w: dot(x, w, dims), x, w)
        return y, *pull(g)

    return run


@pytest.mark.parametrize("name", DOTS)
def test_it_is_the_product_of_rounded_operands(name):
    x, w, g = operands()
    found = value_and_gradients(DOTS[name])(*map(jnp.asarray, (x, w, g)))
    # A float32 sum of n terms is off by at most n rounding errors of the sum of magnitudes.
    eps = jnp.finfo(jnp.float32).eps
    bounds = np.abs(x) @ np.abs(w), np.abs(g) @ np.abs(w.T), np.abs(x.T) @ np.abs(g)
    for mine, theirs, bound in zip(found, reference(name, x, w, g), bounds, strict=True):
        assert np.all(np.abs(mine - theirs) <= 2 * FEATURES * eps * bound)
    x[3] = 0.0
    assert np.all(DOTS[name](jnp.asarray(x), jnp.asarray(w), PLAIN)[3] == 0.0)


@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize(
    ("lhs", "rhs", "dims"),
    [
        ((4, 6, 8), (8, 5, 3), (((2,), (0,)), ((), ()))),
        ((4, 3, 6, 8), (6, 8, 5), (((2, 3), (0, 1)), ((), ()))),
        ((4, 3, 6), (5, 6, 3), (((1, 2), (2, 1)), ((), ()))),
        ((4, 3, 6), (6, 5, 4), (((2,), (0,)), ((0,), (2,)))),
    ],
    ids=["several outputs", "several inputs", "inputs in another order", "batch"],
)
def test_any_dims(name, lhs, rhs, dims):
    """Each gradient has its operand's dims, and both are near the exact ones."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (lhs, rhs))
    exact = value_and_gradients(jax.lax.dot_general, dims)
    shape = jax.eval_shape(lambda x, w: jax.lax.dot_general(x, w, dims), x, w).shape
    g = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    found = value_and_gradients(DOTS[name], dims)(x, w, g)
    for mine, theirs in zip(found, exact(x, w, g), strict=True):
        assert mine.shape == theirs.shape
        # Random signs: the error of a sum relative to its size is that of a term, which e5m2
        # rounds by at most 1/8 and on average by half of that.
        assert jnp.linalg.norm(mine - theirs) < 0.1 * jnp.linalg.norm(theirs)


@pytest.mark.rest("mesh", keep=3)
@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize(
    ("x", "w"),
    [
        (P("a"), P(None, None)),
        (P(("a", "b")), P("a", "b")),
        (P("a"), P(None, "b")),
        (P("a", "b"), P("b")),
        (P(None, ("a", "b")), P(("a", "b"))),
    ],
    ids=["data", "fsdp", "column", "row", "whole mesh"],
)
def test_every_mesh_gives_the_numbers_of_one_device(name, x, w):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    arrays, run = [jnp.asarray(a) for a in operands()], value_and_gradients(DOTS[name])
    specs = x, w, P(x[0] if x else None, None)
    cut = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    for number, (one, many) in enumerate(zip(run(*arrays), run(*cut), strict=True)):
        if name == "int8" and number < 2:
            # Sums of integers have no order.
            np.testing.assert_array_equal(one, many)
        else:
            bound = FEATURES * jnp.finfo(jnp.float32).eps * jnp.linalg.norm(one)
            np.testing.assert_allclose(one, many, atol=bound)


def test_dots_keeps_results_in_their_dtype():
    x, w, _ = operands()

    def loss(w, x):
        hidden = int8_dot_general(x, w, PLAIN)
        return jnp.sum(jnp.sin(hidden.astype(jnp.float32)))

    args = jnp.asarray(w, jnp.bfloat16), jnp.asarray(x, jnp.bfloat16)
    _, pull = jax.vjp(remat.apply("dots", loss), *args)
    kept = {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(pull)}
    assert ((TOKENS, UNITS), "bfloat16") in kept
    assert not {dtype for _, dtype in kept} & {"int8", "int32"}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.general = nnx.LinearGeneral(16, (2, 4), rngs=rngs)
        self.own = nnx.Linear(8, 8, rngs=rngs, dot_general=lambda *args, **kw: exact(*args, **kw))
        metadata = {"out_sharding": ("embed", "vocab"), "eager_sharding": False}
        self.head = nnx.Linear(8, 4, rngs=rngs, kernel_metadata=metadata)

    def __call__(self, x):
        y = self.general(jax.nn.relu(self.hidden(x)))
        return self.head(self.own(y.reshape(len(x), 8)))


exact = jax.lax.dot_general


@pytest.mark.parametrize("name", DOTS)
def test_a_policy_gives_linear_layers_their_products(name):
    module = functional(lambda rngs: Net(rngs))
    params, state = module.init(jax.random.key(0))

    def run(params):
        options = {"precision": precision(name)}
        x = jnp.ones((3, 8), jnp.bfloat16)
        return call(module, params, state, jax.random.key(1), lambda model: model(x), **options)[0]

    jaxpr = jax.make_jaxpr(run)(params)
    products = [one for one in flatten(jaxpr.jaxpr).operations if one.name == "dot_general"]
    dtypes = [str(one.invars[1].aval.dtype) for one in products]
    eight = str(jnp.dtype(RECIPES[name].operand))
    # The layer with a function of its own and the head are left.
    assert dtypes == [eight, eight, "bfloat16", "bfloat16"]


def test_a_model_without_linear_layers_is_refused():
    module = functional(lambda rngs: nnx.Embed(4, 4, rngs=rngs))
    params, state = module.init(jax.random.key(0))
    with pytest.raises(ModelError, match=r"Embed has no layer.*\n  Choose the precision bf16"):
        call(module, params, state, jax.random.key(1), lambda m: m, precision=precision("fp8"))
    with pytest.raises(ModelError, match="has the options out_sharding"):
        int8_dot_general(jnp.ones((2, 2)), jnp.ones((2, 2)), PLAIN, out_sharding=P())


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_tpus_multiply_integers(topology, tpu_devices):
    mesh = Mesh(np.array(tpu_devices(topology)), ("a",))
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("a")))
    w = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    g = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("a")))
    text = value_and_gradients(int8_dot_general).lower(x, w, g).compile().as_text()
    products = re.findall(r"= (\w+)\[[^=\n]* (?:dot|convolution)\(", str(text))
    # The result and the gradient of `x`; that of `w` is computed in the dtype of the layer.
    assert sorted(products) == ["bf16", "s32", "s32"]


@pytest.mark.aot
def test_gpus_multiply_floats_of_8_bits():
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    mesh = Mesh(np.array(devices_of(parse_cluster("8xh100"))), ("a",))
    shapes = {(512, 256): P("a"), (256, 512): P(), (512, 512): P("a")}
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes.items()
    ]
    lowered = value_and_gradients(fp8_dot_general).lower(*arguments)
    # A program that is not tuned on a GPU has the products of Triton in place of cuBLAS.
    text = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    found = re.findall(r'custom_call_target="(__cublas[^"]*)"', str(text))
    # The result and both gradients.
    assert found == ["__cublas$lt$matmul$f8"] * 3
