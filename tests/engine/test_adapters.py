"""Several adapters at once: each request answers as its merged model alone."""

import dataclasses
import gc
import weakref

import jax
import numpy as np
import pytest
from flax import nnx
from small_decoder import made

import shardlib as sl
from shardlib.engine import Engine, Sampling
from shardlib.errors import ModelError
from shardlib.finetune import lora, merge
from shardlib.finetune.lora import adapters

PROMPT = list(range(3, 30))
ASKED = {"max_tokens": 8, "logprobs": 0}


def adapted(model, seed, **options):
    """Returns a model with adapters whose factors are not 0."""
    model = lora(model, rngs=nnx.Rngs(seed), **options)
    for number, one in enumerate(adapters(model).values()):
        key = jax.random.fold_in(jax.random.key(seed), number)
        one.lora_b[...] = 0.3 * jax.random.normal(key, one.lora_b.shape)
    return model


@pytest.fixture(scope="module")
def models(served):
    attention = adapted(served.model, 1, rank=4)
    mlp = adapted(served.model, 2, rank=2, alpha=3.0, targets=("**/mlp/*", "**/attention/query"))
    return {"one": attention, "two": mlp}


def answers(engine, names, **options):
    samplings = [Sampling(adapter=name, **ASKED, **options) for name in names]
    return engine.generate([PROMPT] * len(names), samplings)


def check_equal(found, expected):
    assert found.ids == expected.ids
    scores = [[t.logprob for t in one.tokens] for one in (found, expected)]
    np.testing.assert_allclose(*scores, atol=2e-5)


def test_each_request_has_its_own_adapter(served, models):
    engine = Engine(served, slots=4, context=64, chunk=32, adapters=models, deterministic=True)
    names = ["one", None, "two", "one", "two", None]
    # The second time the prompts are in the cache, each under its adapter.
    for _ in range(2):
        found = dict(zip(names, answers(engine, names), strict=True))
        for name, one in found.items():
            model = served.model if name is None else merge(models[name])
            alone = Engine(dataclasses.replace(served, model=model), slots=4, context=64)
            check_equal(one, alone.generate(PROMPT, **ASKED)[0])
    assert len({tuple(one.ids) for one in found.values()}) == 3
    (alone,) = answers(engine, ["two"])
    assert alone.tokens == found["two"].tokens
    assert found["two"].cached_tokens == 16


def test_adapters_of_a_mesh_and_of_weights_in_8_bits(served, models):
    names = ["one", "two", None]
    small = answers(Engine(served, slots=4, context=64, adapters=models, weights="int8"), names)
    mesh = sl.make_mesh("data=2,tensor=2", devices=jax.devices()[:4])
    with sl.use(mesh, sl.rules.SERVE) as scope:
        engine = Engine(made(scope), slots=4, context=64, adapters=models, weights="int8")
        for found, expected in zip(answers(engine, names), small, strict=True):
            check_equal(found, expected)
    engine.update(nnx.state(served.model), version=2)
    check_equal(answers(engine, ["two"])[0], small[1])


def test_adapters_that_no_row_can_choose(served, models):
    dora = adapted(served.model, 3, dora=True)
    with pytest.raises(ModelError, match=r"'a' has DoRA at layers/attention(.|\n)*'b' adapts no"):
        Engine(served, adapters={"a": dora, "b": served.model})
    engine = Engine(served, slots=2, context=64, adapters=models)
    with pytest.raises(ModelError, match=r"no adapter is called 'tow'\. Did you mean 'two'"):
        engine.generate(PROMPT, adapter="tow")
    with pytest.raises(ModelError, match="none: the engine has no adapters"):
        Engine(served, slots=2, context=64).submit(PROMPT, adapter="one")


def test_parameters_that_are_not_served_are_freed():
    base = made()
    kernel = weakref.ref(base.model.layers.mlp.up.kernel.get_value())
    assert kernel() is not None
    engine = Engine(
        base, slots=2, context=64, weights="int8", adapters={"a": adapted(base.model, 1)}
    )
    del base
    gc.collect()
    assert kernel() is None
    engine.generate(PROMPT, max_tokens=2, adapter="a")
