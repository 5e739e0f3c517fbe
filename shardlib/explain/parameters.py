"""Which parameter of a compiled program is which array of the arguments."""

import itertools
import re
from collections.abc import Iterable

from shardlib.explain.hlo import Module


def parameter_paths(module: Module, paths: Iterable[str]) -> dict[int, str]:
    """Returns the path of each parameter of a program, by its number; arrays that the program does
    not read are no parameters of it.

    Args:
        module: The program.
        paths: Of all arrays of the arguments, in order, such as `state/params/head/kernel`.
    """
    paths = list(paths)
    entry = module.computations.get(module.entry, ())
    parameters = sorted(
        (int(instruction.operands), _words(instruction.op_name))
        for instruction in entry
        if instruction.opcode == "parameter" and instruction.operands.strip().isdigit()
    )
    by_words = {_words(path): path for path in paths}
    found = {number: by_words[words] for number, words in parameters if words in by_words}
    if len(found) == len(parameters):
        return found
    if len(parameters) == len(paths):
        return {number: path for (number, _), path in zip(parameters, paths, strict=True)}
    # Flax's transformations give their own names to what is inside of a module, in its order.
    for _, group in itertools.groupby(paths, lambda path: _words(path)[:1]):
        members = list(group)
        numbers = [n for n, words in parameters if words[:1] == _words(members[0])[:1]]
        if len(numbers) == len(members):
            found |= dict(zip(numbers, members, strict=True))
    return found


def _words(path: str) -> tuple[str, ...]:
    """The words of a path, however it is written: `state.params['head']` as `state/params/head`."""
    return tuple(re.findall(r"[^\W_]+", path))
