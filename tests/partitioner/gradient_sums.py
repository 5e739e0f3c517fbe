"""Which sums a gradient goes through in a compiled training step, read without shardlib.

Adam's first moment is the gradient times a number, plus the moment before. The reading walks back
from that output, through what moves and scales numbers, to the products that made the gradient,
and notes the axes of each sum over devices on the way.
"""

import itertools
import math
import re
from typing import NamedTuple

import numpy as np

PRODUCTS = {"dot", "convolution", "custom-call", "scatter", "reduce", "reduce-window"}
SUMS = {"all-reduce", "all-reduce-start", "reduce-scatter", "reduce-scatter-start"}
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
CALLED = re.compile(r"\b(?:calls|body)=%?([\w.\-]+)")


class Instruction(NamedTuple):
    """One line of a program."""

    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str


class Where(NamedTuple):
    """An instruction, and the calls that lead to its computation."""

    computation: str
    name: str
    element: int
    callers: tuple["Where", ...]


class Reader:
    """A program, by computation and name.

    Args:
        text: The program.
        mesh: Devices by axis, in the order of the mesh.
    """

    def __init__(self, text, mesh):
        self.text, self.mesh = text, dict(mesh)
        self.computations, self.roots, self.entry = {}, {}, None
        self._read()

    def _read(self):
        current = None
        for line in self.text.splitlines():
            if head := HEAD.match(line):
                current = head[2]
                self.computations[current] = {}
                self.entry = current if head[1] else self.entry
            elif current and (found := LINE.match(line)):
                root, name, shape, opcode, rest = found.groups()
                operands = tuple(re.findall(r"%([\w.\-]+)", _parenthesis(rest)))
                self.computations[current][name] = Instruction(shape, opcode, operands, rest)
                if root:
                    self.roots[current] = name

    def moments(self):
        """Returns the number of the output of each first moment, by the path of its parameter."""
        donated = re.findall(r"\{(\d+)\}: \((\d+), \{\}", self.text.split("\n", 1)[0])
        output = {int(argument): int(result) for result, argument in donated}
        found = {}
        for one in self.computations[self.entry].values():
            if one.opcode == "parameter" and (name := re.search(r'op_name="([^"]*)"', one.rest)):
                path = name[1].replace("\\'", "'")
                if ".mu[" in path:
                    keys = re.findall(r"\['(.*?)'\]", path)
                    found["/".join(keys)] = output[int(one.rest.split(")")[0])]
        return found

    def sums(self, output):
        """Returns the axes that each way from a product to an output of the program sums over:
        a set of sorted tuples."""
        root = self.computations[self.entry][self.roots[self.entry]]
        start = Where(self.entry, root.operands[output], 0, ())
        waiting, seen, found = [(start, ())], set(), set()
        while waiting:
            where, axes = waiting.pop()
            if (where, axes) in seen:
                continue
            seen.add((where, axes))
            one = self.computations[where.computation][where.name]
            if self._is_product(where, one):
                found.add(axes)
                continue
            if one.opcode in SUMS and not self._is_gather(where, one):
                axes = tuple(sorted((*axes, *self._axes(one.rest))))
                assert len(axes) <= 2 * len(self.mesh), f"{where.name} is summed in a loop"
            waiting += [(before, axes) for before in self._before(where, one)]
        return found

    def _before(self, where, one):
        """Yields what an instruction is made from."""
        computation, _, element, callers = where

        def at(name, element=0):
            return Where(computation, name, element, callers)

        if one.opcode == "get-tuple-element":
            index = int(re.search(r"index=(\d+)", one.rest)[1])
            yield at(one.operands[0], index)
        elif one.opcode in ("tuple", "opt-barrier", "optimization-barrier"):
            yield at(one.operands[element if one.opcode == "tuple" else 0], element)
        elif one.opcode in ("fusion", "call", "while", "async-start"):
            called = CALLED.search(one.rest) or re.search(r"to_apply=%?([\w.\-]+)", one.rest)
            inside, callers = called[1], (*callers, where)
            yield Where(inside, self.roots[inside], element, callers)
            if one.opcode == "while":
                yield at(one.operands[0], element)
        elif one.opcode == "parameter" and callers:
            *outer, caller = callers
            call = self.computations[caller.computation][caller.name]
            if call.opcode == "while":  # what a trip begins with is what the one before left
                body = computation
                yield Where(body, self.roots[body], element, callers)
                yield Where(caller.computation, call.operands[0], element, tuple(outer))
            else:
                number = int(one.rest.split(")")[0])
                yield Where(caller.computation, call.operands[number], element, tuple(outer))
        elif one.opcode in SUMS | {"all-gather", "all-gather-start", "all-to-all-start"}:
            yield at(one.operands[element if len(one.operands) > 1 else 0])
        else:
            yield from (at(name) for name in one.operands)

    def _is_gather(self, where, one):
        """Whether a sum puts parts next to each other: TPUs gather small arrays so."""
        before = self._before(where, one)
        return all(self._opcode(operand) == "dynamic-update-slice" for operand in before)

    def _is_product(self, where, one):
        """Whether a gradient begins here. TPUs end an all-to-all with a reduction that takes away
        dims of one row, and ask for memory by a call."""
        if one.opcode == "reduce":
            operand = self.computations[where.computation][one.operands[0]]
            return _size(operand.shape) != _size(one.shape)
        return one.opcode in PRODUCTS and "AllocateBuffer" not in one.rest

    def _opcode(self, where):
        """Returns the opcode that made a value, however it was passed on."""
        one = self.computations[where.computation][where.name]
        while one.opcode in ("fusion", "bitcast", "copy", "reshape", "get-tuple-element", "tuple"):
            where = next(iter(self._before(where, one)))
            one = self.computations[where.computation][where.name]
        return one.opcode

    def _axes(self, rest):
        """Returns the mesh axes along which the members of each group differ."""
        found = set()
        for group in _groups(rest):
            at = np.unravel_index(np.array(group), tuple(self.mesh.values()))
            pairs = zip(self.mesh, at, strict=True)
            axes = tuple(axis for axis, ids in pairs if len(set(ids.tolist())) > 1)
            assert len(group) == math.prod(self.mesh[axis] for axis in axes), rest
            found.add(axes)
        (axes,) = found
        return axes


