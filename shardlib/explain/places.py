"""Where in the user's code an operation comes from: of compiled programs and of jaxprs."""

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

from shardlib.explain.hlo import Instruction, Module
from shardlib.explain.stacks import Frame

_LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "chex", "orbax", "equinox", "haiku", "einops", "click"),
    "typer",
)
_REPORT = str(Path(__file__).parent) + os.sep
_STARTED_BY = re.compile(r"^<frozen|[\\/]bin[\\/]shardlib$")
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_STEPS = frozenset(
    (
        *("while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "remat2"),
        *("rematted_computation", "shard_map"),
    )
)


class Where(NamedTuple):
    """Where an operation comes from.

    `name` is its JAX name, such as `jit(step)/while/body/dot_general`; `source` is `file:line` of
    the innermost line of the user's own code; `function` is the file and the function of that
    line, such as `model.py:Attention.__call__`. What is not known is empty.
    """

    name: str = ""
    source: str = ""
    function: str = ""

    def place(self, otherwise: str = "") -> str:
        """Returns what an edit elsewhere does not change: `jvp()/dot_general in model.py:loss`.

        Args:
            otherwise: What to call an operation without a name.
        """
        short = short_name(self.name) or otherwise
        return f"{short} in {self.function}" if self.function else short


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file is part of shardlib, of a library below it or of Python, and not of a model
    or script."""
    if file.startswith(_directories()) or _STARTED_BY.search(file):
        return True
    return file.startswith(_python()) and not _INSTALLED.search(file)


def asks(file: str) -> bool:
    """Whether a file makes reports: on the stack of a step that is traced for one, whoever asked
    for it stands outside of such files."""
    return file.startswith(_REPORT)


@functools.cache
def _directories() -> tuple[str, ...]:
    """Where the libraries lie, however they were installed."""
    found = [str(Path(__file__).parents[1])]
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            found += (spec.submodule_search_locations or ()) if spec else ()
    return tuple(directory + os.sep for directory in found)


@functools.cache
def _python() -> str:
    return sysconfig.get_path("stdlib") + os.sep


def where_of(module: Module, instruction: Instruction) -> Where:
    """Returns where an instruction of a compiled program comes from."""
    frame = _innermost(list(module.frames(instruction)))
    if frame is not None:
        return _where(instruction.op_name, frame)
    source = module.source(instruction)
    return Where(instruction.op_name, source, _base(source.rpartition(":")[0]))


def user_source(module: Module, instruction: Instruction) -> str:
    """Returns `file:line` of the innermost line of the user's own code, or an empty string.

    Lines of shardlib, of Python and of libraries such as JAX and Flax are passed over, as long as
    there is a caller.
    """
    return where_of(module, instruction).source


def _innermost(frames: list[Frame]) -> Frame | None:
    return next(iter(_own(frames) or frames), None)


def _own(frames: list[Frame]) -> list[Frame]:
    """The frames of the user's own code, innermost first."""
    inside = itertools.takewhile(lambda frame: not asks(frame.file), frames)
    return [frame for frame in inside if not is_library(frame.file)]


def _where(name: str, frame: Frame) -> Where:
    function = frame.function.replace("<locals>.", "")
    place = f"{_base(frame.file)}:{function}" if function else _base(frame.file)
    return Where(name, f"{frame.file}:{frame.line}", place)


def _base(file: str) -> str:
    return re.split(r"[\\/]", file)[-1]


def where_of_equation(equation: Any, name: str = "") -> Where:
    """Returns where a jaxpr's equation comes from, which JAX calls `name`."""
    frame = _innermost(_frames(equation))
    return _where(name, frame) if frame is not None else Where(name)


def outermost_source(equation: Any) -> str:
    """Returns `file:line` of the outermost line of the user's own code that a jaxpr's equation
    comes from, or an empty string: one of the function that was traced."""
    own = _own(_frames(equation))
    return f"{own[-1].file}:{own[-1].line}" if own else ""


def _frames(equation: Any) -> list[Frame]:
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return [Frame(f.file_name, f.line_num, f.function_name) for f in frames]


def short_name(name: str) -> str:
    """Returns a JAX name without those parts of programs and loops that edits elsewhere change.

    Of `jit(step)/jvp()/while/body/closed_call/dot_general` it is `jvp()/dot_general`.
    """
    parts = name.split("/")
    parts = parts[1:] if parts[0].startswith("jit(") else parts
    return "/".join(part for part in parts if part not in _STEPS) or name
