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


def generate(model, tokens, **options):
    return FAMILY.generate(model, tokens, rng=jax.random.key(0), **options)


@pytest.mark.parametrize(
    "options",
    [LLAMA, GPT2, LLAMA | {"window": 3}, LLAMA | {"dropout": 0.5}, LLAMA | {"remat": "full"}],
)
def test_cached_steps_equal_the_whole_sequence(options):
    model = make(TransformerConfig(**options), DATA, nnx.Rngs(0))
    out = generate(model, prompt(), length=12, temperature=0.0)
    assert out.shape == (3, 16)
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out[:, :4], prompt())
    model.eval()
    best = jnp.argmax(model(out), axis=-1)
    np.testing.assert_array_equal(out[:, 4:], best[:, 3:-1])
    assert len(np.unique(out[:, 4:])) > 3


def test_jitted_with_temperature_as_an_argument():
    model = make(TransformerConfig(**LLAMA), DATA, nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, tokens, temperature, key):
        model = nnx.merge(graphdef, state)
        return FAMILY.generate(model, tokens, length=5, temperature=temperature, rng=key)

    key = jax.random.key(0)
    greedy = run(state, prompt(), 0.0, key)
    np.testing.assert_array_equal(greedy, generate(model, prompt(), length=5, temperature=0.0))
    warm = run(state, prompt(), 1.0, key)
    np.testing.assert_array_equal(warm, run(state, prompt(), 1.0, key))
    assert not jnp.array_equal(warm, run(state, prompt(), 1.0, jax.random.key(1)))
    # So cold that only the likeliest token is drawn.
    np.testing.assert_array_equal(run(state, prompt(), 1e-6, key), greedy)


def test_samples_follow_the_distribution():
    model = make(TransformerConfig(**LLAMA), DATA, nnx.Rngs(0))
    tokens = jnp.broadcast_to(prompt()[:1], (4000, 4))
    drawn = generate(model, tokens, length=1, temperature=2.0)[:, -1]
    expected = jax.nn.softmax(model(prompt()[:1])[0, -1] / 2.0)
    found = np.bincount(drawn, minlength=VOCAB) / 4000
    # Five standard deviations of a frequency of 4,000 draws.
    np.testing.assert_allclose(found, expected, atol=5 * 0.5 / 4000**0.5)


def test_one_token_and_the_model_as_it_was():
    model = make(TransformerConfig(**LLAMA, dropout=0.5), DATA, nnx.Rngs(0))
    assert generate(model, prompt(), length=1, temperature=0.0).shape == (3, 5)
    assert not model.embedding_dropout.deterministic
    assert model.embedding_dropout.rngs.count[...] == 0


def test_bfloat16_caches_are_bfloat16():
    model = make(TransformerConfig(**LLAMA), DATA, nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    text = str(jax.make_jaxpr(lambda t: generate(model, t, length=4, temperature=0.0))(prompt()))
    assert "bf16[3,3,8,2,4]" in text
    assert "f32[3,3,8,2,4]" not in text


def test_refusals():
    model = make(TransformerConfig(**GPT2), DATA, nnx.Rngs(0))
    assert generate(model, prompt(), length=16, temperature=0.0).shape == (3, 20)
    with pytest.raises(ModelError, match="a sequence of 21 tokens is longer than max_positions=20"):
        generate(model, prompt(), length=17, temperature=0.0)
    for length, tokens in ((0, prompt()), (3, prompt()[:, :0])):
        with pytest.raises(ModelError, match="Start from 1 token or more, and add 1 or more"):
            generate(model, tokens, length=length, temperature=0.0)