def _size(shape):
    return math.prod(int(n) for n in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if n)


def _parenthesis(rest):
    """Returns what stands before the parenthesis that closes the operands."""
    depth = 1
    for number, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return rest[:number]
    return rest


def _groups(rest):
    if rows := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", rest):
        return [[int(i) for i in row.split(",")] for row in re.findall(r"\{([\d,]+)\}", rows[1])]
    if rows := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[\S+?),? ", rest):
        return _iota(rows[3]).reshape(int(rows[1]), int(rows[2])).tolist()
    form = r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\]\S*?|[\d,]*)\))? \{(.*?)\}"
    axes, order, named = re.search(form, rest).groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    together = re.findall(r"'(\w+)'", named)
    if order and not order.startswith("["):
        ids = np.array([int(i) for i in order.split(",")])
    else:
        ids = _iota(order or f"[{math.prod(sizes.values())}]")
    grid, groups = ids.reshape(tuple(sizes.values())), []
    for fixed in itertools.product(*(range(n) for a, n in sizes.items() if a not in together)):
        at = iter(fixed)
        index = tuple(slice(None) if axis in together else next(at) for axis in sizes)
        groups.append(grid[index].reshape(-1).tolist())
    return groups


def _iota(text):
    """Reads `[2,8]T(1,0)`: the numbers from 0 in rows of 8, columns first."""
    dims, order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    ids = np.arange(math.prod(map(int, dims.split(",")))).reshape([int(d) for d in dims.split(",")])
    return (ids.transpose([int(i) for i in order.split(",")]) if order else ids).reshape(-1)
