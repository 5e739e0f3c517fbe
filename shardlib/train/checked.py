"""Check of each compiled step for wrong numbers, before its first run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from shardlib.errors import ModelError, WrongProgramError, did_you_mean
from shardlib.explain.wrong_numbers import FAULTS, Fault, wrong_numbers
from shardlib.train.batches import Program, moved

_SHOWN = 5
"""Maximum number of faults in a message, because faults rarely come alone."""


@dataclasses.dataclass(eq=False)
class ProgramCheck:
    """Checks each compiled program of a step once.

    Attributes:
        allowed: Codes of faults that do not raise, keys of `FAULTS`.
    """

    allowed: tuple[str, ...] = ()
    _checked: set[Any] = dataclasses.field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        for fault in unknown_codes(self.allowed):
            raise ModelError(f"{fault}\n  Name codes of faults, such as ('SL205',).")

    def __call__(self, program: Program, arguments: Sequence[Any], mesh: Any) -> None:
        """Compiles a jitted program and refuses it if it computes wrong numbers.

        JAX caches the compiled program and runs it when the program is called.

        Args:
            program: The program.
            arguments: Its arguments, on any devices.
            mesh: The mesh on which it runs.

        Raises:
            WrongProgramError: If the compiled program does not compute what the source says.
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
    """Returns a list with one message that names all codes missing from `FAULTS`, or an empty
    list."""
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
        "the compiled program does not compute the same numbers as the step: "
        + "; ".join(lines).replace(".;", ";")
        + f'\n  {faults[0].fix} Or let shardlib place every value with constrain="auto". If '
        "sl.testing.assert_equivalent passes for the step, set "
        f"allow_wrong_numbers=({codes},)."
    )
