"""What equations of traced programs say, in each version of JAX."""

import jax
import jax.numpy as jnp

from shardlib.jaxprs import scan_parts


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
