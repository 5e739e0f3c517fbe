"""Losses, gradients, parameters, optimizer and model state on every mesh are one device's."""

import itertools
import math

import pytest
from cases import CASES

from shardlib.mesh import STANDARD_AXES


@pytest.mark.parametrize("case", CASES, ids=str)
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
