"""Source locations in the user's code, for operations of compiled programs and jaxprs."""

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

from shardlib.explain.hlo.stacks import Frame
from shardlib.explain.hlo.text import Instruction, Module

_LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "chex", "orbax", "equinox", "haiku", "einops", "click"),
    "typer",
)
_REPORT = str(Path(__file__).parents[1]) + os.sep
_STARTED_BY = re.compile(r"^<frozen|[\\/]bin[\\/]shardlib$")
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_STEPS = frozenset(
    (
        *("while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "remat2"),
        *("rematted_computation", "shard_map"),
    )
)


class Where(NamedTuple):
    """Origin of an operation.

    `name` is its JAX name, such as `jit(step)/while/body/dot_general`. `source` is `file:line` of
    the innermost line of the user's own code. `function` is the file and function of that line,
    such as `model.py:Attention.__call__`. Unknown fields are empty.
    """

    name: str = ""
    source: str = ""
    function: str = ""

    def place(self, otherwise: str = "") -> str:
        """Returns a place that edits elsewhere do not change: `jvp()/dot_general in model.py:loss`.

        Args:
            otherwise: The name for an operation without one.
        """
        short = short_name(self.name) or otherwise
        return f"{short} in {self.function}" if self.function else short


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file belongs to shardlib, its libraries or Python, not to a model or script."""
    if file.startswith(_directories()) or _STARTED_BY.search(file):
        return True
    return file.startswith(_python()) and not _INSTALLED.search(file)


def asks(file: str) -> bool:
    """Whether a file makes reports.

    On the stack of a step traced for a report, the frames outside of such a file belong to the
    caller of the report.
    """
    return file.startswith(_REPORT)


@functools.cache
def _directories() -> tuple[str, ...]:
    """Returns the directories of the libraries, however they were installed."""
    found = [str(Path(__file__).parents[2])]
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            found += (spec.submodule_search_locations or ()) if spec else ()
    return tuple(directory + os.sep for directory in found)


@functools.cache
def _python() -> str:
    return sysconfig.get_path("stdlib") + os.sep


def where_of(module: Module, instruction: Instruction) -> Where:
    """Returns the origin of an instruction of a compiled program."""
    frame = _innermost(list(module.frames(instruction)))
    if frame is not None:
        return _where(instruction.op_name, frame)
    source = module.source(instruction)
    return Where(instruction.op_name, source, _base(source.rpartition(":")[0]))


def user_source(module: Module, instruction: Instruction) -> str:
    """Returns `file:line` of the innermost line of the user's own code, or an empty string.

    Lines of shardlib, Python and libraries such as JAX and Flax count only if the stack has no
    other lines.
    """
    return where_of(module, instruction).source


def _innermost(frames: list[Frame]) -> Frame | None:
    return next(iter(_own(frames) or frames), None)


def _own(frames: list[Frame]) -> list[Frame]:
    """Returns the frames of the user's own code, innermost first."""
    inside = itertools.takewhile(lambda frame: not asks(frame.file), frames)
    return [frame for frame in inside if not is_library(frame.file)]


def _where(name: str, frame: Frame) -> Where:
    function = frame.function.replace("<locals>.", "")
    place = f"{_base(frame.file)}:{function}" if function else _base(frame.file)
    return Where(name, f"{frame.file}:{frame.line}", place)


def _base(file: str) -> str:
    return re.split(r"[\\/]", file)[-1]


def where_of_equation(equation: Any, name: str = "") -> Where:
    """Returns the origin of a jaxpr's equation, whose JAX name is `name`."""
    frame = _innermost(_frames(equation))
    return _where(name, frame) if frame is not None else Where(name)


def outermost_source(equation: Any) -> str:
    """Returns `file:line` of the outermost user line behind a jaxpr's equation, or "".

    This is a line of the traced function.
    """
    own = _own(_frames(equation))
    return f"{own[-1].file}:{own[-1].line}" if own else ""


def _frames(equation: Any) -> list[Frame]:
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return [Frame(f.file_name, f.line_num, f.function_name) for f in frames]


def short_name(name: str) -> str:
    """Returns a JAX name without the parts for programs and loops, which edits elsewhere change.

    `jit(step)/jvp()/while/body/closed_call/dot_general` becomes `jvp()/dot_general`.
    """
    parts = name.split("/")
    parts = parts[1:] if parts[0].startswith("jit(") else parts
    return "/".join(part for part in parts if part not in _STEPS) or name
