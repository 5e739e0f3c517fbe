"""Answers of T5: those of transformers and of the model alone, with equal bits in any company."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_decoder import Served

import shardlib as sl
from shardlib.engine import Engine, Sampling
from shardlib.errors import ModelError
from shardlib.registry import DataSpec
from shardlib_models.t5 import FAMILY
from shardlib_models.t5_config import T5Config
from shardlib_models.t5_decode import generate

VOCAB, END = 96, 1


def t5(scope=None):
    config = T5Config(
        embed_dim=64, num_layers=2, num_decoder_layers=3, num_heads=4, head_dim=24, mlp_dim=96,
        vocab_size=VOCAB, relative_buckets=8, relative_max_distance=20, init_factor=2.0,
    )  # fmt: skip

    def parts():
        return nnx.split(FAMILY.make(config, DataSpec(), nnx.Rngs(0)))

    model = nnx.merge(*(jax.jit(parts)() if scope is None else parts()))
    # Small, so that layers decide the next token, and not the last token.
    table = model.token_embedding.embedding
    table.set_value(0.1 * table[...])
    for bias in (model.encoder.bias.table, model.decoder.bias.table):
        bias.set_value(8 * bias[...])
    model.eval()
    return Served(model, model.config, scope, end_tokens=(END,), family=FAMILY)


@pytest.fixture(scope="module")
def served():
    return t5()


def prompts(count, seed=0, longest=90):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.mesh
def test_greedy_tokens_are_those_of_the_model_alone(served):
    asked = prompts(3, longest=60)
    found = Engine(served, context=100, slots=4, chunk=64).generate(
        asked, max_tokens=30, ignore_end=True
    )
    rows = np.zeros((3, 60), np.int32)
    for row, prompt in zip(rows, asked, strict=True):
        row[: len(prompt)] = prompt
    alone = nnx.jit(
        lambda model, tokens: generate(
            model, tokens, length=30, temperature=0.0, rng=jax.random.key(0),
            segment_ids=(tokens > 0).astype(jnp.int32),
        )
    )(served.model, jnp.asarray(rows))  # fmt: skip
    assert [one.ids for one in found] == alone[:, 60:].tolist()
    assert [list(one.prompt) for one in found] == asked
    assert len({token for one in found for token in one.ids}) > 6


EXACT = {"context": 160, "deterministic": True}


def asked_of(count):
    return [
        (prompt, Sampling(max_tokens=30, temperature=0.7 * (n % 2), seed=n, logprobs=n % 3))
        for n, prompt in enumerate(prompts(count))
    ]


def answers(engine, asked):
    requests = [engine.submit(prompt, sampling) for prompt, sampling in asked]
    while engine.step():
        pass
    return [request.answer() for request in requests]


def bits(answers):
    return [[(token.id, token.logprob, token.top) for token in a.tokens] for a in answers]


@pytest.fixture(scope="module")
def together(served):
    with jax.default_matmul_precision("highest"):
        return bits(answers(Engine(served, **EXACT), asked_of(16)))


@pytest.mark.mesh
@pytest.mark.parametrize(
    "options",
    [
        {"pages": 14},
        {"speculate": 7, "chunk": 64},
        pytest.param({"overlap": False, "slots": 5, "page_size": 32}, marks=pytest.mark.soak),
        pytest.param({"chunk": 512, "prefix_cache": False}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_company(served, together, options):
    engine = Engine(served, **(EXACT | options))
    assert bits(answers(engine, asked_of(16))) == together
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("pages" in options)
    assert (stats.right_tokens > 0) == ("speculate" in options)
    assert (stats.pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    # Texts of 64, 128 and 160 tokens, and three steps.
    assert stats.num_compiled <= 6


@pytest.mark.mesh
def test_bits_are_those_of_a_request_alone_and_after_a_failed_step(served, together, monkeypatch):
    engine, asked = Engine(served, **EXACT), asked_of(16)
    assert [bits(answers(engine, [one]))[0] for one in asked[:4]] == together[:4]
    requests = [engine.submit(*one) for one in asked[:6]]
    for _ in range(5):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._programs, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    while engine.step():
        pass
    assert bits([one.answer() for one in requests]) == together[:6]


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("mesh", ["data=4,tensor=2", "fsdp=8"])
def test_tokens_on_a_mesh_are_those_of_one_device(served, mesh):
    asked = prompts(6)
    options = {"max_tokens": 12, "ignore_end": True}
    alone = Engine(served, context=160, slots=8).generate(asked, **options)
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD) as scope:
        engine = Engine(t5(scope), context=160, slots=8)
        found = engine.generate(asked, **options)
        assert engine.generate(asked, **options) == found
    for one, other in zip(found, alone, strict=True):
        assert one.ids == other.ids
        scores = ([token.logprob for token in answer.tokens] for answer in (one, other))
        np.testing.assert_allclose(*scores, atol=1e-4)
    assert engine.stats().num_compiled <= 5


@pytest.mark.mesh
def test_adjustments_and_8_bits(served):
    prompt = prompts(1)[0]
    plain = Engine(served, context=160)
    first = plain.generate(prompt, max_tokens=8)[0]
    other = plain.generate(prompt, max_tokens=8, logit_bias={first.ids[0]: -100})[0]
    assert first.ids[0] not in other.ids
    short = Engine(served, context=160, weights="int8", cache="int8")
    rounded = short.generate(prompt, max_tokens=8)[0]
    assert abs(rounded.tokens[0].logprob - first.tokens[0].logprob) < 0.1


REFUSED = [
    ({"pooling": "mean"}, "pooling='mean' for a T5, which is an encoder with a decoder"),
    ({"adapters": {"a": None}}, "adapters=.*for a T5"),
]


@pytest.mark.parametrize(("options", "fault"), REFUSED, ids=[str(one) for one, _ in REFUSED])
def test_options_that_are_not_for_t5(served, options, fault):
    with pytest.raises(ModelError, match=rf"(?s){fault}.*\n  Leave it out"):
        Engine(served, **options)


def test_requests_that_are_not_for_t5(served):
    engine = Engine(served, context=64, slots=2)
    with pytest.raises(ModelError, match=r"no embeddings.\n  Embed texts with"):
        engine.embed([[1, 2]])
    with pytest.raises(ModelError, match=r"prompt_logprobs \(echo with logprobs\).*\n  Leave it"):
        engine.generate([[1, 2]], prompt_logprobs=True)
    with pytest.raises(ModelError, match=r"63 tokens, but the context of 64 must.*\n  Shorten"):
        engine.generate([[3] * 63])
    with pytest.raises(ModelError, match=r"of 60 tokens and max_tokens=4 exceed.*\n.*at most 3"):
        engine.generate([[3] * 60], max_tokens=4)


@pytest.mark.mesh
@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.soak)])
def test_greedy_tokens_are_those_of_transformers(tmp_path, version, count):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    new = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=64, d_kv=24, d_ff=96, num_layers=2, num_decoder_layers=3,
        num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=20,
        initializer_factor=2.0, decoder_start_token_id=0, eos_token_id=END, pad_token_id=0,
        **(new if version == "v1.1" else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.shared.weight.data *= 0.1
    if version == "v1.1":
        # The published weights of v1.1 have a head of their own.
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 64))
    model.save_pretrained(tmp_path)
    engine = Engine(sl.hf.load(tmp_path), context=160)
    asked = prompts(count)
    found = engine.generate(asked, max_tokens=40, logprobs=2)
    for prompt, answer in zip(asked, found, strict=True):
        with torch.no_grad():
            # Its cache fails where encoder and decoder differ in layers.
            options = {"max_new_tokens": 40, "do_sample": False, "use_cache": False}
            out = model.generate(torch.tensor([prompt]), **options)
        theirs = out[0, 1:].tolist()
        theirs = theirs[: theirs.index(END)] if END in theirs else theirs
        for token, their in zip(answer.tokens, theirs, strict=False):
            if token.id != their:
                # Only where the two likeliest tokens are as good as equal.
                assert token.top[0][1] - token.top[1][1] < 1e-5
                break
        else:
            assert answer.ids == theirs
