"""What equations of traced programs say, in each version of JAX."""

import jax
import jax.numpy as jnp
import pytest

from shardlib.jaxprs import reshaped_dims, scan_parts


def test_operands_of_a_scan():
    def sums(scale, bias, start, rows, more):
        def body(carry, row):
            total, count = carry
            return (total * scale + bias + row[0], count + 1), (total.sum(), row[1])

        return jax.lax.scan(body, (start, jnp.int32(0)), (rows, more))

    x, rows = jnp.ones(4), jnp.ones((5, 4))
    program = jax.make_jaxpr(sums)(x, x, x, rows, rows)
    (scan,) = (e for e in program.eqns if e.primitive.name == "scan")
    assert scan_parts(scan) == (2, 2)


@pytest.mark.parametrize(
    ("old", "new", "runs"),
    [
        ((2, 3, 4), (6, 4), [((0, 1), (0,)), ((2,), (1,))]),
        ((6, 4), (2, 3, 4), [((0,), (0, 1)), ((1,), (2,))]),
        ((4, 6), (3, 8), [((0, 1), (0, 1))]),
        ((4, 1), (4, 1, 1), [((0,), (0,)), ((1,), (1,))]),
        ((1, 4), (4,), [((0, 1), (0,))]),
        ((), (), []),
    ],
    ids=["joined", "split", "mixed", "ones at the end", "a one first", "scalars"],
)
def test_runs_of_dims_that_a_reshape_keeps_together(old, new, runs):
    found = [(tuple(before), tuple(after)) for before, after in reshaped_dims(old, new)]
    assert found == runs
