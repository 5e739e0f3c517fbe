"""Checks that a comparison is meaningful, before any number is compared."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.source_info_util import summarize

from shardlib.errors import ModelError
from shardlib.jaxprs import subprograms
from shardlib.mesh import describe
from shardlib.testing.deviations import SAFETY, Quantity, blurred
from shardlib.testing.rounding import unit_roundoff
from shardlib.testing.training import Program


def refuse_other_forms(reference: Program, program: Program) -> None:
    """Rejects a model that has different variables on a mesh than on one device.

    Raises:
        ModelError: If a leaf has another shape or dtype, or is on one side alone; lists all.
    """
    one, here = reference.forms, program.forms
    faults = [
        f"the {name} is {here.get(name, 'absent')}, on one device {one.get(name, 'absent')}."
        for name in dict.fromkeys((*one, *here))
        if one.get(name) != here.get(name)
    ]
    if faults:
        raise ModelError(
            f"mesh {describe(program.mesh)} has a different model than one device:\n  "
            + "\n  ".join(faults)
            + "\n  Make the same variables on every mesh."
        )


def refuse_narrower(reference: Program, program: Program) -> None:
    """Rejects a program that computes in a dtype narrower than any on one device.

    Raises:
        ModelError: If there is a narrower dtype; names the first rounded value and its source.
    """
    widest = max((unit_roundoff(r.dtype) for r in roundings(reference.jaxpr)), default=0.0)
    narrower = (r for r in roundings(program.jaxpr) if unit_roundoff(r.dtype) > widest)
    first = next(narrower, None)
    if first is None:
        return
    what = "a result" if first.argument is None else f"the {program.arguments[first.argument]}"
    raise ModelError(
        f"mesh {describe(program.mesh)} cannot be compared: its step rounds {what} to "
        f"{first.dtype} (at {first.source}), but the step on one device does not.\n"
        f"  Leave out what asks for {first.dtype} there (precision, reduction, or the model's own "
        "code), or compute in it on one device too."
    )


class Rounding(NamedTuple):
    """An equation whose result is narrower than float32."""

    dtype: Any
    argument: int | None
    """The program argument that it is computed from, if it is the only one."""
    source: str


def roundings(jaxpr: Any) -> Iterator[Rounding]:
    """Yields the roundings of a program to less than float32, in program order."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield from _roundings(jaxpr, dict(zip(jaxpr.invars, range(len(jaxpr.invars)), strict=True)))


def _roundings(jaxpr: Any, made_of: dict[Any, int | None]) -> Iterator[Rounding]:
    for equation in jaxpr.eqns:
        variables = [v for v in equation.invars if not hasattr(v, "val")]
        origin = made_of.get(variables[0]) if len(variables) == 1 else None
        inner = list(subprograms(equation))
        for program in inner:
            outer = _given(equation, program)
            given = zip(program.invars[-len(outer) :] if outer else [], outer, strict=True)
            known = {v: made_of.get(o) for v, o in given if not hasattr(o, "val")}
            yield from _roundings(program, known)
        for variable in equation.outvars:
            made_of[variable] = None if inner else origin
            dtype = getattr(variable.aval, "dtype", np.dtype(bool))
            if not inner and jnp.issubdtype(dtype, jnp.floating) and _is_narrow(dtype):
                yield Rounding(dtype, origin, summarize(equation.source_info))


def _given(equation: Any, program: Any) -> list[Any]:
    """Returns the arguments of an equation that one of its inner programs receives.

    Leading arguments that it does not receive are constants of the equation. The condition of a
    loop receives its own constants, which come first, and not the constants of the body.
    """
    arguments = list(equation.invars)
    if equation.primitive.name == "while":
        own, bodys = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        is_condition = program is equation.params["cond_jaxpr"].jaxpr
        carry = arguments[own + bodys :]
        return (arguments[:own] if is_condition else arguments[own : own + bodys]) + carry
    return arguments[len(arguments) - len(program.invars) :]


def _is_narrow(dtype: Any) -> bool:
    return unit_roundoff(dtype) > unit_roundoff(np.float32)


def refuse_chaos(
    expected: Mapping[Quantity, np.ndarray], allowed: Mapping[Quantity, float]
) -> None:
    """Rejects a training on one device whose loss, or half of its gradients, is blurred.

    Raises:
        ModelError: If it is blurred.
    """
    unclear = [q for q in blurred(expected, allowed) if q.kind in ("loss", "gradient")]
    num_gradients = sum(q.kind == "gradient" and value.any() for q, value in expected.items())
    losses = [q for q in unclear if q.kind == "loss"]
    if losses or 2 * len(unclear) > num_gradients:
        first = (losses or unclear)[0]
        change = allowed[first] / SAFETY
        raise ModelError(
            f"{first} cannot be compared: rounding of the parameters changes it by "
            f"{change:.1e} on one device already.\n"
            "  Take fewer steps, a lower learning rate or more examples, and compute in float32."
        )
