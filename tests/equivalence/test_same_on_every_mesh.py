"""Losses, gradients, parameters, optimizer and model state on every mesh are one device's."""

import itertools
import math

import pytest
from cases import CASES, WAYS

from shardlib.mesh import STANDARD_AXES

# A case of each axis, of those that are quickly compiled; `mesh` has the rest.
QUICK = {
    "transformer fsdp=8",
    "transformer tensor=8",
    "transformer context=8",
    "transformer expert=8",
    "transformer stage=2,data=2x2 2 microbatches no dropout, hops",
}
SLOW = {"moe stage=4,expert=2 4 microbatches 3 of 14 layers dense"}


def _marks(name):
    if name in QUICK:
        return ()
    return pytest.mark.soak if name in SLOW else pytest.mark.mesh


MARKED = [pytest.param(case, marks=_marks(str(case)), id=str(case)) for case in CASES]


def test_the_quick_cases_are_there():
    assert {str(case) for case in CASES} >= QUICK | SLOW


@pytest.mark.parametrize("case", MARKED)
def test_equal_to_one_device(compare, case):
    comparison = compare(case)
    assert not comparison.deviations, str(comparison)


def _meshes(*models):
    return {frozenset(case.axes.items()) for case in CASES if case.model in models}


def test_the_cases_cover_every_axis_and_every_pair():
    assert {math.prod(case.axes.values()) for case in CASES} == {8}
    assert len(_meshes("transformer")) >= 24
    split = {frozenset(axis for axis, _ in mesh) for mesh in _meshes("transformer", "moe")}
    # ResNet has neither stages nor tensor, context or expert parallelism of its own.
    assert split >= {frozenset([axis]) for axis in STANDARD_AXES}
    assert split >= {frozenset(pair) for pair in itertools.combinations(STANDARD_AXES, 2)}
    for model, mesh in (
        ("transformer", {"stage": 2, "fsdp": 2, "tensor": 2}),
        ("transformer", {"data": 2, "context": 2, "tensor": 2}),
        ("moe", {"expert": 4, "fsdp": 2}),
    ):
        assert frozenset(mesh.items()) in _meshes(model)
    for model in ("transformer", "moe", "resnet"):
        assert any("x" in case.mesh for case in CASES if case.model == model)
    assert any((case.model, case.mesh) == ("transformer", "data=2x4") for case in CASES)


def test_the_cases_cover_every_word():
    assert {word for case in CASES for word in case.words.split(", ") if word} == {*WAYS}
    assert len({*map(str, CASES)}) == len(CASES)
