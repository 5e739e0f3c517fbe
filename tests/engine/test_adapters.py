"""Several adapters at once: each request answers as its merged model alone."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
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


@pytest.mark.mesh
def test_each_request_has_its_own_adapter(served, models):
    engine = Engine(served, slots=4, context=64, chunk=32, adapters=models, deterministic=True)
    merged = {None: served.model} | {name: merge(model) for name, model in models.items()}
    expected = {
        name: Engine(dataclasses.replace(served, model=model), slots=1, context=64, chunk=32)
        for name, model in merged.items()
    }
    expected = {name: one.generate(PROMPT, **ASKED)[0] for name, one in expected.items()}
    assert len({tuple(one.ids) for one in expected.values()}) == 3
    names = ["one", None, "two", "one", "two", None]
    # The second time the prompts are in the cache, each under its adapter.
    for _ in range(2):
        found = dict(zip(names, answers(engine, names), strict=True))
        for name, one in found.items():
            check_equal(one, expected[name])
    (alone,) = answers(engine, ["two"])
    assert alone.tokens == found["two"].tokens
    assert found["two"].cached_tokens == 16
    one, two = (engine.embed(PROMPT, adapter=name) for name in ("one", None))
    assert np.abs(one - two).max() > 1e-3


@pytest.mark.mesh
def test_adapters_of_a_mesh_and_of_weights_in_8_bits(served, models):
    names = ["one", "two", None]
    options = {"slots": 4, "context": 64, "chunk": 32, "weights": "int8", "cache": "int8"}
    small = answers(Engine(served, adapters=models, **options), names)
    mesh = sl.make_mesh("data=2,tensor=2", devices=jax.devices()[:4])
    with sl.use(mesh, sl.rules.SERVE) as scope:
        engine = Engine(made(scope), adapters=models, **options)
        for found, expected in zip(answers(engine, names), small, strict=True):
            check_equal(found, expected)
    count = engine.stats().num_compiled
    engine.update(nnx.state(served.model), version=2)
    check_equal(answers(engine, ["two"])[0], small[1])
    assert engine.stats().num_compiled == count


@pytest.mark.mesh
def test_adapters_that_no_row_can_choose(served, models):
    dora = adapted(served.model, 3, dora=True)
    wide = adapted(made(head_dim=32).model, 1)
    wild = adapted(served.model, 1)
    wild.layers.attention.key.lora_b[...] = jnp.inf
    given = {"a": dora, "b": served.model, "c": wide, "d": wild, "": models["one"]}
    with pytest.raises(ModelError) as raised:
        Engine(served, adapters=given)
    for text in (
        "'a' has DoRA at layers/attention/key",
        "'b' adapts nothing",
        "'c' is for layers/attention/key of (2, 64, 2, 32), and the model has (2, 64, 2, 16)",
        "'d' has numbers at layers/attention/key that are not finite",
        "'' has no name",
    ):
        assert text in str(raised.value)
    engine = Engine(served, slots=2, context=64, adapters=models)
    with pytest.raises(ModelError, match=r"no adapter is called 'tow'\. Did you mean 'two'"):
        engine.generate(PROMPT, adapter="tow")
    with pytest.raises(ModelError, match="adapter=3, which must be a name"):
        engine.generate(PROMPT, adapter=3)


@pytest.mark.mesh
def test_a_model_that_has_adapters_is_merged_first(served, models):
    """As a run that trained adapters is restored."""
    held = dataclasses.replace(served, model=models["one"])
    engine = Engine(
        held, slots=2, context=64, chunk=32, weights="int8", adapters={"two": models["two"]}
    )
    kernel = engine._params.layers.attention.key.kernel
    assert kernel["values"].get_value().dtype == jnp.int8
    assert answers(engine, ["two"])[0].ids != answers(engine, [None])[0].ids


@pytest.mark.mesh
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
