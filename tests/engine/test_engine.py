"""Answers of the engine: those of the model alone, with the same bits in any company."""

import dataclasses
import math
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_decoder import VOCAB, made

from shardlib.data.tokenizer import BytesTokenizer
from shardlib.engine import Engine, Grammar, Sampling
from shardlib.engine.room import check_room
from shardlib.engine.sizes import engine_sizes
from shardlib.errors import DoesNotFitError, ModelError
from shardlib.hardware.free_memory import free_bytes
from shardlib_models.moe import MoEConfig
from shardlib_models.transformer import generate
from shardlib_models.transformer_attention import Context


def prompts(count, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


def bits(answers):
    return [[(token.id, token.logprob, token.top) for token in a.tokens] for a in answers]


@pytest.fixture(scope="module")
def engine(served):
    tokens = dataclasses.replace(served, tokenizer=BytesTokenizer())
    return Engine(tokens, context=128, slots=4, chunk=64)


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


@nnx.jit
def greedy(model, rows):
    return generate(model, rows, length=8, temperature=0.0, rng=jax.random.key(0))


@pytest.mark.mesh
def test_greedy_tokens_are_those_of_the_model_alone(served):
    asked = prompts(4)
    found = Engine(served, context=128).generate(asked, max_tokens=8)
    for prompt, answer in zip(asked, found, strict=True):
        whole = greedy(served.model, jnp.asarray([prompt], jnp.int32))
        assert answer.ids == whole[0, len(prompt) :].tolist()
        assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"pages": 14, "prefix_cache": False}, marks=pytest.mark.mesh),
        pytest.param({"overlap": False}, marks=pytest.mark.mesh),
        pytest.param({"slots": 64, "page_size": 32, "lane": 64}, marks=pytest.mark.mesh),
        pytest.param({"chunk": 32}, marks=pytest.mark.soak),
        pytest.param({"slots": 5, "chunk": 96}, marks=pytest.mark.soak),
        pytest.param({"speculate": 31, "pages": 14, "chunk": 32}, marks=pytest.mark.mesh),
        pytest.param({"speculate": 7}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_company(served, asked, together, options):
    engine = Engine(served, **(EXACT | options))
    assert bits(answers(engine, asked)) == together
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("pages" in options)
    assert (stats.right_tokens > 0) == ("speculate" in options)
    assert stats.right_tokens <= stats.guessed_tokens
    assert (stats.pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_compiled <= 3


@pytest.mark.mesh
def test_a_released_cache_is_made_again_without_compiling(served):
    engine, prompt = Engine(served, context=64, slots=2, chunk=32), [1] * 40
    before = engine.generate([prompt], max_tokens=4)
    count, state = engine.stats().num_compiled, engine._state
    request = engine.submit(prompt, max_tokens=4)
    with pytest.raises(ModelError, match=r"not finished.\n  Finish them"):
        engine.release()
    engine.step()
    engine.cancel(request)
    engine.release()
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    after = engine.generate([prompt], max_tokens=4)
    assert bits(after) == bits(before)
    assert after[0].cached_tokens == 0
    assert engine.stats().num_compiled == count


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
def test_a_long_prompt_has_the_same_bits_where_it_is_read_in_smaller_chunks(served):
    engine, late = Engine(served, **EXACT, chunk=64), [n % VOCAB for n in range(100)]
    alone = engine.generate([late], max_tokens=4)
    engine.scheduler.forget()
    others = [engine.submit([n], max_tokens=60) for n in range(4)]
    for _ in range(4):
        engine.step()
    request = engine.submit(late, max_tokens=4)
    engine.step()
    # A lane of 32 tokens, and not two.
    assert request.sequence.computed == 32
    while not request.finished:
        engine.step()
    assert bits([request.answer()]) == bits(alone)
    for other in others:
        engine.cancel(other)
    assert engine.stats().num_compiled <= 3


@pytest.mark.mesh
def test_a_shared_prefix_is_computed_once(served):
    stem = prompts(1, seed=3, longest=60)[0] * 2
    engine = Engine(served, **EXACT)
    first, second = (engine.generate([[*stem, n]], max_tokens=4)[0] for n in (1, 2))
    assert first.cached_tokens == 0
    assert second.cached_tokens == len(stem) // 16 * 16
    fresh = Engine(served, **EXACT).generate([[*stem, 2]], max_tokens=4)
    assert bits([second]) == bits(fresh)


def test_a_cancelled_request_frees_its_slot_and_pages(engine):
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


def test_an_answer_ends_before_stops(engine):
    drawn = {"max_tokens": 16, "temperature": 1.0}
    (whole,) = engine.generate([[5, 6]], **drawn)
    end = whole.ids[8]
    (cut,) = engine.generate([[5, 6]], stop_tokens=(end,), **drawn)
    assert (cut.ids, cut.finish_reason) == (whole.ids[: whole.ids.index(end)], "stop")


def test_updated_parameters_answer_from_the_next_step_on(served, caplog):
    engine = Engine(served, context=128, chunk=64)
    with jax.log_compiles():
        engine.generate(prompts(8, longest=90), max_tokens=4)
    assert "_step" in caplog.text
    caplog.clear()
    before = engine.generate([list(range(40))], max_tokens=4)
    params = jax.tree.map(lambda x: x * 1.5, nnx.state(served.model))
    with jax.log_compiles():
        engine.update(params)
        after = engine.generate([list(range(40))], max_tokens=4)
    assert bits(before) != bits(after)
    assert after[0].cached_tokens == 0
    with jax.log_compiles():
        engine.update(jax.tree.map(np.asarray, params), version=7)
        again = engine.generate([list(range(40))], max_tokens=4)
    assert bits(again) == bits(after)
    versions = [{token.version for token in a[0].tokens} for a in (before, after, again)]
    assert versions == [{0}, {1}, {7}]
    assert "_step" not in caplog.text
    graphdef = nnx.graphdef(served.model)
    updated = nnx.merge(graphdef, params)
    logits = nnx.jit(updated)(jnp.arange(40, dtype=jnp.int32)[None])[0, -1]
    assert after[0].ids[0] == int(jnp.argmax(logits))
    with pytest.raises(ModelError, match="the new parameters differ in"):
        engine.update(jax.tree.map(lambda x: x[..., None], params))


def test_requests_that_cannot_be_answered(served):
    engine = Engine(served, context=64)
    with pytest.raises(ModelError, match="the prompt has 64 tokens, but the context of 64"):
        engine.submit([0] * 64)
    with pytest.raises(ModelError, match="max_tokens=9 exceed the context"):
        engine.submit([0] * 60, max_tokens=9)
    with pytest.raises(ModelError, match="the prompt has the tokens 96, but the model has"):
        engine.submit([96])
    with pytest.raises(ModelError, match="no tokens"):
        engine.submit([])
    with pytest.raises(ModelError, match="no tokenizer"):
        engine.submit("text")
    with pytest.raises(
        ModelError, match=r"called 'max_token'\. Did you mean 'max_tokens'\?\n  Use"
    ):
        engine.submit([1], max_token=9)
    with pytest.raises(ModelError) as raised:
        engine.submit([1], temperature=-1.0, top_p=0.0)
    assert "temperature=-1.0, which must be a number from 0 to 1e38; top_p=0.0" in str(raised.value)
    request = engine.enqueue(engine.prepare([1], Sampling(max_tokens=1)))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"was queued before.\n  Prepare another"):
            engine.enqueue(request)
        while engine.step():
            pass
    with pytest.raises(ModelError, match="context=300, but the model has at most 256"):
        Engine(served, context=300)
    with pytest.raises(ModelError, match="chunk=100 is not a multiple of lane=32"):
        Engine(served, chunk=100)
    with pytest.raises(ModelError, match=r"slots=4.0 is not an integer.\n  Give"):
        Engine(served, slots=4.0)


OF_OTHER_TYPES = [
    {"temperature": None},
    {"temperature": "1"},
    {"top_p": True},
    {"max_tokens": True},
    {"seed": None},
    {"stop": None},
    {"stop_tokens": [1.5]},
    {"logit_bias": {"1": 1.0}},
    {"logit_bias": {1.5: 1.0}},
    {"logit_bias": [1]},
    {"presence_penalty": math.nan},
    {"grammar": "a+"},
    # It could not be compared with that of other requests, and each step would fail.
    {"priority": "high"},
    {"timeout_seconds": math.nan},
    {"timeout_seconds": math.inf},
    # NumPy compares complex numbers by their real parts first.
    {"temperature": np.complex64(1 + 2j)},
    {"timeout_seconds": np.complex64(1)},
    {"timeout_seconds": np.timedelta64(1)},
    {"ignore_end": "no"},
    {"prompt_logprobs": 1},
    {"stop": {"a": 1}},
    {"stop_tokens": np.asarray(3)},
]


@pytest.mark.parametrize("options", OF_OTHER_TYPES, ids=str)
def test_values_of_other_types_are_refused(engine, options):
    with pytest.raises(ModelError, match=rf"{next(iter(options))}=.*, which must be .*\n  Change"):
        engine.submit(" 1", **options)
    assert engine.stats().num_waiting == 0


def test_what_is_not_a_prompt_or_a_sampling_is_refused(engine):
    views = {"a": 1}.keys(), {"a": 1}.values(), {1: 2}.items()
    for prompts in (None, 3, {"a": 1}, {"a"}, np.asarray(3), *views):
        message = f"the prompts are {prompts!r}.\n  Give a text, token ids, or a list of these."
        with pytest.raises(ModelError, match=re.escape(message)):
            engine.generate(prompts)
    for prompts, given in ((b"abc", "b'abc'"), ([b"a"], "[b'a']"), ([None], "[None]")):
        message = f"the prompt is {given}, expected a text or integers [n].\n  Give the text"
        with pytest.raises(ModelError, match=re.escape(message)):
            engine.generate(prompts)
    with pytest.raises(ModelError, match=r"timeout_seconds=1000.*, which must be .*\n  Change"):
        # It is below infinity, and no float holds it.
        engine.submit(" 1", timeout_seconds=10**400)
    with pytest.raises(ModelError, match=rf"the prompt has the tokens {10**40}, but"):
        engine.submit([10**40])
    with pytest.raises(ModelError, match=r"sampling is dict.\n  Give"):
        engine.generate(" 1", {"temperature": 1.0})
    with pytest.raises(ModelError, match=r"kind='regexp' and a str.\n  Give a kind \(json_schema"):
        Grammar("regexp", "a")


def test_text_comes_as_it_is_known(engine):
    # The bytes of the prompt are below the vocabulary of 96.
    (whole,) = engine.generate(" 1+1=2 ", max_tokens=16, temperature=1.0, seed=3)
    pieces = list(engine.stream(" 1+1=2 ", max_tokens=16, temperature=1.0, seed=3))
    assert "".join(pieces) == whole.text == bytes(whole.ids).decode()
    assert len(pieces) > 8
    stop = whole.text[5:8]
    (cut,) = engine.generate(" 1+1=2 ", max_tokens=16, temperature=1.0, seed=3, stop=stop)
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


def test_an_answer_that_fails_ends_its_stream_with_the_error(served):
    class Broken(BytesTokenizer):
        count = 0

        def decode(self, ids):
            self.count += 1
            if self.count > 6:
                raise ValueError("no such text")
            return super().decode(ids)

    engine = Engine(dataclasses.replace(served, tokenizer=Broken()), context=64, chunk=32)
    with pytest.raises(ModelError, match="the answer ended by an error: no such text"):
        list(engine.stream(" ", max_tokens=8))


def test_a_stream_refuses_at_once_and_queues_when_it_is_read(engine):
    with pytest.raises(ModelError, match="no option of a sampling is called 'temprature'"):
        engine.stream(" 1", temprature=1.0)
    stream = engine.stream(" 1", max_tokens=2)
    assert engine.stats().num_waiting == 0
    assert "".join(stream) == engine.generate(" 1", max_tokens=2)[0].text


def test_the_time_of_a_stream_begins_when_it_is_read(engine):
    right = engine.generate(" 1", max_tokens=2)[0].text
    stream = engine.stream(" 1", max_tokens=2, timeout_seconds=1.0)
    time.sleep(1.1)
    assert "".join(stream) == right


def test_a_request_that_ends_before_it_is_queued_stays_out(engine):
    request = engine.prepare([1, 2], Sampling(max_tokens=2))
    engine.cancel(request)
    assert request.finish_reason == "cancelled"
    with pytest.raises(ModelError, match="queued before"):
        engine.enqueue(request)


def test_an_update_with_a_version_of_another_type_changes_nothing(served):
    engine = Engine(served, context=64, chunk=32)
    with pytest.raises(ModelError, match=r"the version is 'step-1'.\n  Give an integer"):
        engine.update(nnx.state(served.model), version="step-1")
    engine.update(nnx.state(served.model), version=7)
    (answer,) = engine.generate([1, 2, 3], max_tokens=1, prompt_logprobs=True)
    assert [token.version for token in (*answer.prompt_tokens, *answer.tokens)] == [7, 7, 7]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": "64"}, "context='64' is not an integer"),
        ({"speculate": "2"}, "speculate='2': a lane has 32 tokens"),
        ({"speculate": 2.0}, "speculate=2.0: a lane has 32 tokens"),
        ({"adapters": ["a"]}, "adapters is list, expected models by their names"),
        ({"prefix_cache": "no"}, "prefix_cache is 'no'"),
    ],
)
def test_options_of_other_types_are_refused(served, options, said):
    with pytest.raises(ModelError, match=rf"{said}.*\n  Give"):
        Engine(served, **{"context": 64, "chunk": 32} | options)


