"""Found rules are compiled and proven before they are given, and what fails is not found again."""

import optax
import pytest
from unannotated_lm import LM, batch, loss, shapes

import shardlib as sl
from shardlib.errors import DoesNotFitError

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
    verified = sl.testing.verified_rules(large, **OPTIONS)
    told, true = sum(verified.found.traffic.values()), sum(verified.check.traffic.values())
    assert 0.7 < told / true < 1.4
    assert "equal to one device" in verified.check.numbers
    text = str(verified)
    for part in ("rules found for", "peak memory", "all-gather fsdp", "sent in all"):
        assert part in text


@pytest.mark.mesh
def test_what_fails_is_forbidden():
    """The next answer lays out at least a quarter of the classes otherwise. One of the same kind
    costs more."""
    options = {key: value for key, value in OPTIONS.items() if key != "small"}
    first = sl.find_rules(large, **options)
    second = sl.find_rules(large, **options, forbidden=[first])
    third = sl.find_rules(large, **options, forbidden=[first, second])
    assert first.prices[0].name == second.prices[0].name
    assert first.seconds < second.seconds
    for one, other in ((first, second), (first, third), (second, third)):
        layouts = one.solution.layouts.values(), other.solution.layouts.values()
        assert sum(a != b for a, b in zip(*layouts, strict=True)) > 2


@pytest.mark.mesh
def test_a_device_may_have_less_memory():
    options = {key: value for key, value in OPTIONS.items() if key != "small"}
    free = sl.find_rules(large, **options)
    with pytest.raises(DoesNotFitError):
        sl.find_rules(large, **options, memory_bytes=free.solution.memory_bytes / 10)
