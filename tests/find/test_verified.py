"""Found rules are compiled and proven before they are given, and what fails is not found again."""

import dataclasses
import functools

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from unannotated_lm import LM, Recomputed, batch, loss, shapes

import shardlib as sl
from shardlib.errors import (
    ConfigError,
    DoesNotFitError,
    MissingExtraError,
    ModelError,
    PartitionError,
)
from shardlib.explain.aot.compile import compile_step
from shardlib.testing import verified
from shardlib.testing.verified import Check, VerifiedRules

OPTIONS = {
    "loss": loss,
    "batch": shapes(16, 512),
    "optimizer": optax.adamw(1e-3),
    "on": "v5e-8",
    "mesh": "fsdp=4,tensor=2",
    "small": sl.testing.Small(lambda rngs: LM(rngs, layers=1), batch(16)),
}


def large(rngs):
    return LM(rngs, layers=1, dim=1024, heads=8)


@pytest.mark.aot
def test_predictions_and_the_compiled_step_are_told_side_by_side():
    checked = sl.testing.verified_rules(large, **OPTIONS)
    told, true = sum(checked.found.traffic.values()), sum(checked.check.traffic.values())
    assert 0.7 < told / true < 1.4
    assert "equal to one device" in checked.check.numbers
    text = str(checked)
    for part in ("rules found for", "peak memory", "all-gather fsdp", "sent in all"):
        assert part in text


@pytest.mark.mesh
def test_what_fails_is_forbidden():
    """The next answer costs more. It lays out otherwise at least a quarter of the classes that may
    be laid out in several ways: two of six where all axes cut the batch."""
    options = {key: value for key, value in OPTIONS.items() if key != "small"}
    first = sl.find_rules(large, **options)
    second = sl.find_rules(large, **options, forbidden=[first])
    third = sl.find_rules(large, **options, forbidden=[first, second])
    assert first.prices[0].rank < second.prices[0].rank
    for one, other in ((first, second), (first, third), (second, third)):
        layouts = one.solution.layouts.values(), other.solution.layouts.values()
        assert sum(a != b for a, b in zip(*layouts, strict=True)) >= 2


@pytest.mark.mesh
def test_a_device_may_have_less_memory():
    options = {key: value for key, value in OPTIONS.items() if key != "small"}
    free = sl.find_rules(large, **options)
    with pytest.raises(DoesNotFitError):
        sl.find_rules(large, **options, memory_bytes=free.solution.memory_bytes / 10)


def makes(layers=1, **sizes):
    return {
        name: functools.partial(cls, layers=layers, **sizes)
        for name, cls in (("none", LM), ("full", Recomputed))
    }


@pytest.mark.aot
def test_the_program_that_recomputes_is_proven_where_it_is_chosen(monkeypatch):
    """Embeddings are not trained, in no program."""
    made, trained = [], []

    def compiled(step, arguments, **options):
        trained.extend(arguments[0].params)
        return compile_step(step, arguments, **options)

    monkeypatch.setattr(verified, "compile_step", compiled)

    class Small(Recomputed):
        def __init__(self, rngs):
            made.append("full")
            super().__init__(rngs, layers=1)

    small = sl.testing.Small({"none": LM, "full": Small}, batch(16))
    wrt = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("tokens")))
    options = OPTIONS | {"batch": shapes(512, 1024), "small": small, "microbatches": 1, "wrt": wrt}
    checked = sl.testing.verified_rules(makes(layers=4, dim=1024, heads=8), **options)
    assert checked.found.remat == "full"
    assert made
    assert set(trained) == {"blocks", "norm", "head"}
    assert "equal to one device" in checked.check.numbers


def test_small_models_are_given_for_each_rematerialisation():
    for small in (LM, {"none": LM}, {"none": LM, "full": LM, "dots": LM}):
        options = OPTIONS | {"small": sl.testing.Small(small, batch(16))}
        with pytest.raises(ConfigError, match=r"small.*\n.*none, full"):
            sl.testing.verified_rules(makes(), **options)


@pytest.mark.mesh
def test_small_models_are_trained_on_one_device_before_a_search(monkeypatch):
    monkeypatch.setattr(verified, "find_rules", lambda *_, **__: pytest.fail("it searched"))

    def endless(model, batch):
        return loss(model, batch) * jnp.inf

    small = sl.testing.Small(makes(), batch(16))
    with pytest.raises(ModelError, match=r"the loss of step 1 is inf on one device"):
        sl.testing.verified_rules(makes(), **OPTIONS | {"loss": endless, "small": small})