def test_prompts_and_samplings_in_every_form(engine):
    ids, drawn = [3, 1, 4, 1, 5], {"max_tokens": 3}
    (one,) = engine.generate(ids, **drawn)
    for form in (np.asarray(ids), jnp.asarray(ids), tuple(ids), [ids], np.asarray([ids], np.uint8)):
        assert [answer.ids for answer in engine.generate(form, **drawn)] == [one.ids]
    assert engine.generate([]) == []
    each = [Sampling(max_tokens=n, temperature=1.0, seed=n) for n in (1, 2)]
    several = engine.generate((prompt for prompt in (ids, "12")), each)
    assert [len(answer.ids) for answer in several] == [1, 2]
    with pytest.raises(ModelError, match="sampling has 2 items for 1 prompts"):
        engine.generate([ids], each)


@pytest.mark.parametrize("prompt", [[1.5, 2.0], ["1", "2"], [True, False], [[1], [2, 3]]], ids=str)
def test_prompts_that_are_no_token_ids(engine, prompt):
    with pytest.raises(ModelError, match="expected a text or integers"):
        engine.submit(prompt)
    with pytest.raises(ModelError, match="prompt 1: the prompt has the tokens 96"):
        engine.generate([[1], [96]])
    assert engine.stats().num_waiting == 0


