"""Provenance of an operation: part of the model, pass, operation and source line.

Every report names operations and buffers by this module. The part of the model is a path such as
`layers[*]/attention/query`, in the words of the parameters. `[*]` marks layers that run as one
loop, and `blocks/*` the layers of a list, which run the same lines. The path comes from the first
of these that the program has:

1. the named scopes of the JAX name, which Linen modules set,
2. the calls on the trace stack, such as `self.query(x)`, for NNX modules, which set no scopes,
3. the classes whose methods called each other, such as `Transformer/Block`.
"""

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Literal, NamedTuple

import jax.extend.core

from shardlib.cost.costs import Pass, pass_of
from shardlib.explain.hlo.calls import Chain, argument_chains
from shardlib.explain.hlo.stacks import Frame
from shardlib.explain.hlo.text import Instruction, Module

Phase = Pass | Literal[""]
"""Pass of a training step. `recompute`: the forward pass again, within the backward pass."""

_LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "chex", "orbax", "equinox", "haiku", "einops", "click"),
    "typer",
)
_REPORT = str(Path(__file__).parents[1]) + os.sep
_STARTED_BY = re.compile(r"^<frozen|[\\/]bin[\\/]shardlib$")
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_PROGRAM = re.compile(r"jit\((.*)\)$")
_TRANSFORMED = re.compile(r"^(?:jvp|transpose|vmap)\((.*)\)$")
_SCOPE = re.compile(r"[A-Za-z]\w*(?:\.\w+)*$")
# Parts of names that JAX adds itself: loops, branches, calls and rematerialization.
_OWN = frozenset(
    (
        *("while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "remat", "remat2"),
        *("rematted_computation", "shard_map", "custom_jvp_call", "custom_vjp_call", "pjit"),
    )
)
# Parts of an argument's path that are not modules: around modules, and of an optimizer.
_CONTAINERS = frozenset(("params", "model_state"))
_STATISTICS = frozenset(("opt_state", "optimizer", "opt", "momentum", "mu", "nu"))
# A scan keeps a value of each turn for the backward pass.
_STACKED = "jit(dynamic_update_index_in_dim)/dynamic_update_slice"
_MOVES = frozenset(
    ("dynamic_update_slice", "dynamic_slice", "broadcast_in_dim", "reshape", "squeeze", "transpose")
)


class Where(NamedTuple):
    """Origin of an operation. Unknown fields are empty.

    `name` is its JAX name, such as `jit(step)/while/body/dot_general`. `source` is `file:line` of
    the innermost line of the user's own code. `function` is the file and function of that line,
    such as `model.py:Attention.__call__`. `model_path` is the part of the model, such as
    `layers[*]/attention`.
    """

    name: str = ""
    source: str = ""
    function: str = ""
    model_path: str = ""
    phase: Phase = ""

    @property
    def operation(self) -> str:
        """The JAX operation, such as `dot_general`, or the path of an argument."""
        return operation_of(self.name)

    def label(self, otherwise: str = "") -> str:
        """Returns a short text: `layers[*]/attention/query dot_general (backward)`. `otherwise`
        names an operation without a name."""
        phase = f"({self.phase})" if self.phase else ""
        return " ".join(filter(None, (self.model_path, self.operation or otherwise, phase)))

    def place(self, otherwise: str = "") -> str:
        """Returns the label with the function, which edits elsewhere do not change.

        `layers[*]/mlp/up dot_general (forward) in model.py:MLP.__call__`. See `label`.
        """
        label = self.label(otherwise)
        return f"{label} in {self.function}" if self.function else label


def operation_of(name: str) -> str:
    """Returns the operation of a JAX name, or the path that an argument's name stands for.

    `jit(step)/jvp()/while/body/dot_general` becomes `dot_general`, or `ij,jk->ik/dot_general` if it
    has the formula of an einsum, and `state.params['head']` becomes `state/params/head`.
    """
    if "/" in name or name.startswith("jit("):
        *_, before, last = "", *name.split("/")
        program = _PROGRAM.match(last)
        last = program[1] if program else last
        return f"{before}/{last}" if "->" in before else last
    is_path = re.search(r"\[|\.[A-Za-z_]", name)
    return "/".join(_words(name)) if is_path else name


def phase_of(name: str, *, differentiated: bool) -> Phase:
    """Returns the pass of an operation by its JAX name, such as
    `jit(step)/transpose(jvp())/while/body/dot_general`. In a program that takes gradients
    (`differentiated`), an operation outside of the passes belongs to the optimizer."""
    during = pass_of(name)
    if during != "optimizer":
        return during
    # Names in computations that the compiler made are relative.
    return "optimizer" if differentiated and name.startswith("jit(") else ""


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file belongs to shardlib, its libraries or Python, not to a model or script."""
    if file.startswith(_directories()) or _STARTED_BY.search(file):
        return True
    return file.startswith(_python()) and not _INSTALLED.search(file)


def makes_reports(file: str) -> bool:
    """Whether a file makes reports.

    On the stack of a step traced for a report, the frames outside of such a file belong to the
    caller of the report.
    """
    return file.startswith(_REPORT)


@functools.cache
def _directories() -> tuple[str, ...]:
    """Returns the directories of the libraries, however they were installed."""
    directories = [str(Path(__file__).parents[2])]
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            directories += (spec.submodule_search_locations or ()) if spec else ()
    return tuple(directory + os.sep for directory in directories)


@functools.cache
def _python() -> str:
    return sysconfig.get_path("stdlib") + os.sep


def where_of(module: Module, instruction: Instruction) -> Where:
    """Returns the origin of an instruction, as its own metadata tell."""
    metadata = instruction.attributes.get("metadata", "")
    cache = module.remembered("where", dict)
    if metadata not in cache:
        cache[metadata] = _read_where(module, instruction)
    return cache[metadata]


def _read_where(module: Module, instruction: Instruction) -> Where:
    name, frames = instruction.op_name, list(module.frames(instruction))
    frame = _innermost(frames)
    differentiated = module.remembered("differentiated", lambda: _takes_gradients(module))
    path, phase = model_path(module, name, frames), phase_of(name, differentiated=differentiated)
    if frame is not None:
        return _where(name, frame)._replace(model_path=path, phase=phase)
    source = module.source(instruction)
    return Where(name, source, _base(source.rpartition(":")[0]), path, phase)


def _takes_gradients(module: Module) -> bool:
    return any("jvp(" in i.op_name for body in module.computations.values() for i in body)


def came_from(module: Module, computation: str, instruction: Instruction, output: int = 0) -> Where:
    """Returns the origin of an instruction, else of its nearest operand or reader with one.

    A value that a loop keeps for the backward pass comes from the operation that made it.
    """
    if instruction.opcode == "parameter":
        return where_of(module, instruction)
    fused = instruction.called()[0] if instruction.opcode == "fusion" else ""
    part = _result(module, fused, output) if fused else instruction
    origin = part if part and part.op_name else module.origin(computation, instruction)
    if origin.op_name.endswith(_STACKED):
        made = _written(module, computation, instruction, part, fused)
        kept = (where_of(module, one) for one in made)
        kept = (where for where in kept if where.source and where.operation not in _MOVES)
        return next(kept, where_of(module, origin))
    # An argument has a path for a name and no source, so its readers are tried.
    own = where_of(module, origin)
    for at in (origin, *module.readers(computation, instruction)):
        where = where_of(module, at)
        if where.source:
            return where._replace(name=own.name, phase=own.phase if own.name else where.phase)
    return own


def _result(module: Module, fused: str, output: int) -> Instruction | None:
    """Returns the instruction of a fused computation that makes one of its results."""
    root = module.root(fused)
    return module.operand(fused, root, output) if root and root.opcode == "tuple" else root


def _written(
    module: Module,
    computation: str,
    instruction: Instruction,
    update: Instruction | None,
    fused: str,
) -> Iterator[Instruction]:
    """Yields what the update of a slice comes from, nearest first.

    `update` is the instruction itself, or is in its fused computation.
    """
    home = fused or computation
    nearest = module.sources(home, update) if update else ()
    slices = (one for one in nearest if one.opcode == "dynamic-update-slice")
    value = next((module.operand(home, one, 1) for one in slices), None)
    for one in module.sources(home, value) if value else ():
        yield one
        if fused and one.opcode == "parameter":
            operand = module.operand(computation, instruction, int(one.operands))
            yield from module.sources(computation, operand) if operand else ()


def _innermost(frames: list[Frame]) -> Frame | None:
    return next(iter(_own(frames) or frames), None)


def _own(frames: list[Frame]) -> list[Frame]:
    """Returns the frames of the user's own code, innermost first."""
    inside = itertools.takewhile(lambda frame: not makes_reports(frame.file), frames)
    return [frame for frame in inside if not is_library(frame.file)]


def _where(name: str, frame: Frame) -> Where:
    function = frame.function.replace("<locals>.", "")
    place = f"{_base(frame.file)}:{function}" if function else _base(frame.file)
    return Where(name, f"{frame.file}:{frame.line}", place)


def _base(file: str) -> str:
    return re.split(r"[\\/]", file)[-1]


def where_of_equation(equation: jax.extend.core.JaxprEqn, name: str = "") -> Where:
    """Returns the origin of a jaxpr's equation, whose JAX name is `name`."""
    frame = _innermost(_frames(equation))
    where = _where(name, frame) if frame is not None else Where(name)
    # Without a compiled program the passes are known only from the name.
    phase = phase_of(name, differentiated=False)
    return where._replace(model_path="/".join(_scopes(name)), phase=phase)


def innermost_source(equation: jax.extend.core.JaxprEqn) -> str:
    """Returns `file:line (function)` of the innermost user line behind an equation, or ""."""
    own = _own(_frames(equation))
    return f"{own[0].file}:{own[0].line} ({own[0].function})" if own else ""


def outermost_source(equation: jax.extend.core.JaxprEqn) -> str:
    """Returns `file:line` of the outermost user line behind a jaxpr's equation, or "".

    This is a line of the traced function.
    """
    own = _own(_frames(equation))
    return f"{own[-1].file}:{own[-1].line}" if own else ""


def _frames(equation: jax.extend.core.JaxprEqn) -> list[Frame]:
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return [Frame(f.file_name, f.line_num, f.function_name) for f in frames]


def model_path(module: Module, name: str, frames: list[Frame]) -> str:
    """Returns the part of the model that an operation belongs to, outermost first, or "". Frames
    are the trace stack, innermost first."""
    tree = module.remembered("parts of the model", lambda: ModelTree(module))
    traced = _PROGRAM.match(name.partition("/")[0])
    outside = module.stacks.outside(traced[1] if traced else "")
    inside = [frame for frame in frames if frame.number not in outside]
    scopes, looped = _scopes(name), _is_looped(name)
    modules = [scope.partition(".")[0] for scope in scopes]
    modules = modules or ([] if "/" in name else [*_words(name)][:-1])  # Of an argument.
    path = tree.walk([((name,),) for name in modules], looped=looped)
    path = path or tree.walk([argument_chains(f) for f in reversed(inside)], looped=looped)
    return "/".join(path or _classes(inside) or scopes)


_Node = tuple[str, ...]
"""A module of a model, by the path of the argument that holds it."""


class ModelTree:
    """The modules of a model, by the paths of the program's arguments."""

    def __init__(self, module: Module):
        entry = module.computations.get(module.entry, ())
        paths = [_words(i.op_name) for i in entry if i.opcode == "parameter"]
        paths = [path for path in paths if _STATISTICS.isdisjoint(path)]
        nodes = {path[:end]: None for path in paths for end in range(1, len(path))}
        self._nodes: Set[_Node] = nodes.keys()
        self._numbers: dict[_Node, list[str]] = {}
        self._starts: dict[str, _Node] = {}
        for node in sorted(nodes, key=len):
            *above, name = node
            if above and name not in _CONTAINERS:
                self._starts.setdefault(name, node)
            if name.isdigit():
                self._numbers.setdefault(tuple(above), []).append(name)

    def walk(self, calls: list[tuple[Chain, ...]], *, looped: bool) -> list[str]:
        """Returns the path of a call within calls, or an empty list. Each call, outermost first,
        has the chains of attributes that may be the module called; a chain that names no module
        below the one before it is skipped. `looped`: whether the operation runs in a loop over
        layers."""
        nodes: set[_Node] = set()
        shown: list[str] = []
        for chains in calls:
            for chain in chains:
                before = len(shown)
                for name in chain:
                    nodes, shown = self._step(nodes, shown, name)
                if len(shown) > before:
                    if looped and not before and self._has_modules(nodes):
                        shown[-1] += "[*]"
                    break
        return [*shown, *self._number(nodes)]

    def _step(self, nodes: set[_Node], shown: list[str], name: str) -> tuple[set[_Node], list[str]]:
        if not nodes:
            start = self._starts.get(name)
            return ({start}, [name]) if start and not name.isdigit() else (nodes, shown)
        below = {(*node, name) for node in nodes} & self._nodes
        if below:
            return below, [*shown, name]
        layers = {(*node, number) for node in nodes for number in self._numbers.get(node, ())}
        below = {(*layer, name) for layer in layers} & self._nodes
        return (below, [*shown, *self._number(nodes), name]) if below else (nodes, shown)

    def _number(self, nodes: set[_Node]) -> list[str]:
        """Returns the index of a layer in a list, `*` if several layers run the same lines."""
        numbers = {number for node in nodes for number in self._numbers.get(node, ())}
        return sorted(numbers) if len(numbers) == 1 else ["*"] * bool(numbers)

    def _has_modules(self, nodes: set[_Node]) -> bool:
        return any(node[:-1] in nodes for node in self._nodes)


def _is_looped(name: str) -> bool:
    """Whether an operation is in a loop within the differentiated function, such as over layers.

    A loop around that function is over microbatches.
    """
    return "while/body" in name.rpartition("jvp(")[2]


def _words(path: str) -> tuple[str, ...]:
    """Returns the names in a path of any notation, such as `state.params['head']`."""
    return tuple(re.findall(r"\w+", path))


def _classes(frames: list[Frame]) -> list[str]:
    """Returns the classes of the user's methods on a stack, outermost first."""
    classes: list[str] = []
    for frame in frames:
        if not is_library(frame.file):
            parts = reversed(frame.function.split(".<locals>."))
            classes += (part.split(".")[-2] for part in parts if "." in part)
    return list(dict.fromkeys(reversed(classes)))


def _scopes(name: str) -> list[str]:
    """Returns the named scopes of a JAX name."""
    scopes = []
    for part in name.split("/")[1:-1]:
        while transformed := _TRANSFORMED.match(part):
            part = transformed[1]
        if _SCOPE.match(part) and part not in _OWN and not part.startswith("branch_"):
            scopes.append(part)
    return scopes
