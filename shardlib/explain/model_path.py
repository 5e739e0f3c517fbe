"""Where an operation of a compiled program comes from: its source line and part of the model."""

import re
from typing import NamedTuple

from shardlib.explain.hlo import Instruction, Module
from shardlib.explain.places import is_library, user_source

_PROGRAM = re.compile(r"jit\((.*)\)$")
_TRANSFORMED = re.compile(r"^(?:jvp|transpose|vmap)\((.*)\)$")
_SCOPE = re.compile(r"[A-Za-z]\w*(?:\.\w+)*$")
# What JAX itself puts into names: loops, branches, calls and rematerialisation.
_OWN = frozenset(
    (
        *("while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "remat", "remat2"),
        *("rematted_computation", "shard_map", "custom_jvp_call", "custom_vjp_call", "pjit"),
    )
)


class Place(NamedTuple):
    """Where an operation comes from; see `Collective`. What is not known is empty."""

    op_name: str
    source: str
    model_path: str


def came_from(module: Module, computation: str, instruction: Instruction) -> Place:
    """Returns where an instruction comes from, or else what it is computed from, or what reads
    it."""
    origin = module.origin(computation, instruction)
    # An argument is named by its path and has no source: what reads it tells more.
    for at in (origin, *module.readers(computation, instruction)):
        if source := user_source(module, at):
            return Place(origin.op_name, source, model_path(module, at))
    return Place(origin.op_name, "", model_path(module, origin))


def model_path(module: Module, instruction: Instruction) -> str:
    """Returns the part of the model that an operation is of, outermost first; empty for none.

    The stack that it was traced on tells the classes whose methods called each other, such as
    `Transformer/Block/MLP`. Where the program has no stacks it is the named scopes of its JAX name,
    such as `layers_0/attention`, as modules of Linen leave them.
    """
    return "/".join(_classes(module, instruction) or _scopes(instruction.op_name))


def _classes(module: Module, instruction: Instruction) -> list[str]:
    """The classes of the user's own methods, between the traced function and the operation."""
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
