import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib.cost.transformer.flops import step_flops
from shardlib.cost.workload import Job
from shardlib.errors import ModelError
from shardlib.functional import functional
from shardlib.nn import remat
from shardlib.plan.api import of_dims
from shardlib.registry import DataSpec
from shardlib_models.moe import MoEConfig
from shardlib_models.transformer import FAMILY, loss, make
from shardlib_models.transformer_config import (
    TransformerConfig,
    gpt2,
    llama3_8b,
    opt_125m,
    validate,
)

VOCAB, LENGTH = 31, 12
DATA = DataSpec(vocab_size=VOCAB, sequence_length=LENGTH)
SMALL = {"num_layers": 3, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2}
CLASSIC = {
    "num_layers": 2,
    "embed_dim": 16,
    "norm": "layer",
    "positions": "learned",
    "max_positions": LENGTH,
    "mlp": "plain",
    "activation": "gelu_tanh",
    "tied_embeddings": True,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}


def tokens(batch=2, length=LENGTH, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, VOCAB, jnp.int32)


def batch_of(batch=2):
    return {"tokens": tokens(batch), "targets": tokens(batch, seed=1)}


def loss_function(config, **options):
    """`init(key) -> params`, and `(params, batch) -> (loss, metrics)` of a training step."""
    module = functional(lambda rngs: make(config, DATA, rngs))

    def value(params, batch):
        model = module.merge(params, {}, jax.random.key(1))
        mean, metrics = loss(model, batch, jax.random.key(2), **{"train": True, **options})
        return mean.value, metrics

    return lambda key: module.init(key)[0], value


def loss_of(config, batch, **options):
    init, value = loss_function(config, **options)
    return jax.jit(lambda key: value(init(key), batch))(jax.random.key(0))


@functools.cache
def step(config, dtype=jnp.float32):
    init, value = loss_function(config)

    def run(batch):
        params = jax.tree.map(lambda x: x.astype(dtype), init(jax.random.key(0)))
        return jax.value_and_grad(value, has_aux=True)(params, batch)

    return jax.jit(run)


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), a, b)


@pytest.mark.mesh
@pytest.mark.parametrize("options", [SMALL, CLASSIC, SMALL | {"window": 4}])
def test_packed_documents_equal_documents_of_their_own(options):
    first, second = tokens(1, 5), tokens(1, 4, seed=1)
    padding = jnp.zeros((1, 3), jnp.int32)
    row = jnp.concatenate([first, second, padding], axis=1)
    segments = jnp.array([[1] * 5 + [2] * 4 + [0] * 3], jnp.int32)
    positions = jnp.array([[*range(5), *range(4), *range(3)]], jnp.int32)

    @jax.jit
    def run():
        model = make(TransformerConfig(**options), DATA, nnx.Rngs(0))
        packed = model(row, positions=positions, segment_ids=segments)
        return packed, model(first), model(second)

    packed, alone, other = run()
    np.testing.assert_allclose(packed[:, :5], alone, atol=1e-5)
    np.testing.assert_allclose(packed[:, 5:9], other, atol=1e-5)
    assert jnp.all(jnp.isfinite(packed))


@pytest.mark.mesh
def test_padding_takes_no_part_in_loss_or_gradient():
    segments = jnp.array([[1] * 8 + [0] * 4], jnp.int32)
    positions = jnp.array([[*range(8), *range(4)]], jnp.int32)

    def run(fill):
        row = jnp.where(segments > 0, tokens(1), fill)
        batch = {"tokens": row, "targets": row, "segment_ids": segments, "positions": positions}
        return step(TransformerConfig(**SMALL))(batch)

    (value, metrics), gradient = run(3)
    (other, _), other_gradient = run(7)
    assert value == other
    assert metrics["accuracy"].weight == 8
    assert_close(gradient["layers"], other_gradient["layers"], atol=1e-7)


