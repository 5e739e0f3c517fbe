"""Mapping from the parameters of a compiled program to the arrays of the arguments."""

import itertools
import re
from collections.abc import Iterable

from shardlib.explain.hlo.text import Module


def parameter_paths(module: Module, paths: Iterable[str]) -> dict[int, str]:
    """Returns the path of each parameter of a program, by its number.

    The program has no parameters for arrays that it does not read. Paths of arguments are in order,
    such as `state/params/head/kernel`.
    """
    paths = list(paths)
    entry = module.computations.get(module.entry, ())
    parameters = sorted(
        (int(instruction.operands), _words(instruction.op_name))
        for instruction in entry
        if instruction.opcode == "parameter" and instruction.operands.strip().isdigit()
    )
    by_words = {_words(path): path for path in paths}
    path_by_number = {number: by_words[words] for number, words in parameters if words in by_words}
    if len(path_by_number) == len(parameters):
        return path_by_number
    if len(parameters) == len(paths):
        return {number: path for (number, _), path in zip(parameters, paths, strict=True)}
    # Flax transformations rename the variables inside of a module but keep their order.
    for _, group in itertools.groupby(paths, lambda path: _words(path)[:1]):
        members = list(group)
        numbers = [n for n, words in parameters if words[:1] == _words(members[0])[:1]]
        if len(numbers) == len(members):
            path_by_number |= dict(zip(numbers, members, strict=True))
    return path_by_number


def _words(path: str) -> tuple[str, ...]:
    """Returns the words of a path in any notation, such as `state.params['head']`."""
    return tuple(re.findall(r"[^\W_]+", path))