def test_settings_that_no_step_can_take():
    with pytest.raises(ModelError) as raised:
        Sampling(
            max_tokens=1.5, top_k=2**31, seed=0.5, stop_tokens=(True,), stop=("",), logprobs=21
        )
    for name in ("max_tokens=1.5", "top_k=2147483648", "seed=0.5", "stop_tokens=", "stop="):
        assert f"{name}" in str(raised.value)


def test_pages_bound_the_context(served, engine):
    with pytest.raises(ModelError, match="context=128, but the pages hold 32 tokens"):
        Engine(served, context=128, pages=2)
    with pytest.raises(ModelError, match="pages=0"):
        Engine(served, pages=0)
    few = Engine(served, pages=2)
    assert few.context == 32
    assert few.submit([1] * 30).sequence.max_tokens == 2
    with pytest.raises(ModelError, match="has 0 tokens and is not complete"):
        engine.submit([1]).answer()
    while engine.step():
        pass


def test_answers_go_on_after_a_step_that_failed(engine, monkeypatch):
    asked = [[5, 6], [7, 8, 9], list(range(40)), [1]]
    settings = {"max_tokens": 8, "temperature": 1.0}
    right = [answer.ids for answer in engine.generate(asked, **settings)]
    requests = [engine.submit(prompt, **settings) for prompt in asked]
    places = [(engine._programs, "run"), (engine._open, "read"), (engine._arranger, "arrays")]
    for place, name in places:
        engine.step()
        with monkeypatch.context() as patched:
            patched.setattr(place, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    while engine.step():
        pass
    assert [request.answer().ids for request in requests] == right
    assert engine.stats().pages_used == 0


def test_a_sequence_is_not_poisoned_by_what_another_left(engine):
    right = engine.generate([[5, 6]], max_tokens=8)
    state = engine._state
    pages = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.pages)
    engine._state = state._replace(pages=pages)
    engine.scheduler.forget()
    assert bits(engine.generate([[5, 6]], max_tokens=8)) == bits(right)