@pytest.mark.mesh
def test_remat_changes_neither_loss_nor_gradient_under_dropout():
    plain = TransformerConfig(**SMALL, dropout=0.2)
    expected = step(plain)(batch_of())
    for policy in ("dots", "full", "save:attention_out,mlp_out"):
        other = dataclasses.replace(plain, remat=policy)
        assert_close(step(other)(batch_of()), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("experts", [None, MoEConfig(num_experts=4, mlp_dim=16)])
def test_every_remat_tag_is_used(experts):
    # Tiles of attention are of 64 positions and more.
    config = TransformerConfig(**SMALL, attention="blockwise", moe=experts)
    rows = jnp.zeros((2, 64), jnp.int32)
    text = str(jax.make_jaxpr(lambda: make(config, DATA, nnx.Rngs(0))(rows))())
    for name in config.remat_tags:
        assert f"name[name={name}]" in text, name
    assert remat.check("save:" + ",".join(config.remat_tags), config.remat_tags) == []


@pytest.mark.mesh
def test_the_program_does_not_grow_with_the_depth():
    def lines(depth):
        config = TransformerConfig(**(SMALL | {"num_layers": depth, "dropout": 0.1}))
        return len(step(config).lower(batch_of()).as_text().splitlines())

    assert lines(5) == lines(11)


@pytest.mark.parametrize("options", [SMALL, CLASSIC])
def test_bfloat16_parameters_compute_in_bfloat16_under_strict_promotion(options):
    config = TransformerConfig(**options, dropout=0.1)
    (value, _), gradient = jax.eval_shape(step(config, jnp.bfloat16), batch_of())
    assert value.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.mesh
def test_bfloat16_loss_and_gradient_are_near_those_of_float32():
    config = TransformerConfig(**SMALL)
    (value, _), gradient = step(config, jnp.bfloat16)(batch_of())
    (exact, _), exact_gradient = step(config)(batch_of())
    np.testing.assert_allclose(value, exact, rtol=2**-7)
    head, exact_head = gradient["head"]["kernel"], exact_gradient["head"]["kernel"]
    difference = jnp.linalg.norm(head.astype(jnp.float32) - exact_head)
    assert difference < 2**-5 * jnp.linalg.norm(exact_head)


@pytest.mark.mesh
def test_dropout_is_on_in_training_and_off_in_evaluation():
    config = TransformerConfig(**SMALL, dropout=0.5)
    trained, _ = loss_of(config, batch_of())
    evaluated, _ = loss_of(config, batch_of(), train=False)
    exact, _ = loss_of(TransformerConfig(**SMALL), batch_of(), train=False)
    # The weights do not depend on dropout, so evaluation is the same with it and without.
    assert evaluated == exact
    assert trained != exact


@pytest.mark.mesh
def test_metrics_and_bits_per_byte():
    batch = batch_of() | {"num_bytes": jnp.array([30, 20], jnp.int32)}
    options = {"label_smoothing": 0.1, "z_loss": 1e-4, "train": False}
    value, metrics = loss_of(TransformerConfig(**SMALL), batch, **options)
    assert metrics.keys() == {"accuracy", "nll_nats", "bits_per_byte"}
    bits = metrics["nll_nats"].total / np.log(2)
    np.testing.assert_allclose(metrics["bits_per_byte"].value, bits / 50, rtol=1e-6)
    assert value != metrics["nll_nats"].value
    # Untrained, all tokens are about equally likely.
    np.testing.assert_allclose(metrics["nll_nats"].value, np.log(VOCAB), rtol=0.05)


def test_logical_axes_name_every_dim():
    for options in (SMALL | {"dropout": 0.1}, CLASSIC):
        module = functional(lambda rngs, o=options: make(TransformerConfig(**o), DATA, rngs))
        params, state = jax.eval_shape(module.init, jax.random.key(0))
        assert state == {}
        leaves = jax.tree_util.tree_leaves_with_path(params)
        assert len(leaves) == len(module.axes)
        for path, leaf in leaves:
            axes = module.axes["/".join(key.key for key in path)]
            assert len(axes) == leaf.ndim, path
    assert module.axes["layers/attention/query/kernel"] == ("layers", "embed", "heads", "head_dim")
    assert module.axes["token_embedding/embedding"] == ("vocab", "embed")
    assert module.axes["position_embedding/embedding"] == ("positions", "embed")


def test_residual_projections_start_smaller_by_the_root_of_their_number():
    config = TransformerConfig(num_layers=8, embed_dim=64, num_heads=4)
    layers = make(config, DATA, nnx.Rngs(0)).layers
    # 8 * 64 * 64 samples or more: the deviation is known to 0.4 %, three sigma 1.2 %.
    np.testing.assert_allclose(layers.attention.query.kernel[...].std(), 0.02, rtol=0.02)
    np.testing.assert_allclose(layers.attention.out.kernel[...].std(), 0.02 / 4, rtol=0.02)
    np.testing.assert_allclose(layers.mlp.down.kernel[...].std(), 0.02 / 4, rtol=0.02)


def test_published_models_have_their_published_number_of_parameters():
    def count(config):
        shapes = nnx.eval_shape(lambda: make(config, DataSpec(), nnx.Rngs(0)))
        return sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param)))

    assert count(gpt2()) == 124_439_808
    assert count(llama3_8b()) == 8_030_261_248
    assert count(opt_125m()) == 125_239_296


