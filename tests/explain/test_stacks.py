"""The stacks of a program, out of the tables at its head."""

import pytest

from shardlib.explain.hlo.stacks import Frame, Stacks

FUNCTIONS = {
    1: "main", 2: "call.<locals>.<lambda>", 3: "make.<locals>.step", 4: "loss",
    5: "Model.__call__", 6: "scan_body", 7: "Block.__call__",
}  # fmt: skip


def stacks(*parents, shift=0):
    """Frame n is a call of function n, in line 10 n, by frame `parents[n - 1]`; 0 for nobody."""
    numbers = range(1, len(parents) + 1)
    return Stacks(
        {
            "FileNames": {1: "model.py"},
            "FunctionNames": FUNCTIONS,
            "FileLocations": {
                n: f"file_name_id=1 function_name_id={n} line={10 * n} column=3" for n in numbers
            },
            "StackFrames": {
                n: f"file_location_id={n} parent_frame_id={parent + shift}"
                for n, parent in zip(numbers, parents, strict=True)
            },
        }
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_a_stack_is_told_from_the_inside_out(shift):
    found = stacks(0, 1, 2, shift=shift)
    assert list(found.frames(3)) == [
        Frame("model.py", 30, "make.<locals>.step", 3),
        Frame("model.py", 20, "call.<locals>.<lambda>", 2),
        Frame("model.py", 10, "main", 1),
    ]
    assert list(found.frames(9)) == list(found.frames(-1)) == []


@pytest.mark.parametrize(
    ("parents", "traced", "outside"),
    [
        # One stack down to the traced function, in which it parts.
        ((0, 1, 2, 3, 3), "step", {1, 2}),
        # All of the model stands in one line of it.
        ((0, 1, 2, 3, 4), "step", {1, 2}),
        # It parts before, into the function and what was traced of it apart.
        ((0, 1, 2, 3, 2), "step", {1, 2}),
        # The innermost of that name is the one, as of lambdas there are many.
        ((0, 1, 2, 3, 3), "<lambda>", {1}),
        # The body of a loop that was traced before has no callers.
        ((0, 1, 2, 3, 0, 5, 6), "step", {1, 2}),
        # Where nothing has the name, it is what all stacks share.
        ((0, 1, 2, 2), "partial", {1, 2}),
    ],
)
def test_what_called_the_traced_function_is_outside(parents, traced, outside):
    found = stacks(*parents)
    assert found.outside(traced) == found.outside(traced) == outside
