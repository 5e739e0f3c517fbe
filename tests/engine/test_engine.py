"""Answers of the engine: those of the model alone, with the same bits in any company."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_decoder import VOCAB

from shardlib.data.tokenizer import BytesTokenizer
from shardlib.engine import Engine, Sampling
from shardlib.errors import ModelError
from shardlib_models.transformer import generate


def prompts(count, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


def bits(answers):
    return [[(token.id, token.logprob, token.top) for token in a.tokens] for a in answers]


EXACT = {"context": 128, "deterministic": True}


@pytest.fixture(scope="module")
def asked():
    return [
        (prompt, Sampling(max_tokens=40, temperature=0.7 * (n % 2), seed=n, logprobs=n % 3))
        for n, prompt in enumerate(prompts(24))
    ]


def answers(engine, asked):
    requests = [engine.submit(prompt, sampling) for prompt, sampling in asked]
    while engine.step():
        pass
    return [request.answer() for request in requests]


@pytest.fixture(scope="module")
def together(served, asked):
    with jax.default_matmul_precision("highest"):
        return bits(answers(Engine(served, **EXACT), asked))


@pytest.mark.mesh
def test_greedy_tokens_are_those_of_the_model_alone(served):
    asked = prompts(4)
    found = Engine(served, context=128).generate(asked, max_tokens=8)
    for prompt, answer in zip(asked, found, strict=True):
        whole = generate(
            served.model,
            jnp.asarray([prompt], jnp.int32),
            length=8,
            temperature=0.0,
            rng=jax.random.key(0),
        )
        assert answer.ids == whole[0, len(prompt) :].tolist()
        assert answer.finish_reason == "length"


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    "options",
    [
        {"pages": 14, "prefix_cache": False},
        {"chunk": 32},
        {"overlap": False},
        {"slots": 64, "page_size": 32, "lane": 64},
        {"slots": 5, "chunk": 96},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_company(served, asked, together, options):
    engine = Engine(served, **(EXACT | options))
    assert bits(answers(engine, asked)) == together
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("pages" in options)
    assert (stats.pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_compiled <= 3


@pytest.mark.mesh
def test_bits_are_those_of_a_request_alone_and_at_random_arrivals(served, asked, together):
    engine = Engine(served, **EXACT)
    alone = [answers(engine, [one]) for one in asked[:4]]
    assert [bits(one)[0] for one in alone] == together[:4]
    rng, left, requests = np.random.default_rng(0), list(asked), []
    while left or engine.step():
        for _ in range(rng.integers(0, 3)):
            requests += [engine.submit(*left.pop(0))] if left else []
        engine.step()
    assert bits([request.answer() for request in requests]) == together
    assert engine.stats().cached_tokens > 0


@pytest.mark.mesh
def test_a_shared_prefix_is_computed_once(served):
    stem = prompts(1, seed=3, longest=60)[0] * 2
    engine = Engine(served, **EXACT)
    first, second = (engine.generate([[*stem, n]], max_tokens=4)[0] for n in (1, 2))
    assert first.cached_tokens == 0
    assert second.cached_tokens == len(stem) // 16 * 16
    fresh = Engine(served, **EXACT).generate([[*stem, 2]], max_tokens=4)
    assert bits([second]) == bits(fresh)


def test_a_cancelled_request_frees_its_slot_and_pages(served):
    engine = Engine(served, context=128, slots=2)
    request = engine.submit([1, 2, 3])
    late = engine.submit([1, 2, 3], timeout_seconds=0.0)
    for _ in range(4):
        engine.step()
    assert late.finish_reason == "deadline"
    engine.cancel(request)
    stats = engine.stats()
    assert (stats.num_running, stats.pages_used) == (0, 0)
    assert request.answer().finish_reason == "cancelled"
    assert 0 < len(request.tokens) < 4
    assert not engine.step()


def test_an_answer_ends_before_stops(served):
    engine = Engine(served, context=128)
    drawn = {"max_tokens": 16, "temperature": 1.0}
    (whole,) = engine.generate([[5, 6]], **drawn)
    end = whole.ids[8]
    (cut,) = engine.generate([[5, 6]], stop_tokens=(end,), **drawn)
    assert (cut.ids, cut.finish_reason) == (whole.ids[: whole.ids.index(end)], "stop")


def test_updated_parameters_answer_from_the_next_step_on(served):
    engine = Engine(served, context=128)
    before = engine.generate([list(range(40))], max_tokens=4)
    params = jax.tree.map(lambda x: x * 1.5, nnx.state(served.model))
    engine.update(params)
    after = engine.generate([list(range(40))], max_tokens=4)
    assert bits(before) != bits(after)
    assert after[0].cached_tokens == 0
    graphdef = nnx.graphdef(served.model)
    logits = nnx.merge(graphdef, params)(jnp.arange(40, dtype=jnp.int32)[None])[0, -1]
    assert after[0].ids[0] == int(jnp.argmax(logits))
    with pytest.raises(ModelError, match="the new parameters differ in"):
        engine.update(jax.tree.map(lambda x: x[..., None], params))


def test_requests_that_cannot_be_answered(served):
    engine = Engine(served, context=64)
    with pytest.raises(ModelError, match="the prompt has 64 tokens, and the context 64"):
        engine.submit([0] * 64)
    with pytest.raises(ModelError, match="max_tokens=9 exceed the context"):
        engine.submit([0] * 60, max_tokens=9)
    with pytest.raises(ModelError, match="the prompt has the tokens 96, and the model those from"):
        engine.submit([96])
    with pytest.raises(ModelError, match="no tokens"):
        engine.submit([])
    with pytest.raises(ModelError, match="no tokenizer"):
        engine.submit("text")
    with pytest.raises(ModelError) as raised:
        engine.submit([1], temperature=-1.0, top_p=0.0)
    assert "temperature=-1.0, which must be 0 or more; top_p=0.0" in str(raised.value)
    with pytest.raises(ModelError, match="context=300, and the model has at most 256"):
        Engine(served, context=300)
    with pytest.raises(ModelError, match="chunk=100 and lane=32 do not fit"):
        Engine(served, chunk=100)


def test_text_comes_as_it_is_known(served):
    engine = Engine(dataclasses.replace(served, tokenizer=BytesTokenizer()), context=128)
    # The bytes of the prompt are below the vocabulary of 96.
    (whole,) = engine.generate(" 1+1=2 ", max_tokens=16, temperature=1.0, seed=3)
    pieces = list(engine.stream(" 1+1=2 ", max_tokens=16, temperature=1.0, seed=3))
    assert "".join(pieces) == whole.text == bytes(whole.ids).decode()
    assert len(pieces) > 8
    stop = whole.text[5:8]
    (cut,) = engine.generate(" 1+1=2 ", max_tokens=16, temperature=1.0, seed=3, stop=stop)
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
