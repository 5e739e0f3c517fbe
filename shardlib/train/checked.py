"""A compiled step is checked for wrong numbers once, before it runs for the first time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from shardlib.errors import ModelError, WrongProgramError, did_you_mean
from shardlib.explain.wrong_numbers import FAULTS, Fault, wrong_numbers
from shardlib.train.batches import Program, moved

_SHOWN = 5
"""Faults that a message lists; one operation seldom comes alone."""


@dataclasses.dataclass(eq=False)
class ProgramCheck:
    """Looks at each compiled program of a step once.

    Attributes:
        allowed: Codes of faults that are not refused, keys of `FAULTS`.
    """

    allowed: tuple[str, ...] = ()
    _checked: set[Any] = dataclasses.field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        for fault in unknown_codes(self.allowed):
            raise ModelError(f"{fault}\n  Name codes of faults, such as ('SL205',).")

    def __call__(self, program: Program, arguments: Sequence[Any], mesh: Any) -> None:
        """Compiles a jitted program and refuses it if it computes wrong numbers.

        JAX keeps what is compiled here and runs it when the program is called.

        Args:
            program: The program.
            arguments: What it is called with, wherever it lies.
            mesh: The mesh that it runs on.

        Raises:
            WrongProgramError: If the compiler made another program of it than what was written.
        """
        if program.jitted in self._checked or any(map(_is_traced, jax.tree.leaves(arguments))):
            return
        if mesh.size > 1:
            state, *others = arguments
            others = moved(tuple(others), program.placed) or others
            traced = program.jitted.trace(state, *others)
            found = wrong_numbers(traced.lower().compile(), mesh, traced.jaxpr)
            refused = [fault for fault in found if fault.code not in self.allowed]
            if refused:
                raise WrongProgramError(_message(refused), tuple(refused))
        self._checked.add(program.jitted)


def unknown_codes(codes: Sequence[str]) -> list[str]:
    """Returns what is wrong with codes that are to be allowed: one text that names those which are
    not codes of `FAULTS`, or nothing."""
    unknown = [code for code in codes if code not in FAULTS]
    if not unknown:
        return []
    return [
        f"allow_wrong_numbers names {', '.join(map(repr, unknown))}, but the codes are "
        f"{', '.join(FAULTS)}.{did_you_mean(str(unknown[0]), FAULTS)}"
    ]


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)  # type: ignore[attr-defined]


def _message(faults: Sequence[Fault]) -> str:
    count = len(faults)
    codes = ", ".join(repr(code) for code in dict.fromkeys(fault.code for fault in faults))
    more = [f"and {count - _SHOWN} more"] if count > _SHOWN else []
    lines = [*map(str, faults[:_SHOWN]), *more]
    return (
        "the compiler made a program that computes other numbers than the step that was written: "
        + "; ".join(lines).replace(".;", ";")
        + f'\n  {faults[0].fix} Or let shardlib place every value with constrain="auto". If '
        "sl.testing.assert_equivalent finds the step right, pass "
        f"allow_wrong_numbers=({codes},)."
    )
