"""The engine on a GPU: the model's own tokens, alone and in company, and 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib as sl
from shardlib.engine import Sampling
from shardlib.registry import DataSpec
from shardlib_models.transformer import generate, make
from shardlib_models.transformer_config import TransformerConfig

pytestmark = pytest.mark.gpu

CONFIG = TransformerConfig(
    num_layers=2,
    embed_dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=256,
    vocab_size=512,
    max_positions=512,
)


@pytest.fixture(autouse=True)
def highest():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    sl.hf.save(make(CONFIG, DataSpec(), nnx.Rngs(0)), folder)
    return folder


def prompts(count=12):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 512, rng.integers(1, 90)).tolist() for _ in range(count)]


def test_greedy_tokens_are_those_of_the_model(folder):
    loaded = sl.hf.load(folder)
    engine = sl.Engine(loaded, context=128)
    assert {x.platform for x in jax.tree.leaves(engine._state.pages)[0].devices()} == {"gpu"}
    for prompt, answer in zip(prompts(4), engine.generate(prompts(4), max_tokens=16), strict=True):
        whole = generate(
            loaded.model,
            jnp.asarray([prompt], jnp.int32),
            length=16,
            temperature=0.0,
            rng=jax.random.key(0),
        )
        assert answer.ids == whole[0, len(prompt) :].tolist()


def test_weights_and_cache_in_8_bits(folder):
    engine = sl.Engine(sl.hf.load(folder), context=128, weights="int8", cache="int8")
    alone = [engine.generate([prompt], max_tokens=8)[0].ids for prompt in prompts()]
    assert [answer.ids for answer in engine.generate(prompts(), max_tokens=8)] == alone


def test_nothing_compiles_after_the_first_answers(folder):
    engine = sl.Engine(sl.hf.load(folder), context=256)
    engine.warm_up()
    compiled = engine.stats().num_compiled
    engine.generate(prompts(), max_tokens=24)
    assert engine.stats().num_compiled == compiled <= 6
    request = engine.submit([5] * 40, Sampling(max_tokens=8))
    while engine.step():
        pass
    assert len(request.answer().ids) == 8
