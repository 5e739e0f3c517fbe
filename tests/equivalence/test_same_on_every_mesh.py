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


def test_every_mesh_has_eight_devices():
    assert {math.prod(case.axes.values()) for case in CASES} == {8}


def _meshes(model):
    return {frozenset(case.axes) for case in CASES if case.model == model}
