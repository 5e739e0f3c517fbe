"""Origin of an operation of a compiled program: its source line and part of the model."""

import re
from typing import NamedTuple

from shardlib.explain.hlo.places import is_library, user_source
from shardlib.explain.hlo.text import Instruction, Module

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


class Place(NamedTuple):
    """Origin of an operation; see `Collective`. Unknown fields are empty."""

    op_name: str
    source: str
    model_path: str


def came_from(module: Module, computation: str, instruction: Instruction) -> Place:
    """Returns the origin of an instruction, else of its nearest operand or reader with one."""
    origin = module.origin(computation, instruction)
    # An argument has a path for a name and no source, so its readers are tried.
    for at in (origin, *module.readers(computation, instruction)):
        if source := user_source(module, at):
            return Place(origin.op_name, source, model_path(module, at))
    return Place(origin.op_name, "", model_path(module, origin))


def model_path(module: Module, instruction: Instruction) -> str:
    """Returns the part of the model that an operation belongs to, outermost first, or "".

    The trace stack gives the classes whose methods called each other, such as
    `Transformer/Block/MLP`. Without stacks, the named scopes of the JAX name are used, such as
    `layers_0/attention`, which Linen modules set.
    """
    return "/".join(_classes(module, instruction) or _scopes(instruction.op_name))


def _classes(module: Module, instruction: Instruction) -> list[str]:
    """Returns the classes of the user's methods between the traced function and the operation."""
    traced = _PROGRAM.match(instruction.op_name.partition("/")[0])
    outside = module.stacks.outside(traced[1] if traced else "")
    found: list[str] = []
    for frame in module.frames(instruction):
        if frame.number not in outside and not is_library(frame.file):
            parts = reversed(frame.function.split(".<locals>."))
            found += (part.split(".")[-2] for part in parts if "." in part)
    return list(dict.fromkeys(reversed(found)))


def _scopes(name: str) -> list[str]:
    found = []
    for part in name.split("/")[1:-1]:
        while transformed := _TRANSFORMED.match(part):
            part = transformed[1]
        if _SCOPE.match(part) and part not in _OWN and not part.startswith("branch_"):
            found.append(part)
    return found
