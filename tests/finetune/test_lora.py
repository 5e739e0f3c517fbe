"""Adapters: frozen bases, the same steps on every mesh, merged weights, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.explain.analysis.collectives import collectives
from shardlib.finetune import Adapted, lora, merge, quantize
from shardlib.finetune.lora import adapters
from shardlib.registry import DataSpec
from shardlib_models.moe import MoEConfig
from shardlib_models.transformer import loss, make
from shardlib_models.transformer_config import TransformerConfig

VOCAB = 96
CONFIG = TransformerConfig(
    vocab_size=VOCAB,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    num_layers=4,
    mlp_dim=48,
    qkv_bias=True,
)
TARGETS = ("**/attention/*", "**/mlp/*")
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (8, 17), dtype=np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


# Operation by operation, a call compiles a hundred programs.
call = nnx.jit(lambda model, *inputs, **named: model(*inputs, **named))


@functools.cache
def parts():
    return jax.jit(lambda: nnx.split(make(CONFIG, DataSpec(), nnx.Rngs(0))))()


def base():
    graphdef, state = parts()
    return nnx.merge(graphdef, jax.tree.map(lambda x: x, state))


def adapted(**options):
    return lora(base(), rank=4, rngs=nnx.Rngs(1), **({"targets": TARGETS} | options))


def of_batch(model, batch, rng):
    return loss(model, batch, rng, train=True)


def trained(mesh, model=adapted, **options):
    """The state after three steps, and their losses."""
    devices = jax.devices()[:1] if mesh == "data=1" else None
    with (
        sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD),
        jax.default_matmul_precision("highest"),
    ):
        state = sl.init_state(model(), optax.adam(1e-2), wrt=nnx.LoRAParam)
        step, losses = sl.make_train_step(of_batch, **options), []
        for _ in range(3):
            state, metrics = step(state, BATCH)
            losses.append(float(metrics["loss"]))
    return state, losses


def test_adapters_change_nothing_at_first_and_share_the_arrays():
    model = base()
    tokens = jnp.asarray(BATCH["tokens"])
    made = lora(model, rank=4, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(call(made, tokens), call(model, tokens))
    kernel = model.layers.attention.query.kernel[...]
    assert made.layers.attention.query.base.kernel[...] is kernel
    assert not isinstance(model.layers.attention.query, Adapted)
    factors = nnx.state(made, nnx.LoRAParam)
    assert sum(x.size for x in jax.tree.leaves(factors)) == 4 * 4 * (2 * (32 + 32) + 2 * (32 + 16))


@pytest.mark.mesh
def test_only_adapters_are_trained_and_the_merged_model_gives_their_results():
    state, losses = trained("fsdp=4,tensor=2")
    assert losses[-1] < losses[0]
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 1]
    assert sum(x.size for x in moments) == 2 * sum(x.size for x in jax.tree.leaves(state.params))
    model, first = state.model, base()
    kernel = model.layers.mlp.up.base.kernel[...]
    np.testing.assert_array_equal(kernel, first.layers.mlp.up.kernel[...])
    query = model.layers.attention.query
    assert query.lora_a[...].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", None)
    assert query.lora_b[...].sharding.spec == jax.sharding.PartitionSpec(
        None, "fsdp", "tensor", None
    )

    plain = merge(state)
    assert type(plain.layers.attention.query).__name__ == "Linear"
    assert plain.layers.mlp.up.kernel[...].sharding == kernel.sharding
    tokens = jnp.asarray(BATCH["tokens"])
    with jax.default_matmul_precision("highest"):
        expected, actual = call(model, tokens), call(plain, tokens)
    # Two float32 sums in another order, through 4 layers.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert np.abs(call(first, tokens) - expected).max() > 1e-2 * np.abs(expected).max()


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "stage=2,fsdp=4", "data=2,tensor=4"])
def test_dora_and_dropout_are_the_same_on_every_mesh(mesh):
    def model():
        return adapted(dora=True, dropout=0.25)

    parts = {"microbatches": 2}
    (_, expected), (state, actual) = (
        trained("data=1", model, **parts),
        trained(mesh, model, **parts),
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert actual != trained("data=1", lambda: adapted(dora=True), **parts)[1]
    tokens = jnp.asarray(BATCH["tokens"])
    with jax.default_matmul_precision("highest"):
        made = state.model
        made.eval()
        logits = call(made, tokens)
        merged = call(merge(state), tokens)
    np.testing.assert_allclose(merged, logits, rtol=0, atol=2e-6 * np.abs(logits).max())
    # The norm of each output's weights is the trained one.
    query = state.model.layers.attention.query
    norms = np.linalg.norm(merge(state).layers.attention.query.kernel[...], axis=1)
    np.testing.assert_allclose(norms, query.lora_magnitude[...], rtol=1e-5)
    assert np.abs(norms - np.linalg.norm(query.base.kernel[...], axis=1)).max() > 1e-3


@functools.cache
def one_device():
    return trained("data=1")


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=3)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2,tensor=4", {}),  # more devices than key-value heads: copies of them
        ("data=2,context=2,tensor=2", {}),
        ("stage=2,fsdp=2,tensor=2", {"microbatches": 2, "pipeline": "interleaved"}),
        ("fsdp=8", {}),
        ("fsdp=4,tensor=2", {}),
        ("stage=2,fsdp=4", {"microbatches": 2}),
    ],
)
def test_steps_are_the_same_on_every_mesh(mesh, options):
    expected, losses = one_device()
    state, actual = trained(mesh, **options)
    np.testing.assert_allclose(actual, losses, rtol=1e-6)
    # Adam divides by the root of the squared gradient, which rounds like the gradient itself.
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5)


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("kind", ["int8", None])
def test_a_stage_reads_its_own_frozen_layers_alone(kind):
    def model():
        made = base() if kind is None else quantize(base(), kind)
        return lora(made, rank=4, targets=TARGETS, rngs=nnx.Rngs(1))

    with sl.use(mesh := sl.make_mesh("stage=2,fsdp=4"), sl.rules.STANDARD):
        state = sl.init_state(model(), optax.adam(1e-2), wrt=nnx.LoRAParam)
        step = sl.make_train_step(of_batch, microbatches=2)
        text = step.lower(state, BATCH).compile().as_text()
    found = [c for c in collectives(text, mesh) if "stage" in (c.mesh_axes or ())]
    assert {c.kind for c in found} == {"collective-permute", "all-reduce"}
    # The factors' gradients and the sums: less than the smallest of the kernels.
    assert sum(c.bytes for c in found if c.kind == "all-reduce") < 32 * 48


def test_a_plain_flax_model_and_a_list_of_layers():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
            self.head = nnx.Linear(8, 2, use_bias=False, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return self.head(x)

    model = lora(Net(nnx.Rngs(0)), rank=2, targets=("layers/1", "head"), rngs=nnx.Rngs(1))
    found = [type(one).__name__ for one in (*model.layers, model.head)]
    assert found == ["Linear", "Adapted", "Adapted"]
    model.head.lora_b[...] = jnp.ones((2, 2))
    x = jnp.ones((3, 8))
    np.testing.assert_allclose(merge(model)(x), model(x), rtol=1e-5)
    assert not np.allclose(model(x), Net(nnx.Rngs(0))(x))


class Flax(nnx.Module):
    """Layers of Flax alone."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.conv = nnx.Conv(16, 16, (3,), rngs=rngs)
        self.mix = nnx.Einsum("btd,dh->bth", (16, 16), (16,), rngs=rngs)
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.again = self.up
        self.head = nnx.LinearGeneral(64, (2, 16), rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x) + self.conv(x)
        return self.head(jax.nn.gelu(self.up(self.mix(x))))


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("dora", [False, True])
def test_layers_of_flax_keep_their_dtype_and_merge(dora):
    net, tokens = Flax(nnx.Rngs(0)), jnp.arange(12).reshape(2, 6)
    model = lora(net, rank=2, targets=("attention/*", "head"), dora=dora, rngs=nnx.Rngs(1))
    found = adapters(model)
    assert [*found] == [*(f"attention/{name}" for name in ("key", "out", "query", "value")), "head"]
    np.testing.assert_allclose(call(model, tokens), call(net, tokens), rtol=1e-6, atol=1e-6)
    for one in found.values():
        one.lora_b[...] = jax.random.normal(jax.random.key(2), one.lora_b.shape)
        one.base.bias[...] = jax.random.normal(jax.random.key(3), one.base.bias.shape)
    expected, actual = call(model, tokens), call(merge(model), tokens)
    # Two float32 sums in another order.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    assert np.abs(call(Flax(nnx.Rngs(0)), tokens) - actual).max() > 0.1 * np.abs(actual).max()
    model.head.base.dtype = jnp.bfloat16
    assert model(tokens).dtype == jnp.bfloat16


