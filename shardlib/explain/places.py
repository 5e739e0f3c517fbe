"""Where in the user's code an operation comes from: of compiled programs and of jaxprs."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlib.explain.hlo import Instruction, Module

_OWN = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = re.compile(
    r"site-packages[\\/](jax|jaxlib|flax|optax|chex|orbax|typer)[\\/]|^<frozen|[\\/]bin[\\/]shardlib$"
)
_STEPS = frozenset(
    (
        *("while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "remat2"),
        *("rematted_computation", "shard_map"),
    )
)


def is_library(file: str) -> bool:
    """Whether a file is part of shardlib or of a library below it, and not of a model or script."""
    return file.startswith(_OWN) or _LIBRARY.search(file) is not None


def user_source(module: Module, instruction: Instruction) -> str:
    """Returns `file:line` of the innermost line of the user's own code, or an empty string.

    Lines of shardlib, JAX, Flax and optax are passed over, as long as there is a caller.
    """
    return _users(list(_frames(module, instruction))) or module.source(instruction)


def _users(frames: list[tuple[str, int]]) -> str:
    own = [frame for frame in frames if not is_library(frame[0])]
    return "{}:{}".format(*(own or frames)[0]) if frames else ""


def _frames(module: Module, instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Yields (file, line) of the stack, innermost first."""
    rows, locations = module.tables["StackFrames"], module.tables["FileLocations"]
    # Where the first frame names itself as its parent, parents are counted from 1 and 0 is none.
    shift = int(_number(rows.get(1, ""), "parent_frame_id") == 1)
    frame = _number(instruction.attributes.get("metadata", ""), "stack_frame_id")
    while frame in rows:
        location = locations.get(_number(rows[frame], "file_location_id"), "")
        file = module.tables["FileNames"].get(_number(location, "file_name_id"))
        if file:
            yield file, _number(location, "line")
        parent = _number(rows[frame], "parent_frame_id") - shift
        if parent >= frame:
            return
        frame = parent


def _number(text: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", text)
    return int(found[1]) if found else -1


def equation_source(equation: Any) -> str:
    """Returns `file:line` of the user's own code that a jaxpr's equation comes from, or ""."""
    traceback = equation.source_info.traceback
    if traceback is None:
        return ""
    return _users([(frame.file_name, frame.line_num) for frame in traceback.frames])


def argument_path(name: str) -> str:
    """Returns `state/params/head/kernel` for JAX's name `state.params['head']['kernel']`."""
    return re.sub(
        r"\[\\?['\"]?([^'\"\]\\]*)\\?['\"]?\]|\.(\w+)", lambda m: f"/{m[1] or m[2]}", name
    )


def short_name(name: str) -> str:
    """Returns a JAX name without those parts of programs and loops that edits elsewhere change.

    Of `jit(step)/jvp()/while/body/closed_call/dot_general` it is `jvp()/dot_general`.
    """
    parts = name.split("/")
    parts = parts[1:] if parts[0].startswith("jit(") else parts
    return "/".join(part for part in parts if part not in _STEPS) or name
