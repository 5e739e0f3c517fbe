"""Which fault of XLA's partitioner makes a program wrong, as far as its result tells."""

from collections.abc import Mapping

import numpy as np

from random_programs.program import Program

# Pieces that have the operation of each fault; all of them have matmuls, and so fault A.
_SUSPECTS = {
    "C": {"pool", "pool1d"},
    "D": {"dynamic_slice", "crop"},
    "E": {"state_space"},
}


def likely_faults(
    program: Program,
    expected: Mapping[str, np.ndarray],
    actual: Mapping[str, np.ndarray],
    *,
    forward: bool,
) -> str:
    """Returns letters of `A` to `E`, most likely first, or `unknown`.

    B: a gradient is a multiple of what it should be. A: a matmul's rows are permuted, in the
    forward pass or the gradient. C, D and E: the program has the operation, and a mesh axis that
    may cut it along its window (C, E).
    """
    pairs = [(expected[path], actual[path]) for path in expected]
    if any(_is_multiple(*pair) for pair in pairs):
        return "B"
    cuts_within = any(len(axes) > 1 and axes[1] for axes in program.placement.batch_axes.values())
    suspects = [
        fault
        for fault, pieces in _SUSPECTS.items()
        if pieces & set(program.pieces) and (fault != "C" or cuts_within)
    ]
    if program.kind == "images" and not forward and cuts_within:
        suspects.insert(0, "B")
    if forward:
        suspects = [fault for fault in suspects if fault == "D"]
    if _has_crossed_axes(program):
        suspects.append("A")
    return "".join(suspects) or "unknown"


def _is_multiple(expected: np.ndarray, actual: np.ndarray) -> bool:
    """Whether a gradient is 2, 4 or 8 times what it should be."""
    norm = np.linalg.norm(expected)
    return any(np.linalg.norm(actual - n * expected) < 1e-3 * norm for n in (2, 4, 8))


def _has_crossed_axes(program: Program) -> bool:
    """Whether the mesh has three axes, or the batch lies over two."""
    return program.mesh.count(",") >= 1