OTHERS = {
    "Conv": ("conv", "conv is an nnx.Conv, which gets no adapter"),
    "Einsum among others": ("*", "mix is an nnx.Einsum, which gets no adapter"),
    "one at two paths": ("*", "again is also at up, which an adapter would leave out"),
    "a text": ("head", None),
}


@pytest.mark.parametrize(("target", "text"), OTHERS.values(), ids=OTHERS)
def test_layers_that_get_no_adapter_are_refused(target, text):
    targets = target if text is None else (target,)
    with pytest.raises(ModelError, match=text or r"is the text 'head'.\n  Give a list"):
        lora(Flax(nnx.Rngs(0)), targets=targets, rngs=nnx.Rngs(1))
    with pytest.raises(ModelError, match=r"expected an nnx\.Module, not dict"):
        lora({}, targets=("head",), rngs=nnx.Rngs(1))


WRONG = {
    "unknown": ({"targets": ("**/attention/qury",)}, r"'\*\*/attention/qury' matches no.*query"),
    "a norm": ({"targets": ("**/attention_norm",)}, "matches no projection"),
    "none": ({"targets": ()}, "Give patterns that match only these projections: head, layers"),
    "rank": ({"rank": 0}, "rank must be at least 1, not 0.*\n  Take the defaults"),
    "alpha": ({"alpha": 0.0}, "alpha must be greater than 0"),
    "dropout": ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
}


@pytest.mark.parametrize(("options", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(options, text):
    with pytest.raises(ModelError, match=text):
        lora(base(), rngs=nnx.Rngs(0), **options)


def test_routers_get_no_adapter():
    config = TransformerConfig(vocab_size=VOCAB, num_layers=1, embed_dim=32, moe=MoEConfig())
    model = make(config, DataSpec(), nnx.Rngs(0))
    with pytest.raises(ModelError, match="matches no projection"):
        lora(model, targets=("**/router",), rngs=nnx.Rngs(0))
    with pytest.raises(ModelError, match="matches no projection"):
        lora(model, targets=("**/experts/*",), rngs=nnx.Rngs(0))
