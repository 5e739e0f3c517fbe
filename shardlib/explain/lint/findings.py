"""What a check finds, and the codes that tell findings apart."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardlib.explain.wrong_numbers import FAULTS

CODES: Mapping[str, str] = {
    "SL101": "a leaf is replicated by accident",
    "SL102": "the batch is whole on every device",
    "SL103": "logits are gathered",
    "SL104": "a tensor is gathered and cut again: involuntary full rematerialization",
    "SL105": "a dim is padded to the tile",
    "SL201": "a tensor changes its sharding though no rule asks for it",
    "SL202": "a collective is repeated though its operand never changes",
    "SL203": "communication follows no mesh axis",
    "SL204": "a mesh axis of fast collectives leaves the fast domain",
    **FAULTS,
    "SL301": "a donated buffer is not reused",
    "SL302": "a state is not donated",
    "SL401": "float32 travels where bfloat16 is computed",
    "SL402": "float32 is multiplied where bfloat16 is computed",
    "SL501": "the host takes part in the step",
    "SL502": "layers are unrolled",
    "SL503": "the trips of a loop are not known",
}
"""Titles by code. The hundreds stand for sharding, communication, memory, precision, program."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """From what size on a finding is worth telling; bytes on one device."""

    replicated_bytes: int = 2**20
    """Of a leaf that is more replicated than need be."""
    activation_bytes: int = 2**20
    """Of an activation that is gathered or changes its sharding, in one execution."""
    traffic_bytes: int = 2**20
    """Of a repeated, a strange or a float32 collective, in all its executions in a step."""
    unread_share: float = 0.01
    """Of all traffic that may follow no mesh axis."""
    donated_bytes: int = 2**20
    """Of state that is held twice."""
    padding_waste: float = 0.15
    """Share that padding may add to a matmul."""
    flops_share: float = 0.02
    """Of all matmuls of the step that may be wasted, or be in float32."""
    unrolled: int = 12
    """Matmuls of equal shapes out of one line, forward, that stand for unrolled layers."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault of a compiled step.

    Attributes:
        code: A key of `CODES`.
        place: What it is about: path of a parameter, name of an operation or a mesh axis. It is the
            same after an edit elsewhere in the file, so that a baseline can hold it.
        message: What is wrong: the thing, its shape and its bytes; and what was expected.
        fix: One action that mends it.
        source: `file:line` of the user's code, or empty.
        op_name: The JAX name of the operation, such as `jit(step)/while/body/dot_general`.
        bytes: Bytes on one device that are wasted in a step: held or sent; 0 where none are.
    """

    code: str
    place: str
    message: str
    fix: str
    source: str = ""
    op_name: str = ""
    bytes: float = 0.0

    @property
    def title(self) -> str:
        """What all findings of the code have in common."""
        return CODES[self.code]

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        return f"{where}{self.code} {self.message}\n  {self.fix}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the finding as plain data for JSON."""
        return {**dataclasses.asdict(self), "title": self.title}
