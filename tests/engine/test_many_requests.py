"""Bits of many requests: those of each alone, however the engine batches them."""

import itertools

import jax
import numpy as np
import pytest
from small_decoder import VOCAB, made
from test_engine import EXACT, answers, prompts

from shardlib.engine import Engine, Sampling
from shardlib_models.moe import MoEConfig

COUNT = 1000


@pytest.fixture(scope="module")
def asked():
    """Prompts with equal beginnings, drawn in all ways; some read the scores of their prompt or
    are penalized, which other programs compute."""
    rng = np.random.default_rng(0)
    stems = rng.integers(0, VOCAB, (8, 48)).tolist()
    found = []
    for n in range(COUNT):
        stem = stems[rng.integers(8)][: rng.integers(49)]
        drawn = Sampling(
            max_tokens=int(rng.integers(1, 25)),
            temperature=0.7 * (n % 2),
            top_k=20 * (n % 7 == 0),
            top_p=0.9 if n % 5 == 0 else 1.0,
            min_p=0.05 * (n % 11 == 0),
            seed=n,
            logprobs=n % 3,
            presence_penalty=0.5 * (n % 200 < 5),
            prompt_logprobs=n % 50 == 25,
        )
        found.append(([*stem, *rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()], drawn))
    return found


@pytest.fixture(scope="module")
def alone(served, asked):
    with jax.default_matmul_precision("highest"):
        engine = Engine(served, **EXACT, prefix_cache=False)
        return [said(answers(engine, [one]))[0] for one in asked]


def said(found):
    """Returns the tokens and bits of answers, and of prompts whose scores are wanted."""
    return [(one.tokens, one.prompt_tokens) for one in found]


def arriving(engine, asked):
    """Returns the answers to requests that come at random times."""
    rng, left, requests = np.random.default_rng(0), iter(asked), []
    while len(requests) < len(asked) or engine.busy:
        coming = itertools.islice(left, int(rng.integers(0, 4)))
        requests += [engine.submit(*one) for one in coming]
        engine.step()
    return [request.answer() for request in requests]


FEW = {"page_size": 1, "pages": 240}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("company", "options"),
    [
        (answers, {}),
        (arriving, {}),
        (answers, {"prefix_cache": False}),
        (answers, {"chunk": 32}),
        (answers, FEW),
        (answers, {"overlap": False}),
        (answers, {"speculate": 7}),
        (arriving, FEW | {"speculate": 31, "chunk": 64}),
    ],
    ids=lambda one: str(one) if isinstance(one, dict) else one.__name__,
)
def test_bits_of_many_requests_are_those_of_each_alone(served, asked, alone, company, options):
    engine = Engine(served, **EXACT | options)
    found = said(company(engine, asked))
    assert [n for n in range(COUNT) if found[n] != alone[n]] == []
    stats = engine.stats()
    assert (stats.num_preemptions > 100) == ("pages" in options)
    assert (stats.right_tokens > 100) == ("speculate" in options)
    assert (stats.cached_tokens > 0) == options.get("prefix_cache", True)
    assert (stats.pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)


@pytest.mark.mesh
@pytest.mark.parametrize(
    "options", [{"qk_norm": True}, {"moe": MoEConfig(num_experts=32)}], ids=["keys", "experts"]
)
def test_sums_of_few_numbers_have_the_same_bits_in_programs_of_all_sizes(options):
    """Keys and scores of experts are 2048 numbers in 64 rows, and 10,240 in 320 rows."""
    served, asked = made(**options), prompts(12)
    together = Engine(served, **EXACT).generate(asked, max_tokens=16)
    engine = Engine(served, **EXACT, chunk=32)
    alone = [engine.generate([prompt], max_tokens=16)[0] for prompt in asked]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