def test_a_stream_ends_with_its_last_text_when_another_thread_steps(engine):
    (whole,) = engine.generate("12", max_tokens=40, temperature=1.0)
    for _ in range(3):
        stream = engine.stream("12", max_tokens=40, temperature=1.0)
        pieces = [next(stream)]
        other = threading.Thread(target=lambda: [None for _ in iter(engine.step, False)])
        other.start()
        pieces += stream
        other.join()
        assert "".join(pieces) == whole.text


@pytest.mark.soak
def test_experts_with_a_capacity_take_every_token():
    config = MoEConfig(num_experts=4, dispatch="capacity", capacity_factor=0.5)
    model = made(moe=config)
    asked = prompts(6)
    together = Engine(model, **EXACT).generate(asked, max_tokens=8)
    alone = Engine(model, **EXACT, slots=3)
    assert bits(alone.generate([prompt], max_tokens=8)[0] for prompt in asked) == bits(together)


@pytest.mark.mesh
def test_a_model_with_dropout_is_served_without_it():
    # In training mode, as a run is restored; the weights do not depend on dropout.
    served = made(dropout=0.5)
    served.model.train()
    found, expected = (
        Engine(one, slots=2, context=64).generate([1, 2], max_tokens=3)[0]
        for one in (served, made())
    )
    assert found.tokens == expected.tokens


