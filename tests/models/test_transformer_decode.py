import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib.errors import ModelError
from shardlib.registry import DataSpec
from shardlib_models.transformer import FAMILY, make
from shardlib_models.transformer_config import TransformerConfig

VOCAB = 31
DATA = DataSpec(vocab_size=VOCAB)
LLAMA = {"num_layers": 3, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "init_stddev": 0.2}
GPT2 = {
    "num_layers": 2,
    "embed_dim": 16,
    "norm": "layer",
    "positions": "learned",
    "max_positions": 20,
    "mlp": "plain",
    "tied_embeddings": True,
    "init_stddev": 0.2,
}


def prompt(length=4):
    return jax.random.randint(jax.random.key(3), (3, length), 0, VOCAB, jnp.int32)


@functools.cache
def made(**options):
    """The graph definition and the parameters of a model."""
    return jax.jit(lambda: nnx.split(make(TransformerConfig(**options), DATA, nnx.Rngs(0))))()


@functools.partial(jax.jit, static_argnums=0, static_argnames="length")
def generate(graphdef, state, tokens, *, length, temperature=0.0, seed=0):
    options = {"length": length, "temperature": temperature, "rng": jax.random.key(seed)}
    return FAMILY.generate(nnx.merge(graphdef, state), tokens, **options)


@functools.partial(jax.jit, static_argnums=0)
def logits(graphdef, state, tokens):
    model = nnx.merge(graphdef, state)
    model.eval()
    return model(tokens)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    "options",
    [LLAMA, GPT2, LLAMA | {"window": 3}, LLAMA | {"dropout": 0.5}, LLAMA | {"remat": "full"}],
)
def test_cached_steps_equal_the_whole_sequence(options):
    model = made(**options)
    out = generate(*model, prompt(), length=12)
    assert out.shape == (3, 16)
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out[:, :4], prompt())
    best = jnp.argmax(logits(*model, out), axis=-1)
    np.testing.assert_array_equal(out[:, 4:], best[:, 3:-1])
    assert len(np.unique(out[:, 4:])) > 3


def test_temperature_and_key_may_be_traced():
    def run(**options):
        return generate(*made(**LLAMA), prompt(), length=12, **options)

    np.testing.assert_array_equal(run(temperature=1.0), run(temperature=1.0))
    assert not jnp.array_equal(run(temperature=1.0), run(temperature=1.0, seed=1))
    # So cold that only the likeliest token is drawn.
    np.testing.assert_array_equal(run(temperature=1e-6), run())


def test_samples_follow_the_distribution():
    tokens = jnp.broadcast_to(prompt()[:1], (4000, 4))
    drawn = generate(*made(**LLAMA), tokens, length=1, temperature=2.0)[:, -1]
    expected = jax.nn.softmax(logits(*made(**LLAMA), prompt()[:1])[0, -1] / 2.0)
    found = np.bincount(drawn, minlength=VOCAB) / 4000
    # Five standard deviations of a frequency of 4,000 draws.
    np.testing.assert_allclose(found, expected, atol=5 * 0.5 / 4000**0.5)


def test_the_model_is_left_as_it_was():
    model = nnx.merge(*made(**LLAMA, dropout=0.5))
    options = {"length": 1, "temperature": 0.0, "rng": jax.random.key(0)}
    out = jax.jit(lambda tokens: FAMILY.generate(model, tokens, **options))(prompt())
    assert out.shape == (3, 5)
    assert not model.embedding_dropout.deterministic
    assert model.embedding_dropout.rngs.count[...] == 0


def test_bfloat16_caches_are_bfloat16():
    graphdef, state = made(**LLAMA)
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    text = str(jax.make_jaxpr(lambda state: generate(graphdef, state, prompt(), length=4))(state))
    assert "bf16[3,3,8,2,4]" in text
    assert ":f32[3,3,8,2,4]" not in text


@pytest.mark.mesh
def test_refusals():
    model = made(**GPT2)
    assert generate(*model, prompt(), length=16).shape == (3, 20)
    with pytest.raises(ModelError, match="a sequence of 21 tokens is longer than max_positions=20"):
        generate(*model, prompt(), length=17)
    for length, tokens in ((0, prompt()), (3, prompt()[:, :0])):
        with pytest.raises(ModelError) as error:
            generate(*model, tokens, length=length)
        assert str(error.value) == (
            f"cannot add {length} tokens to a prompt of {tokens.shape[1]}.\n"
            "  Start from 1 token or more, and add 1 or more."
        )
