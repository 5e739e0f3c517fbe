"""Findings of the checks, their codes and their limits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardlib.explain.hlo.provenance import Phase, Where
from shardlib.explain.wrong_numbers import FAULTS

CODES: Mapping[str, str] = {
    "SL101": "a leaf is replicated by accident",
    "SL102": "the batch is whole on every device",
    "SL103": "logits are gathered",
    "SL104": "a tensor is gathered and sharded again: involuntary full rematerialization",
    "SL105": "a dim is padded to the tile",
    "SL201": "a tensor is resharded, but no rule asks for it",
    "SL202": "a collective is repeated, but its operand never changes",
    "SL203": "communication follows no mesh axis",
    "SL204": "a mesh axis of fast collectives leaves the fast domain",
    **FAULTS,
    "SL301": "a donated buffer is not reused",
    "SL302": "a state is not donated",
    "SL401": "float32 is sent in a step of bfloat16 matmuls",
    "SL402": "float32 is multiplied in a step of bfloat16 matmuls",
    "SL501": "the step waits for the host",
    "SL502": "layers are unrolled",
    "SL503": "the trip count of a loop is unknown",
}
"""Titles by code. The hundreds are sharding, communication, memory, precision and structure."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The smallest sizes that are reported. Bytes are per device."""

    replicated_bytes: int = 2**20
    """Bytes of a leaf that is more replicated than necessary."""
    activation_bytes: int = 2**20
    """Bytes of an activation that is gathered or resharded, in one execution."""
    traffic_bytes: int = 2**20
    """Bytes sent by a repeated collective, or by all unattributed ones, in a step."""
    unread_share: float = 0.01
    """Share of all traffic that follows no mesh axis."""
    donated_bytes: int = 2**20
    """Bytes of state that is held twice."""
    padding_waste: float = 0.15
    """Share that padding adds to a matmul."""
    flops_share: float = 0.02
    """Share of the step's matmul FLOPs that is wasted or in float32."""
    unrolled: int = 12
    """Forward matmuls of equal shapes from one line that count as unrolled layers."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault of a compiled step.

    Attributes:
        code: A key of `CODES`.
        place: Path of a parameter, name of an operation or a mesh axis. It does not change with
            edits elsewhere in the file, so a baseline can hold it.
        message: The fault: the array or operation, its shape, its bytes and the expectation.
        fix: One action that removes the fault.
        source: `file:line` of the user's code, or empty.
        op_name: JAX name of the operation, such as `jit(step)/while/body/dot_general`.
        bytes: Bytes that one device wastes in a step, held or sent. 0 if no bytes are wasted.
        model_path, phase: Part of the model and pass of the operation, as in `provenance`; empty
            if unknown.
    """

    code: str
    place: str
    message: str
    fix: str
    source: str = ""
    op_name: str = ""
    bytes: float = 0.0
    model_path: str = ""
    phase: Phase = ""

    @classmethod
    def at(
        cls,
        code: str,
        where: Where,
        message: str,
        fix: str,
        bytes: float = 0.0,
        *,
        otherwise: str = "",
    ) -> "Finding":
        """Returns a finding at an operation; `otherwise` names an operation without a JAX name."""
        return cls(code, where.place(otherwise), message, fix, where.source, where.name, bytes)

    @property
    def title(self) -> str:
        """The title of the code, the same for all its findings."""
        return CODES[self.code]

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        phase = f" ({self.phase})" if self.phase else ""
        part = f" in {self.model_path}{phase}:" if self.model_path else ""
        return f"{where}{self.code}{part} {self.message}\n  {self.fix}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the finding as plain data for JSON."""
        return {**dataclasses.asdict(self), "title": self.title}
