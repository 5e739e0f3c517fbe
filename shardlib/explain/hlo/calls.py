"""Modules that a line of source code calls, read from its syntax tree.

A trace stack names the position of each call. `self.query(x)` there calls the attribute `query`;
`scan_layers(call, self.layers, x)` runs the attribute `layers`; and in
`for block in self.blocks: x = block(x)` the call of `block` is one of `blocks`.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from shardlib.explain.hlo.stacks import Frame

Chain = tuple[str, ...]
"""Attributes from the outermost to the innermost one: `("encoder", "layers")`."""

# Calls whose result stands for the module in their first argument.
_KEEPS = frozenset(("enumerate", "zip", "reversed", "list", "iter", "split", "merge", "state"))
_DEPTH = 4
"""Assignments that are followed back from a local name."""


@functools.lru_cache(maxsize=4096)
def _chains_at(file: str, line: int, column: int) -> tuple[Chain, ...]:
    chains: dict[Chain, None] = {}
    for call, names in _calls(file).get(line, ()):
        if call.col_offset == column:
            chains |= dict.fromkeys(_modules(call, names))
    return tuple(chains)


def argument_chains(frame: Frame) -> tuple[Chain, ...]:
    """Returns the attributes that may be the module that a frame calls, most likely first.

    The result is empty if the source is not available or has no such call.
    """
    return _chains_at(frame.file, frame.line, frame.column) if frame.column >= 0 else ()


_Names = dict[str, list[ast.expr]]
"""Expressions that are assigned to the local names of a function."""


@functools.lru_cache(maxsize=256)
def _calls(file: str) -> dict[int, list[tuple[ast.Call, _Names]]]:
    """Returns the calls of a file by their first line, with the local names around them."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    calls: dict[int, list[tuple[ast.Call, _Names]]] = {}

    def visit(node: ast.AST, names: _Names) -> None:
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            names = {**names, **_assigned(node)}
        if isinstance(node, ast.Call):
            calls.setdefault(node.lineno, []).append((node, names))
        for child in ast.iter_child_nodes(node):
            visit(child, names)

    visit(tree, {})
    return calls


def _assigned(function: ast.AST) -> _Names:
    names: _Names = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.For | ast.comprehension):
            target, value = node.target, node.iter
        else:
            continue
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                names.setdefault(name.id, []).append(value)
    return names


def _modules(call: ast.Call, names: _Names) -> Iterator[Chain]:
    yield from filter(None, _chains(call.func, names))
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, ast.Name) and owner.id == "self":
        return  # A method of the module itself; its arguments are arrays.
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        yield from filter(None, _chains(argument, names))


def _chains(node: ast.expr, names: _Names, depth: int = _DEPTH) -> Iterator[Chain]:
    """Yields the attributes that an expression may stand for; `()` for an object by itself."""
    if isinstance(node, ast.Attribute):
        yield from ((*chain, node.attr) for chain in _chains(node.value, names, depth))
    elif isinstance(node, ast.Name):
        values = names.get(node.id, ()) if depth else ()
        chains = [chain for value in values for chain in _chains(value, names, depth - 1) if chain]
        yield from chains or [()]
    elif isinstance(node, ast.Subscript):
        yield from _chains(node.value, names, depth)
    elif isinstance(node, ast.IfExp):
        # `self.embedding if self.head is None else self.head`: the special case comes first.
        yield from (*_chains(node.orelse, names, depth), *_chains(node.body, names, depth))
    elif isinstance(node, ast.Call) and depth < _DEPTH and _called_name(node) in _KEEPS:
        for argument in node.args:
            yield from _chains(argument, names, depth)


def _called_name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
