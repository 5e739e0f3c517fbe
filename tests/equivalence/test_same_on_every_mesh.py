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
# Slow, or what other cases cover too: see the tests below.
SOAK = {
    "moe stage=4,expert=2 4 microbatches 3 of 14 layers dense",
    "transformer tensor=8 sequence",
    "transformer data=2,fsdp=4",
    "transformer data=4,tensor=2",
    "transformer data=4,context=2",
    "transformer context=4,tensor=2",
    "transformer stage=2,data=4 2 microbatches",
    "transformer stage=4,fsdp=2 4 microbatches",
    "transformer stage=4,context=2 4 microbatches",
    "transformer data=2,context=2,tensor=2",
    "transformer stage=2,data=2,tensor=2 2 microbatches gpipe",
    "transformer stage=2,data=2x2 2 microbatches no dropout, hops, 7 layers",
    "moe expert=4,fsdp=2",
    "moe data=2,expert=4",
    "moe expert=4,context=2 no dropout, capacity",
    "moe expert=4,tensor=2",
    "moe stage=2,expert=2,tensor=2 2 microbatches interleaved",
    "resnet fsdp=8",
}
USUAL = [case for case in CASES if str(case) not in SOAK]


def _marks(name):
    if name in QUICK:
        return ()
    return pytest.mark.soak if name in SOAK else pytest.mark.mesh


MARKED = [pytest.param(case, marks=_marks(str(case)), id=str(case)) for case in CASES]


def test_the_quick_cases_are_there():
    assert {str(case) for case in CASES} >= QUICK | SOAK


@pytest.mark.parametrize("case", MARKED)
def test_equal_to_one_device(compare, case):
    comparison = compare(case)
    assert not comparison.deviations, str(comparison)


def _meshes(*models):
    return {frozenset(case.axes.items()) for case in USUAL if case.model in models}


def test_the_cases_cover_every_axis_and_every_pair():
    assert {math.prod(case.axes.values()) for case in CASES} == {8}
    assert len(_meshes("transformer")) >= 20
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
        assert any("x" in case.mesh for case in USUAL if case.model == model)
    assert any((case.model, case.mesh) == ("transformer", "data=2x4") for case in USUAL)


def test_the_cases_cover_every_word():
    covered = {word for case in USUAL for word in case.words.split(", ") if word}
    assert covered == {*WAYS} - {"3 of 14 layers dense"}
    assert len({*map(str, CASES)}) == len(CASES)
