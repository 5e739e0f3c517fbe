"""One rule for each name of a model: the integer program finds what trying every table finds."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_problem import objective_on, table_of

import shardlib as sl
from shardlib.cost.traced.primitives import PARAMS_TABLE
from shardlib.find.axes import TracedAxes, params_table
from shardlib.find.equivalence import Classes
from shardlib.find.problem import LayoutProblem
from shardlib.partitioner.layout import from_spec
from shardlib.plan.workloads.tracing import naming

RULES = sl.AxisRules({"wide": None, "deep": None}, {"rows": None, "wide": None, "deep": None})
MESH = {"tensor": 4}


def problem_of(rows, wide, deep):
    """Two products, of which the model places weights, their reads and the value in between. Its
    square weight has one name twice, and its result the name of another dim."""

    def loss(weights, x):
        first, square = weights
        x = sl.constrain(jnp.tanh(x @ sl.constrain(first, "wide", "deep")), "rows", "deep")
        return sl.constrain(x @ square, "rows", "wide").sum()

    shapes = (wide, deep), (deep, deep)
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    x = jax.ShapeDtypeStruct((rows, wide), jnp.float32)
    with naming(RULES, ()):
        closed = jax.make_jaxpr(loss)(weights, x)
    names = [params_table(("wide", "deep")), params_table(("deep", "deep"))]
    traced = TracedAxes(closed, ["param", "param", "input"], names)
    classes = Classes(traced, ["a/kernel", "b/kernel", "<batch>/x"])
    return LayoutProblem(classes, objective_on(MESH))


def resolved(problem, chosen, names, shape):
    """The layout that the resolver of rules makes of a tensor."""
    tables = {"params": {}, "activations": {}}
    for name in problem.named.names:
        kind = "params" if name.startswith(PARAMS_TABLE) else "activations"
        tables[kind][name.removeprefix(PARAMS_TABLE)] = [chosen[name], None]
    kind = "params" if any((n or "").startswith(PARAMS_TABLE) for n in names) else "activations"
    plain = [name and name.removeprefix(PARAMS_TABLE) for name in names]
    found = sl.AxisRules(**tables).resolve(plain, shape, MESH, kind)
    assert not found.faults
    return from_spec(found.spec, len(shape)).dims


def tried(problem):
    """The least cost of all tables of rules, and of all layouts of what has no names."""
    tensors, options = problem.classes.tensors, problem.layout_variables
    names = problem.named.names
    least = math.inf
    for cuts in itertools.product(*(problem.named.columns[name] for name in names)):
        chosen = dict(zip(names, cuts, strict=True))

        def follows(names, shape, dims, chosen=chosen):
            return not names or resolved(problem, chosen, names, shape) == dims

        possible = [
            [dims for dims in layouts if follows(tensors[n].names, tensors[n].shape, dims)]
            for n, layouts in options.items()
        ]
        if not all(possible):
            continue
        tables = [table_of(problem, operation, follows) for operation in problem.classes.operations]
        for layouts in itertools.product(*possible):
            at = dict(zip(options, layouts, strict=True))
            cost = sum(problem.costs[options[number][dims]] for number, dims in at.items())
            cost += sum(table[tuple(at[number] for number in edges)] for edges, table in tables)
            least = min(least, cost + problem.rule_seconds * sum(map(len, cuts)))
    return least


@pytest.mark.parametrize(
    "sizes",
    [
        (4096, 256, 64),
        pytest.param((64, 512, 512), marks=pytest.mark.soak),
        pytest.param((512, 3, 4096), marks=pytest.mark.soak),
        pytest.param((8, 4096, 1024), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_it_is_the_least_of_all_tables(sizes):
    problem = problem_of(*sizes)
    found = problem.solution(10.0)
    np.testing.assert_allclose(found.seconds, tried(problem), rtol=1.1e-3)
    for number, dims in found.layouts.items():
        tensor = problem.classes.tensors[number]
        if tensor.names:
            assert resolved(problem, found.rules, tensor.names, tensor.shape) == dims