def test_equal_bits_are_not_promised_in_16_bits(served):
    graphdef, params = nnx.split(served.model)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    wrong = dataclasses.replace(served, model=nnx.merge(graphdef, half))
    with pytest.raises(ModelError, match="deterministic=True with parameters in bfloat16 on cpu"):
        Engine(wrong, context=64, deterministic=True)


@pytest.mark.mesh
def test_weights_and_cache_in_8_bits(served):
    exact = Engine(served, slots=4, context=64)
    small = Engine(served, slots=4, context=64, weights="int8", cache="int8", deterministic=True)
    asked = prompts(4, longest=20)
    for one, two in zip(*(e.generate(asked, max_tokens=8) for e in (exact, small)), strict=True):
        # A weight is wrong by at most 1/254 of the largest one of its output.
        same = [a.id == b.id for a, b in zip(one.tokens, two.tokens, strict=True)]
        differ = same.index(False) if False in same else len(same)
        for a, b in zip(one.tokens[:differ], two.tokens[:differ], strict=True):
            assert 0 < abs(a.logprob - b.logprob) < 0.05
    sizes = [sum(x.nbytes for x in jax.tree.leaves(e._state.pages)) for e in (exact, small)]
    assert sizes[1] == sizes[0] / 4 * (1 + 4 / 16)  # Heads have 16 dims, and a scale of 4 bytes.
    weights = [sum(x.nbytes for x in jax.tree.leaves(e._params)) for e in (exact, small)]
    assert weights[1] < weights[0] / 2
    # The same bits with other companions, and new parameters in their own dtype.
    (alone,) = small.generate([asked[0]], max_tokens=8)
    assert alone.tokens == small.generate(asked, max_tokens=8)[0].tokens
    small.update(nnx.state(served.model), version=3)
    (again,) = small.generate([asked[0]], max_tokens=8)
    assert [t.id for t in again.tokens] == alone.ids
    assert again.tokens[0].version == 3
    with pytest.raises(ModelError, match="cache='fp8' is not known"):
        Engine(served, cache="fp8")


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        ("cudn", "attention='cudn' is not known. Did you mean 'cudnn'"),
        ("cudnn", "needs NVIDIA GPUs, and the platform is cpu.\n  Use attention='auto'"),
    ],
)
def test_a_back_end_of_attention_that_cannot_run_is_refused(served, attention, said):
    with pytest.raises(ModelError, match=re.escape(said)):
        Engine(served, attention=attention)