@pytest.mark.mesh
def test_small_batches_that_a_mesh_cannot_cut_are_named(found, monkeypatch):
    monkeypatch.setattr(verified, "find_rules", lambda *_, **__: found)
    # The compiler of the cluster may not be installed.
    proven = lambda self, found: self._proven(Check(found, 0, {}, None))  # noqa: E731
    monkeypatch.setattr(verified._Verifier, "check", proven)
    small = sl.testing.Small(lambda rngs: LM(rngs, layers=1), batch(6))
    with pytest.raises(ModelError, match=r"small cannot be trained .* data=8.*: .*\(6, 32\)"):
        sl.testing.verified_rules(large, **OPTIONS | {"mesh": "data=8", "small": small})


@pytest.fixture(scope="module")
def found():
    options = {key: OPTIONS[key] for key in OPTIONS if key != "small"}
    return sl.find_rules(lambda rngs: LM(rngs, layers=1), **options | {"mesh": "data=8"})


def test_refused_answers_are_told_apart(found, monkeypatch):
    answers = [dataclasses.replace(found, remat=remat) for remat in ("none", "full")]
    checks = [Check(one, 0, {}, None, refused="no") for one in answers]
    rows = str(VerifiedRules(Check(found, 0, {}, None), tuple(checks)))
    assert "data=8, remat none" in rows
    assert "data=8, remat full" in rows
    left = list(checks)
    monkeypatch.setattr(verified, "find_rules", lambda *_, **__: found)
    monkeypatch.setattr(verified._Verifier, "check", lambda *_: left.pop(0))
    with pytest.raises(PartitionError, match=r"remat none: no\n.*remat full: no\n"):
        sl.testing.verified_rules(makes(), **OPTIONS | {"small": None, "tries": 2})


@pytest.mark.parametrize(
    "error",
    [
        DoesNotFitError("no layout fits", 1),
        PartitionError("no layout was found in time"),
        ModelError("small cannot be trained"),
    ],
)
def test_a_verified_answer_is_kept_where_fsdp_has_none(error, found, monkeypatch):
    def find(*_, mesh=None, **__):
        if mesh is not None:
            raise error
        return found

    monkeypatch.setattr(verified, "find_rules", find)
    monkeypatch.setattr(verified._Verifier, "check", lambda _, found: Check(found, 1, {}, 1.0))
    options = {key: OPTIONS[key] for key in OPTIONS if key not in ("small", "mesh")}
    verified_rules = sl.testing.verified_rules(large, **options)
    assert verified_rules.found is found
    assert f"not compared with fsdp alone: {error}" in str(verified_rules)
    verified_rules = sl.testing.verified_rules(large, **options | {"batch": shapes(12, 512)})
    assert "not compared with fsdp alone: 8 parts do not divide 12 rows" in str(verified_rules)


def test_less_memory_and_forbidden_answers_reach_every_search(found, monkeypatch):
    searches = []

    def find(*_, **options):
        searches.append((options["memory_bytes"], options["forbidden"]))
        return found

    def check(_, found):
        return Check(found, len(searches) % 2 * 4_000, {}, None, refused="no")

    monkeypatch.setattr(verified, "find_rules", find)
    monkeypatch.setattr(verified._Verifier, "check", check)
    asked = OPTIONS | {"small": None, "memory_bytes": 2_000, "forbidden": [found], "tries": 3}
    with pytest.raises(PartitionError, match="no rules could be verified"):
        sl.testing.verified_rules(large, **asked)
    less = verified._MARGIN * 1_000
    assert searches == [(2_000, [found]), (less, [found]), (less, [found, found])]


def test_a_step_too_large_to_compile_is_solved_again_with_less_memory(found, monkeypatch):
    searches = []

    def find(*_, **options):
        searches.append(options["memory_bytes"])
        return found

    def compiled(*_):
        raise DoesNotFitError("it does not fit", 4_000)

    monkeypatch.setattr(verified, "find_rules", find)
    monkeypatch.setattr(verified._Verifier, "_compiled", compiled)
    asked = OPTIONS | {"small": None, "memory_bytes": 2_000, "tries": 2}
    with pytest.raises(PartitionError, match="it does not fit"):
        sl.testing.verified_rules(large, **asked)
    assert searches == [2_000, verified._MARGIN * 1_000]


def test_a_compiler_that_is_not_installed_is_no_fault_of_the_rules(found, monkeypatch):
    def compiled(*_):
        raise MissingExtraError("install shardlib[tpu]")

    monkeypatch.setattr(verified, "find_rules", lambda *_, **__: found)
    monkeypatch.setattr(verified._Verifier, "_compiled", compiled)
    with pytest.raises(MissingExtraError, match="shardlib"):
        sl.testing.verified_rules(large, **OPTIONS | {"small": None})
