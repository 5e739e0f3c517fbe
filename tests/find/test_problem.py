"""The integer program finds what trying every choice finds."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.cost.layout import Layout
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.fabric import links
from shardlib.cost.machine.rates import rates_on
from shardlib.errors import DoesNotFitError
from shardlib.find.axes import TracedAxes
from shardlib.find.equivalence import Classes
from shardlib.find.moves import Network
from shardlib.find.problem import LayoutProblem, Objective
from shardlib.hardware import parse_cluster
from shardlib.partitioner.factors import dims_of

CLUSTER = parse_cluster("8xh100")


def problem_of(sizes, mesh, capacity=math.inf):
    """A chain of products with a nonlinearity between them, on a mesh."""

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x.sum()

    dims = list(itertools.pairwise(sizes[1:]))
    weights = [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in dims]
    x = jax.ShapeDtypeStruct(tuple(sizes[:2]), jnp.float32)
    closed = jax.make_jaxpr(loss)(weights, x)
    paths = [*(f"{'abc'[n]}/kernel" for n in range(len(dims))), "batch/x"]
    traced = TracedAxes(closed, ["param"] * len(dims) + ["input"])
    classes = Classes(traced, paths)
    return LayoutProblem(classes, objective_on(mesh, capacity))


def objective_on(mesh, capacity=math.inf):
    """The objective of a step on a mesh."""
    layout = Layout.of(mesh)
    found = links(CLUSTER, layout, committed())
    network = Network({axis: found[axis] for axis in reversed(mesh)})
    rates = rates_on(CLUSTER, "bf16", committed())
    return Objective(
        network, rates, 16.0, 1.0, capacity, frozenset(mesh), frozenset(("fsdp",)), {}, {}
    )


def tried(problem, capacity=math.inf):
    """The least cost of all choices that fit; infinite if none does."""
    held, options = dict(problem.memory), problem.layout_variables
    tables = [table_of(problem, operation) for operation in problem.classes.operations]
    least = math.inf
    for chosen in itertools.product(*options.values()):
        at = dict(zip(options, chosen, strict=True))
        columns = [options[number][dims] for number, dims in at.items()]
        if sum(held.get(column, 0.0) for column in columns) > capacity:
            continue
        cost = sum(problem.costs[column] for column in columns)
        for edges, table in tables:
            cost += table.get(tuple(at[number] for number in edges), math.inf)
        least = min(least, cost + rules_of(problem, at) * problem.rule_seconds)
    return least


def table_of(problem, operation, follows=lambda names, shape, dims: True):
    """The least cost of an operation by the layouts of its tensors, where names allow its reads."""
    edges = operation.edges
    numbers = tuple(dict.fromkeys(edge.tensor for edge in edges))
    table = {}
    for layouts in itertools.product(*(problem.layout_variables[n] for n in numbers)):
        at = dict(zip(numbers, layouts, strict=True))
        costs = [
            cost_of(problem, operation, edges, at, cut)
            for cut in problem.cuts(operation)
            if all(
                follows(e.read_as, problem.classes.tensors[e.tensor].shape, dims_of(e.dims, cut))
                for e in operation.operands
            )
        ]
        table[layouts] = min(costs, default=math.inf)
    return numbers, table


def cost_of(problem, operation, edges, at, cut):
    cost = problem.work_seconds(operation, cut)
    for position, edge in enumerate(edges):
        is_result = position >= len(operation.operands)
        dims, pieces = at[edge.tensor], dims_of(edge.dims, cut)
        piece = pieces, problem.pending(operation, cut, edge, is_result=is_result)
        if not problem.edge_moves.allows(edge, dims, piece):
            return math.inf
        seconds = problem.edge_moves.seconds(edge, is_result, dims, piece)
        cost += seconds * operation.times * edge.share
    return cost


def rules_of(problem, at):
    """The number of rules that a table of these layouts has."""
    tensors = problem.classes.tensors
    return len(
        {
            (tensors[number].kind, axis, name)
            for number, dims in at.items()
            for axis, names in zip(tensors[number].axes, dims, strict=True)
            for name in names
        }
    )


DRAWS = np.random.default_rng(0)
PROBLEMS = [
    (
        [int(2 ** DRAWS.integers(3, 13)) for _ in range(3 if number % 2 else 4)],
        {"fsdp": 2, "tensor": 2} if number % 2 else {"tensor": 4},
    )
    for number in range(50)
]


MOST_GAP, SLACK = 1e-3, 1e-6
"""The relative gap at which the search stops, and HiGHS's tolerance of sums."""
MEMORY_SHARES = 1.0, 0.75, 0.4
"""Memory of a device, as shares of what the quickest layouts hold: all of it, and two limits."""


@pytest.mark.parametrize(
    "slice_",
    [slice(0, 5), pytest.param(slice(5, 50), marks=pytest.mark.soak)],
    ids=["5", "45 more"],
)
def test_it_is_the_least_of_all_choices(slice_):
    """Of all combinations of layouts that fit, no other is quicker by more than the gap."""
    bound = 0
    for sizes, mesh in PROBLEMS[slice_]:
        free = problem_of(sizes, mesh).solution(10.0)
        for share in MEMORY_SHARES:
            capacity = math.inf if share == 1 else share * free.memory_bytes
            problem = problem_of(sizes, mesh, capacity)
            least = tried(problem, capacity)
            if math.isinf(least):
                with pytest.raises(DoesNotFitError, match="a device needs at least"):
                    problem.solution(10.0)
                continue
            found = problem.solution(10.0)
            case = f"{sizes} on {mesh} in {capacity} bytes"
            np.testing.assert_allclose(found.seconds, least, rtol=MOST_GAP, err_msg=case)
            assert found.gap <= MOST_GAP, case
            assert found.bound_seconds <= least * (1 + SLACK), case
            assert found.memory_bytes <= capacity * (1 + SLACK), case
            bound += found.seconds > free.seconds * (1 + MOST_GAP)
    assert bound  # A limit that excludes the quickest layouts is among the problems.