@nnx.jit
def last_hidden(model, tokens):
    x, _, _ = model.hidden(tokens, jnp.arange(tokens.shape[1])[None], Context())
    return model.normed(x)[0, -1]


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("options", [{"chunk": 32, "pages": 5}, {}], ids=["few pages", "whole"])
def test_embeddings_are_what_the_head_reads(served, options):
    engine = Engine(served, slots=4, context=64, **options)
    prompts = [list(range(5, 5 + n)) for n in (1, 16, 40)]
    # The second time the cache has all but the last page.
    for _ in range(2):
        found = engine.embed([*prompts, prompts[-1]])
        for prompt, vector in zip(prompts, found, strict=False):
            expected = np.asarray(last_hidden(served.model, jnp.asarray([prompt])))
            length = np.linalg.norm(expected)
            np.testing.assert_allclose(vector, expected / length, atol=1e-6)
        np.testing.assert_array_equal(found[2], found[3])
    assert engine.stats().num_running == 0
    with pytest.raises(ModelError, match="no prompts to embed"):
        engine.embed([])


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    "options", [{"pages": 14, "slots": 24}, {"chunk": 32, "overlap": False}], ids=str
)
def test_log_probabilities_of_prompts(served, options):
    """They are those of the model, with the same bits in any company."""
    asked = prompts(6, longest=90)
    wanted = Sampling(max_tokens=30, logprobs=2, prompt_logprobs=True)
    plain = Sampling(max_tokens=30, logprobs=2)
    engine = Engine(served, **EXACT)
    alone = [engine.generate([prompt], wanted)[0] for prompt in asked]
    engine = Engine(served, **EXACT | options)
    engine.generate(asked, plain)
    mixed = [one for prompt in asked for one in ((prompt, plain), (prompt, wanted))]
    found = answers(engine, mixed)
    assert bits(found[1::2]) == bits(found[::2]) == bits(alone)
    assert [one.prompt_tokens for one in found[1::2]] == [one.prompt_tokens for one in alone]
    assert not any(one.prompt_tokens for one in found[::2])
    logits = nnx.jit(served.model)(jnp.asarray([asked[0]], jnp.int32))[0]
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    for position, token in enumerate(alone[0].prompt_tokens, 1):
        assert token.id == asked[0][position]
        assert token.logprob == pytest.approx(float(logprobs[position - 1, token.id]), abs=1e-5)
        assert token.top[0][0] == int(jnp.argmax(logprobs[position - 1]))
    assert len(alone[0].prompt_tokens) == len(asked[0]) - 1


