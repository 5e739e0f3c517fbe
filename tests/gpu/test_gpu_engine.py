"""The engine on a GPU: the model's own tokens, and the same bits in any company."""

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


def bits(answers):
    return [[(token.id, token.logprob) for token in answer.tokens] for answer in answers]


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


@pytest.mark.parametrize("options", [{}, {"weights": "int8", "cache": "int8"}], ids=["", "int8"])
def test_company_changes_no_bit(folder, options):
    engine = sl.Engine(sl.hf.load(folder), context=128, deterministic=True, **options)
    asked = {"max_tokens": 24, "temperature": 0.7, "seed": 3}
    together = bits(engine.generate(prompts(), **asked))
    alone = [bits(engine.generate([prompt], **asked))[0] for prompt in prompts()]
    assert together == alone


def test_nothing_compiles_after_the_first_answers(folder):
    engine = sl.Engine(sl.hf.load(folder), context=256)
    engine.generate([[1, 2, 3], [1] * 200], max_tokens=2)
    compiled = engine.stats().num_compiled
    engine.generate(prompts(), max_tokens=24)
    assert engine.stats().num_compiled == compiled <= 6
    request = engine.submit([5] * 40, Sampling(max_tokens=8))
    while engine.step():
        pass
    assert len(request.answer().ids) == 8
