"""BERT: masked tokens, losses of its heads on meshes, and configs that are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.registry import DataSpec
from shardlib_models import bert_losses
from shardlib_models.bert import (
    BertClassifierConfig,
    BertConfig,
    BertSpansConfig,
    make_masked,
    validate,
)

DATA = DataSpec(vocab_size=64, sequence_length=16, num_classes=8)
SIZES = {"num_layers": 2, "embed_dim": 32, "mlp_dim": 48, "max_positions": 16}
FAMILIES = {
    "masked": (bert_losses.MASKED, BertConfig(**SIZES, vocab_size=66)),
    "classifier": (bert_losses.CLASSIFIER, BertClassifierConfig(**SIZES)),
    "spans": (bert_losses.SPAN_FINDER, BertSpansConfig(**SIZES)),
}


def test_masked_tokens_are_in_the_published_proportions():
    config = make_masked(BertConfig(**SIZES), DATA, nnx.Rngs(0)).config
    assert (config.vocab_size, config.mask_token) == (65, 64)
    tokens = jax.random.randint(jax.random.key(1), (400, 100), 0, 64, jnp.int32)
    shown, chosen = map(np.asarray, bert_losses.mask_tokens(tokens, jax.random.key(0), config))
    assert (shown == np.asarray(tokens))[~chosen].all()
    # Within five standard deviations of proportions of 40,000 and 6,000 tokens.
    assert abs(chosen.mean() - 0.15) < 5 * np.sqrt(0.15 * 0.85 / 4e4)
    parts = shown[chosen] == 64, (shown == np.asarray(tokens))[chosen]
    # One in 65 of the random ids is the mask token, and one the token itself.
    expected = 0.8 + 0.1 / 65, 0.1 + 0.1 / 65
    for part, share in zip(parts, expected, strict=True):
        assert abs(part.mean() - share) < 5 * np.sqrt(share * (1 - share) / 6e3)


@pytest.mark.mesh
def test_padding_is_not_predicted_and_does_not_change_the_logits():
    config = BertConfig(**SIZES, mask_rate=1.0)
    model = nnx.merge(*jax.jit(lambda: nnx.split(make_masked(config, DATA, nnx.Rngs(0))))())
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 64, jnp.int32)
    ids = jnp.where(jnp.arange(16)[None] < 12, 1, 0) * jnp.ones((2, 1), jnp.int32)
    batch = {"tokens": tokens, "segment_ids": ids}
    loss = nnx.jit(
        lambda model: bert_losses.masked_loss(model, batch, jax.random.key(0), train=False)
    )
    mean, _ = loss(model)
    assert mean.weight == 24
    other = tokens.at[:, 12:].set(3)
    logits = nnx.jit(lambda model, tokens: model(tokens, segment_ids=ids)[:, :12])
    np.testing.assert_array_equal(logits(model, tokens), logits(model, other))


def test_a_model_without_a_mask_token_cannot_be_trained_on_masked_tokens():
    model = make_masked(BertConfig(**SIZES, vocab_size=64), DataSpec(), nnx.Rngs(0))
    with pytest.raises(ModelError, match=r"model\.mask_token is null\.\n  Set it.*mask_token_id"):
        bert_losses.masked_loss(
            model, {"tokens": jnp.zeros((1, 4), jnp.int32)}, jax.random.key(0), train=True
        )


WRONG = {
    "heads": ({"num_heads": 3}, "embed_dim=32 is not a multiple of num_heads=3"),
    "dropout": ({"dropout": 1.0}, "dropout is 1.0"),
    "types": ({"num_types": 0}, "num_types is 0"),
    "vocabulary": ({"vocab_size": 8}, "the data have 64 tokens, but vocab_size=8"),
    "no id left": ({"vocab_size": 64}, "the data use all of vocab_size=64 ids"),
    "positions": ({"max_positions": 8}, "sequences of 16 tokens are longer than max_positions=8"),
    "mask rate": ({"mask_rate": 0.0}, "mask_rate is 0.0"),
    "mask token": ({"mask_token": 65}, r"mask_token is 65; it must be in \[0, 65\)"),
    "remat": ({"remat": "save:nothing"}, "nothing"),
}


@pytest.mark.parametrize(("changes", "fault"), WRONG.values(), ids=WRONG)
def test_faults_are_named(changes, fault):
    config = BertConfig(**{**SIZES, **changes})
    assert validate(config, DATA)
    with pytest.raises(ModelError, match=fault):
        make_masked(config, DATA, nnx.Rngs(0))


def losses(name, mesh, devices=None, steps=3):
    family, config = FAMILIES[name]
    batch = family.inputs.example(np.random.default_rng(0), 8, DATA)
    with sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD):
        state = sl.init_state(lambda rngs: family.make(config, DATA, rngs), optax.adam(1e-2))
        step = sl.make_train_step(
            lambda model, batch, rng: family.loss(model, batch, rng, train=True)
        )
        found = []
        for _ in range(steps):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
    return np.array(found)


@functools.cache
def one_device(name):
    return losses(name, "data=1", jax.devices()[:1])


# The heads differ from each other after the encoder only.
ON_MESHES = [
    *((name, "data=2,fsdp=2,tensor=2") for name in FAMILIES),
    *((name, mesh) for name in FAMILIES for mesh in ("data=8", "fsdp=8")),
]


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(("name", "mesh"), ON_MESHES)
def test_losses_on_meshes_are_those_of_one_device(name, mesh):
    with jax.default_matmul_precision("highest"):
        expected = one_device(name)
        # Sums in another order, through three updates of Adam.
        np.testing.assert_allclose(losses(name, mesh), expected, rtol=2e-5)
    assert np.ptp(expected) > 1e-3