def test_flops_count_matmuls_and_half_of_all_pairs():
    def flops(config):
        dims = of_dims(FAMILY.dims(config, DataSpec(sequence_length=8192)))
        return step_flops(Job(dims, 8192, 1), "causal")

    # 8,030,261,248 parameters less lookup table and norms.
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    attention = 12 * (8192**2 / 2) * 4096 * 32
    assert flops(llama3_8b()) == 6.0 * weights * 8192 + attention
    windowed = flops(llama3_8b(window=1024))
    assert windowed == 6.0 * weights * 8192 + 12 * (8192 * 1024 - 1024**2 / 2) * 4096 * 32


def test_all_faults_at_once():
    config = TransformerConfig(
        embed_dim=30, num_heads=4, num_kv_heads=3, dropout=1.0, max_positions=8, remat="dot"
    )
    faults = [
        "embed_dim=30 is not a multiple of num_heads=4; change",
        "num_heads=4 is not a multiple of num_kv_heads=3; ",
        "dropout is 1.0; it must be in [0, 1).",
        "remat policy 'dot' is unknown. Did you mean 'dots'?\n  Choose none, dots, full",
        "vocab_size is unknown",
        "sequences of 12 tokens are longer than max_positions=8; shorten",
    ]
    found = validate(config, DataSpec(sequence_length=12))
    assert len(found) == len(faults)
    assert all(map(str.startswith, found, faults))
    with pytest.raises(ModelError) as error:
        make(config, DataSpec(sequence_length=12), nnx.Rngs(0))
    assert str(error.value) == "the transformer cannot be made:\n  " + "\n  ".join(found)


def test_a_row_longer_than_the_positions_is_refused():
    model = nnx.eval_shape(lambda: make(TransformerConfig(**CLASSIC), DATA, nnx.Rngs(0)))
    with pytest.raises(
        ModelError,
        match=r"a sequence of 13 tokens is longer than(.|\n)*\n  Shorten it, or make the",
    ):
        model(tokens(1, LENGTH + 1))


EXPERTS = MoEConfig(num_experts=4, mlp_dim=16, num_shared_experts=1)


def test_faults_of_chunks_and_experts():
    (fault,) = validate(TransformerConfig(**SMALL, loss_chunks=VOCAB + 1), DATA)
    assert (
        fault
        == f"loss_chunks={VOCAB + 1} is more than the {VOCAB} classes of the vocabulary; lower it."
    )
    experts = dataclasses.replace(EXPERTS, experts_per_token=9)
    config = TransformerConfig(**(SMALL | {"mlp": "plain", "mlp_bias": True}), moe=experts)
    starts = ["moe.experts_per_token=9 is more", "mlp: plain has no effect", "mlp_bias has no"]
    found = validate(config, DATA)
    assert len(found) == len(starts)
    assert all(map(str.startswith, found, starts))


@pytest.mark.mesh
def test_routers_of_experts_are_in_the_metrics_and_in_the_training_loss():
    model = make(TransformerConfig(**SMALL, moe=EXPERTS), DATA, nnx.Rngs(0))
    trained, metrics = loss(model, batch_of(), jax.random.key(0), train=True)
    evaluated, _ = loss(model, batch_of(), jax.random.key(0), train=False)
    assert metrics["router_dropped"].value == 0
    assert metrics["router_max_load"].value >= 1
    # Each layer's balance is 1 when the load is even, more when it is not.
    added = float(trained.value - evaluated.value)
    balance = 0.01 * SMALL["num_layers"] * float(metrics["router_balance"].value)
    assert added == pytest.approx(balance, rel=1e-3)
