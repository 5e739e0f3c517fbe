"""FLOPs of a traced step, by stage of training.

Matmuls, convolutions and ragged matmuls are counted, with two FLOPs per multiply-add. A loop of
known length counts every iteration, a conditional its most expensive branch, and a manual region
all its devices. Elementwise operations are not counted, as in all published conventions (see
`shardlib.cost.transformer.flops`).

model     The loss and its gradients, without recomputation in the backward pass (`jax.checkpoint`).
          This is 6 FLOPs per weight and token, plus attention over the pairs of positions that the
          implementation computes (Kaplan et al. 2020; Chowdhery et al. 2022, "PaLM", appendix B).
hardware  Model FLOPs, plus recomputation and the matmuls of an optimizer such as Muon (Korthikanti
          et al. 2022, appendix A).

Fused attention that is one operation in JAX has a formula: two matmuls forward, four backward, and
one recomputed (Dao 2023, "FlashAttention-2", section 2.3.2). A Pallas kernel counts every cell of
its grid, including cells that a mask lets it skip.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Literal

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from shardlib.cost.costs import Pass, pass_of, undifferentiated
from shardlib.cost.traced.layout import Equation
from shardlib.cost.traced.products import RAGGED, matmul_flops
from shardlib.explain.analysis.equations import (
    arriving_rows,
    equations,
    joined,
    manual_devices,
    trips,
)
from shardlib.jaxprs import subprograms

Stage = Pass | Literal["head"]
STAGES: tuple[Stage, ...] = ("forward", "recompute", "backward", "head", "optimizer")
_FUSED_FORWARD, _FUSED_BACKWARD, _FUSED_AGAIN = 2, 4, 1


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one step over all devices.

    Attributes:
        model: Model FLOPs by stage, without recomputation and the optimizer.
        hardware: Hardware FLOPs by stage, with both.
        uncounted: Execution counts of kernels with unknown FLOPs, by name.
        uncounted_loops: Number of loops of unknown length, which count one iteration.
        ragged: Number of ragged matmuls that count all rows, filled or not.
        by_dtype: Hardware FLOPs by stage, and by the dtype of the operands.
    """

    model: Mapping[Stage, float]
    hardware: Mapping[Stage, float]
    uncounted: Mapping[str, int]
    uncounted_loops: int = 0
    ragged: int = 0
    by_dtype: Mapping[Stage, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def total_model(self) -> float:
        """Model FLOPs of the step."""
        return sum(self.model.values())

    @property
    def total_hardware(self) -> float:
        """Hardware FLOPs of the step."""
        return sum(self.hardware.values())


class _Count:
    """Running totals, by which branches are compared."""

    def __init__(self) -> None:
        self.model: dict[Stage, float] = collections.defaultdict(float)
        self.hardware: dict[Stage, float] = collections.defaultdict(float)
        self.uncounted: dict[str, int] = collections.Counter()
        self.by_dtype: dict[tuple[Stage, str], float] = collections.defaultdict(float)
        self.loops = 0
        self.ragged = 0
        self.matmuls = 0

    def add(self, other: "_Count", times: int = 1) -> None:
        for name in ("model", "hardware", "uncounted", "by_dtype"):
            mine = getattr(self, name)
            for key, count in getattr(other, name).items():
                mine[key] += count * times
        self.loops += other.loops
        self.ragged += other.ragged
        self.matmuls += other.matmuls

    @property
    def total(self) -> float:
        return sum(self.hardware.values())


@dataclasses.dataclass(frozen=True)
class _About:
    """Facts about a whole program."""

    vocabularies: frozenset[int]
    arriving: Mapping[int, int]
    """The mean rows that arrive, by the rows of the receive buffer."""
    outside: Pass
    """The pass of operations that are not differentiated."""


def count_flops(jaxpr: ClosedJaxpr | Jaxpr, vocabularies: Collection[int] = ()) -> Flops:
    """Returns the FLOPs of a traced step. A matmul with a dim of the size of a vocabulary belongs
    to the head."""
    outside = undifferentiated(placed.name for placed in equations(jaxpr))
    about = _About(frozenset(vocabularies), arriving_rows(jaxpr), outside)
    program = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    count = _program(program, "", about)
    uncounted, by_dtype = dict(count.uncounted), dict[Stage, dict[str, float]]()
    for (stage, dtype), flops in count.by_dtype.items():
        by_dtype.setdefault(stage, {})[dtype] = flops
    return Flops(count.model, count.hardware, uncounted, count.loops, count.ragged, by_dtype)


def _program(jaxpr: Jaxpr, name: str, about: _About) -> _Count:
    count = _Count()
    for equation in jaxpr.eqns:
        count.add(_equation(equation, joined(name, equation), about))
    return count


def _equation(equation: JaxprEqn, name: str, about: _About) -> _Count:
    count = _Count()
    flops = matmul_flops(equation)
    if flops is not None:
        _add_matmul(count, equation, flops, name, about)
        return count
    if fused := _fused(equation):
        stage = pass_of(name, about.outside)
        _add_fused(count, *fused, stage)
        count.by_dtype[stage, _dtype(equation)] += count.total
        return count
    kernel = equation.primitive.name
    programs = list(subprograms(equation))
    if not programs and ("custom_call" in kernel or kernel in ("ffi_call", "triton_kernel_call")):
        count.uncounted[str(equation.params.get("target_name", kernel))] += 1
        return count
    turns, is_known = trips(equation)
    inside = [_program(program, name, about) for program in programs]
    if kernel == "cond":
        inside = [max(inside, key=lambda branch: branch.total)] if inside else []
    for one in inside:
        kept = _kept_share(equation, one)
        one.model = {stage: flops * kept for stage, flops in one.model.items()}
        count.add(one, turns * manual_devices(equation))
    if not is_known and any(one.total for one in inside):
        count.loops += 1
    return count


def _add_matmul(count: _Count, equation: Equation, flops: float, name: str, about: _About) -> None:
    if equation.primitive.name in RAGGED:
        rows = equation.invars[0].aval.shape[0]
        flops *= about.arriving.get(rows, rows) / max(rows, 1)
        count.ragged += rows not in about.arriving
    shapes = (v.aval.shape for v in (*equation.invars, *equation.outvars))
    sizes = {size for shape in shapes for size in shape}
    stage: Stage = pass_of(name, about.outside)
    kept = 0.0 if stage in ("recompute", "optimizer") else flops
    stage = "head" if about.vocabularies & sizes else stage
    count.hardware[stage] += flops
    count.by_dtype[stage, _dtype(equation)] += flops
    if kept:
        count.model[stage] += kept
    count.matmuls += 1


def _dtype(equation: Equation) -> str:
    """Returns the wider dtype of the two operands."""
    dtypes = [variable.aval.dtype for variable in equation.invars[:2]]
    return str(max(dtypes, key=lambda dtype: dtype.itemsize))


def _add_fused(count: _Count, forward: float, is_backward: bool, stage: Stage) -> None:
    """Adds attention by its formula; `forward` is its forward FLOPs."""
    model = _FUSED_BACKWARD if is_backward else _FUSED_FORWARD
    hardware = model + (_FUSED_AGAIN if is_backward else 0)
    count.hardware[stage] += forward / _FUSED_FORWARD * hardware
    count.model[stage] += 0.0 if stage == "recompute" else forward / _FUSED_FORWARD * model


def _kept_share(equation: Equation, inside: _Count) -> float:
    """Returns the share of a kernel's FLOPs that are model FLOPs; the rest is recomputation.

    A backward kernel of attention computes the scores and their gradient before the gradients of
    its operands. A kernel for keys and values keeps 2 matmuls of 4, a kernel for queries 2 of 3,
    and a kernel for all three 4 of 5 (Dao 2023, "FlashAttention-2", algorithm 2).
    """
    if equation.primitive.name != "pallas_call":
        return 1.0
    name = str(equation.params.get("name") or equation.params.get("name_and_src_info") or "")
    if not re.search(r"flash|splash|mha|attention", name):
        return 1.0
    if "dkv" in name:
        return 4 / 5 if inside.matmuls == 5 else 2 / 4
    return 2 / 3 if "dq" in name else 1.0


def _fused(equation: Equation) -> tuple[float, bool] | None:
    """Returns the forward FLOPs of a fused attention over all pairs, and whether it is backward.

    Any other operation gives None.
    """
    name = equation.primitive.name
    if not re.match(r"dot_product_attention_(fwd|bwd)", name):
        return None
    query, key = equation.invars[0].aval.shape, equation.invars[1].aval.shape
    layout = equation.params.get("layout")
    heads_first = getattr(layout, "name", str(layout)) in ("BNTH", "1")
    length = key[2] if heads_first else key[1]
    return 4.0 * math.prod(query) * length, "bwd" in name