def test_a_request_that_breaks_steps_ends_alone(engine, monkeypatch):
    asked = [[5, 6], [7, 66, 9], list(range(40)), [1], [66]]
    settings = {"max_tokens": 8, "temperature": 1.0}
    right = [engine.generate([one], **settings)[0].ids for one in asked]
    requests = [engine.submit(prompt, **settings) for prompt in asked]
    run = engine._programs.run

    def fails(params, state, arrays, kernels):
        if 66 in arrays.tokens:
            raise RuntimeError("of this prompt")
        return run(params, state, arrays, kernels)

    monkeypatch.setattr(engine._programs, "run", fails)
    failures = 0
    while engine.busy:
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 3
    for request, ids in zip(requests, right, strict=True):
        if 66 in request.sequence.prompt:
            with pytest.raises(ModelError, match="ended by an error: of this prompt"):
                request.answer()
        else:
            assert request.answer().ids == ids
    assert engine.stats().pages_used == 0
    assert not engine.scheduler.is_careful


@pytest.mark.mesh
def test_all_programs_are_compiled_before_a_request(served):
    engine = Engine(served, context=128)
    engine.warm_up()
    compiled = engine.stats().num_compiled
    fresh = Engine(served, context=128)
    asked = [[1], list(range(90)), *prompts(9)]
    assert bits(engine.generate(asked, max_tokens=3)) == bits(fresh.generate(asked, max_tokens=3))
    engine.generate(asked, max_tokens=3, logit_bias={1: 1.0})
    engine.generate([[1]], max_tokens=3)
    assert engine.stats().num_compiled == compiled == 6


def test_a_cache_beyond_the_free_memory_is_refused_before_it_is_made(served):
    free = free_bytes(jax.devices()[:1])
    assert free is not None
    page = 2 * 2 * 2 * 16 * 16 * 4  # Keys and values, layers, heads, positions, dims, bytes.
    pages = 2 * free // page
    with pytest.raises(
        DoesNotFitError, match=r"the cache needs .* GiB on a device for 3"
    ) as refused:
        Engine(served, slots=3, pages=pages)
    assert refused.value.needed_bytes == pytest.approx(page * pages, rel=1e-3)
    fix = re.search(r"\n  Give at most (\d+) pages", str(refused.value))
    assert int(fix[1]) == pytest.approx(pages / 2, rel=0.2)
    assert "cache='int8'" in str(refused.value)
    # The context does not set the size of the cache, if the pages are given.
    assert "context of" not in str(refused.value)


@pytest.mark.parametrize("free", [40_000, 300_000, 1_000_000])
def test_the_fixes_for_a_cache_that_does_not_fit_fit(free):
    def checked(**options):
        sizes = engine_sizes(
            **{"slots": 3, "context": 4000, "pages": None, "page_size": 16} | options,
            chunk=64, lane=16, max_length=None, deterministic=False,
        )  # fmt: skip
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        cache = jax.ShapeDtypeStruct((sizes.num_pages, 16, 4, 8), np.float32, sharding=place)
        check_room([cache], sizes, free)

    with pytest.raises(DoesNotFitError) as refused:
        checked()
    pages = re.search(r"at most (\d+) pages", str(refused.value))
    context = re.search(r"context of at most ([\d,]+) tokens", str(refused.value))
    # Fewer pages than one request may take would be refused.
    assert bool(pages) == (free == 1_000_000)
    if pages:
        checked(pages=int(pages[1]))
    checked(context=int(context[1].replace(",", "")))


_ENDS = """
from small_decoder import made
from shardlib.engine import Engine

engine = Engine(made(), context=64, chunk=32)
engine.warm_up()
request = engine.submit([1, 2, 3], max_tokens=8)
for _ in range(3):
    engine.step()
print("in flight:", len(engine._in_flight))
"""


@pytest.mark.process
def test_a_process_ends_while_a_step_runs():
    command = [sys.executable, "-c", _ENDS]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "in flight: 1\n"), done.stderr
