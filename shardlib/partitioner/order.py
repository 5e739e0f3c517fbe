"""One order of collectives and loops on all CPU devices.

XLA's CPU runtime starts a loop as soon as its operands are ready, concurrently with collectives
outside of it. JAX gives all collectives of manual regions one channel. Two of them that run at
once, started in a different order on each device, take each other's data or deadlock: wrong numbers
were measured (jax 0.10.2). Here a loop waits for the collectives before it, and collectives after
it wait for the loop. GPUs and TPUs run collectives in program order.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


class CollectiveOrder:
    """Orders operations in trace order by data dependencies."""

    def __init__(self) -> None:
        self._loop: Any = None
        self._sent: list[Any] = []

    def send(self, x: Any, collective: Any) -> Any:
        """Returns `collective(x)`, after the last loop."""
        (result,) = self.send_all([x], lambda operands: [collective(operands[0])])
        return result

    def send_all(self, operands: Sequence[Any], collective: Any) -> Sequence[Any]:
        """Returns `collective(operands)`, one or more results, after the last loop."""
        first, *rest = operands
        results = collective([first if self._loop is None else _after(first, [self._loop]), *rest])
        self._sent.extend(results)
        return results

    def loop(self, operands: Sequence[Any], run: Any) -> Sequence[Any]:
        """Returns `run(operands)`, which loops, after the collectives before it."""
        done = [*self._sent, *([] if self._loop is None else [self._loop])]
        operands = list(operands)
        at = next((i for i, x in enumerate(operands) if _is_plain(x)), None)
        if done and at is not None:
            operands[at] = _after(operands[at], done)
        results = run(operands)
        self._sent, self._loop = [], next(filter(_is_plain, results), self._loop)
        return results


def _is_plain(x: Any) -> bool:
    return x.size > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _after(x: Any, done: Sequence[Any]) -> Any:
    """Returns `x` once `done` is computed: a select that the compiler cannot fold."""
    never = jnp.zeros((), bool)
    for other in filter(_is_plain, done):
        first = lax.slice(other, (0,) * other.ndim, (1,) * other.ndim).reshape(())
        number = jnp.real(first).astype(jnp.float32)
        never |= (number != number) & (number == number)
    return jnp.where(never, jnp.zeros(x.shape, x.dtype), x)
