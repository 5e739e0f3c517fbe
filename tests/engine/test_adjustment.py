"""Biases, penalties and grammars, against a loop of whole forward passes."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_decoder import made

from shardlib.data.tokenizer import BytesTokenizer
from shardlib.engine import Engine, Grammar, Sampling
from shardlib.engine.grammars import GrammarReader
from shardlib.errors import ModelError

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def speaking():
    """A decoder of bytes."""
    with jax.default_matmul_precision("highest"):
        served = made(vocab_size=257)
    return dataclasses.replace(served, tokenizer=BytesTokenizer(), end_tokens=(256,))


def greedy(served, prompt, sampling):
    """Returns the answer by whole forward passes, one a token."""
    forward, out = nnx.jit(lambda model, tokens: model(tokens)), []
    padded = np.zeros((1, 64), np.int32)
    for _ in range(sampling.max_tokens):
        known = [*prompt, *out]
        padded[0, : len(known)] = known
        logits = np.array(forward(served.model, jnp.asarray(padded))[0, len(known) - 1], np.float32)
        for token, value in sampling.logit_bias.items():
            logits[token] += value
        for token in set(out):
            logits[token] -= sampling.presence_penalty
            logits[token] -= sampling.frequency_penalty * out.count(token)
        out.append(int(logits.argmax()))
    return out


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {3: 1.5, 9: -100.0}},
        {"frequency_penalty": -0.1},
        {"presence_penalty": 2.0},
    ],
    ids=str,
)
def test_biases_and_penalties_are_those_of_a_plain_loop(served, options):
    sampling = Sampling(max_tokens=20, **options)
    prompt = [5, 9, 70, 1, 1]
    engine = Engine(served, context=128)
    others = [engine.submit([7, n], max_tokens=30) for n in range(3)]
    (answer,) = engine.generate([prompt], sampling)
    assert answer.ids == greedy(served, prompt, sampling)
    assert answer.ids != greedy(served, prompt, Sampling(max_tokens=20))
    assert all(len(request.tokens) >= 19 for request in others)


@pytest.mark.mesh
def test_bits_do_not_depend_on_adjusted_company(served):
    exact = {"context": 128, "deterministic": True}
    plain = Sampling(max_tokens=24, temperature=0.8, seed=4, logprobs=2)
    adjusted = dataclasses.replace(plain, frequency_penalty=0.7)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    samplings = [plain, adjusted]
    alone = [
        Engine(served, **exact).generate(prompt, one)[0]
        for prompt, one in zip(prompts, samplings, strict=True)
    ]
    for options in ({}, {"pages": 9, "slots": 2}, {"overlap": False}):
        engine = Engine(served, **(exact | options))
        found = engine.generate(prompts, samplings)
        assert [one.tokens for one in found] == [one.tokens for one in alone]


@pytest.mark.mesh
def test_answers_follow_their_grammars(speaking):
    grammars = [
        Grammar("json_schema", json.dumps(SCHEMA)),
        Grammar("regex", "[a-f]{3}-[0-9]{2,4}"),
        Grammar("lark", 'start: "yes" | "no"'),
        None,
    ]
    samplings = [
        Sampling(max_tokens=60, temperature=1.0, seed=n, grammar=grammar)
        for n, grammar in enumerate(grammars)
    ]
    found = Engine(speaking, context=128).generate(["Say: "] * 4, samplings)
    value = json.loads(found[0].text)
    assert isinstance(value["n"], int)
    assert isinstance(value["ok"], bool)
    assert re.fullmatch("[a-f]{3}-[0-9]{2,4}", found[1].text)
    assert found[2].text in ("yes", "no")
    assert [one.finish_reason for one in found[:3]] == ["stop"] * 3


@pytest.mark.parametrize("is_sequence", [False, True])
def test_grammars_over_the_tokens_of_sentencepiece(is_sequence):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    space = "\N{LOWER ONE EIGHTH BLOCK}"
    words = ["<unk>", "</s>", f"{space}a", "b", "a", f"{space}b", space]
    scores = [(word, -float(number)) for number, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(scores, 0))
    tokenizer.pre_tokenizer, spaces = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.decoder = decoders.Sequence([spaces, decoders.Fuse()]) if is_sequence else spaces
    matcher = GrammarReader(tokenizer, [1], len(words)).read(Grammar("regex", "ab b"))
    answer = [4, 3, 5, 1]
    for known, token in enumerate(answer):
        assert np.flatnonzero(matcher.allowed(answer[:known])).tolist() == [token]
    assert tokenizer.decode(answer[:3]) == "ab b"


def test_a_tokenizer_that_llguidance_cannot_read_is_named():
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.BPEDecoder()
    with pytest.raises(ModelError, match=r"cannot read the tokenizer.json.*\n  Leave the grammar"):
        GrammarReader(tokenizer, [0], 1).read(Grammar("regex", "a"))


@pytest.mark.mesh
def test_a_grammar_goes_on_after_preemption(speaking):
    sampling = Sampling(max_tokens=80, temperature=1.0, grammar=Grammar("regex", "[a-z]{70}"))
    engine = Engine(speaking, context=96, slots=3, pages=12, prefix_cache=False)
    found = engine.generate(["abc", "abd", "abe"], [sampling] * 3)
    assert engine.stats().num_preemptions > 0
    assert all(re.fullmatch("[a-z]{70}", one.text) for one in found)


def test_malformed_grammars_and_unknown_tokens_are_refused(served, speaking):
    engine = Engine(speaking, context=128)
    for kind, text in (("regex", "(["), ("json_schema", "{x"), ("lark", "start: nothing")):
        with pytest.raises(ModelError, match=rf"the grammar \({kind}\) is malformed.*\n  Correct"):
            engine.submit("a", grammar=Grammar(kind, text))
    with pytest.raises(ModelError, match=r"logit_bias has the tokens 999.*\n  Give ids"):
        engine.submit("a", logit_bias={999: 1.0})
    with pytest.raises(ModelError, match=r"presence_penalty=3.*logit_bias=\{1: 200\}"):
        Sampling(presence_penalty=3, logit_bias={1: 200})
    with pytest.raises(ModelError, match=r"needs a tokenizer\.json.*\n  Serve a model"):
        Engine(served, context=128).submit([1], grammar=Grammar("regex", "a"))
    assert engine.stats().num_waiting == 0


@pytest.mark.mesh
def test_a_grammar_that_fails_ends_its_own_request(speaking):
    engine = Engine(speaking, context=128)
    other = engine.submit("abc", max_tokens=8)
    failing = engine.submit("abc", max_tokens=8, grammar=Grammar("regex", "[a-z]+"))
    engine.step()
    failing.sequence.out.append(ord("7"))  # Not what the grammar allows.
    while engine.step():
        pass
    assert len(other.answer().tokens) == 8
    with pytest.raises(ModelError, match=r"the grammar cannot go on.*\n  Give a simpler"):
        failing.answer()
    assert engine.stats().pages_used == 0
