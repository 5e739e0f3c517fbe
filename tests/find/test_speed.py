"""The integer program of a deep model is as small as that of a shallow one, and quick to solve."""

import time

import optax
import pytest
from unannotated_lm import LM, loss, shapes

import shardlib as sl
from shardlib.find.problem import LayoutProblem

LIMITS = {"fsdp=8,tensor=8": 1.0, "data=2,fsdp=4,tensor=8": 5.0}
"""Seconds of processor time to build and solve it, by mesh."""


@pytest.mark.soak
def test_eighty_layers_take_as_long_as_two():
    def find(layers, mesh):
        return sl.find_rules(
            lambda rngs: LM(rngs, layers=layers, dim=8192, heads=64),
            loss=loss,
            batch=shapes(512, 2048),
            optimizer=optax.adamw(1e-3),
            on="8x8xh100",
            mesh=mesh,
            microbatches=8,
            memory_bytes=1e15,
        )

    classes = find(80, "data=2,fsdp=4,tensor=8").classes
    for mesh, limit in LIMITS.items():
        few = find(2, mesh)
        start = time.process_time()
        solution = LayoutProblem(classes, few.questions.problem.objective).solution(60.0)
        assert time.process_time() - start <= limit
        assert solution.num_variables == few.solution.num_variables
        assert solution.gap <= 1e-3
