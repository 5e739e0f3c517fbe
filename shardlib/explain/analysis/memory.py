"""Peak memory of a compiled step on one device, by category.

XLA reports the peak. The buffers alive at the peak and their categories come from the scheduled
text. JAX's instruction names separate the forward pass (`jvp(...)`) from the backward pass
(`transpose(jvp(...))`): buffers that the first writes and the second reads are activations.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardlib.cost.costs import Pass, pass_of
from shardlib.explain.hlo.buffers import Buffer, LiveRanges, live_ranges
from shardlib.explain.hlo.provenance import Phase, came_from
from shardlib.explain.hlo.text import Module, arrays, dims, parse
from shardlib.hardware.capacity import Capacity, capacity

if TYPE_CHECKING:
    from shardlib.explain.aot.compile import CompiledStep

CATEGORIES = (
    *("params", "gradients", "optimizer", "model_state", "batch", "other"),
    *("activations", "temporaries", "outputs", "code"),
)
"""`other`: arguments outside of these categories, such as keys and counters. `activations`: kept
for the backward pass. `outputs`: results that do not reuse an argument's memory."""


@dataclasses.dataclass(frozen=True)
class HeldBuffer:
    """A buffer that is alive at the peak, or several equal ones."""

    bytes: int
    """Size of one buffer."""
    shape: str
    category: str
    opcode: str
    op_name: str
    """JAX name of its first writer, or the path of an argument."""
    source: str
    """`file:line`, or empty."""
    count: int = 1
    model_path: str = ""
    """The part of the model that it comes from, such as `layers[*]/mlp/up`."""
    phase: Phase = ""
    """The pass of a training step that writes it, or empty."""


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Memory of one device, in bytes.

    Attributes:
        peak_bytes: XLA's peak and the code; the categories add up to it.
        categories: Bytes held at the peak for each of `CATEGORIES`.
        capacity: The memory of a device that a program may use; None if unknown.
        largest: The ten largest buffers alive at the peak, with equal ones merged.
        at: Label of the instruction at the peak, such as `layers[*]/mlp/up dot_general (backward)`.
        timeline: Labels of instructions over the schedule, and the bytes alive there.
        live_bytes: The peak by live ranges, which `categories` comes from. The difference to XLA's
            peak counts as temporaries.
    """

    peak_bytes: int
    categories: Mapping[str, int]
    capacity: Capacity | None
    largest: tuple[HeldBuffer, ...]
    at: str
    timeline: tuple[tuple[str, int], ...]
    live_bytes: int

    @property
    def capacity_bytes(self) -> int | None:
        return self.capacity.usable_bytes if self.capacity else None

    @property
    def surplus_bytes(self) -> int:
        """XLA's peak minus the peak by live ranges, which may be negative; 0 if within 1%."""
        surplus = self.peak_bytes - self.categories.get("code", 0) - self.live_bytes
        return surplus if abs(surplus) > self.live_bytes / 100 else 0

    @property
    def fits(self) -> bool:
        """Whether it fits a device; true if the memory of the device is unknown."""
        return self.capacity is None or self.peak_bytes <= self.capacity.usable_bytes

    @property
    def note(self) -> str:
        """The action that the user must take to make it fit, or empty."""
        limit = self.capacity
        if limit is None or not self.fits or limit.default_share_suffices(self.peak_bytes):
            return ""
        return limit.note


def read_memory(step: "CompiledStep", module: Module | None = None) -> MemoryReport:
    """Returns the peak memory of an ahead-of-time compiled step; `module` is its parsed text."""
    chip = step.cluster.chip if step.cluster else None
    module = module or parse(step.text)
    return memory_report(module, step.memory, step.argument_categories(module), capacity(chip))


def memory_report(
    program: Module | str,
    memory: Mapping[str, int],
    arguments: Mapping[int, str],
    limit: Capacity | None = None,
) -> MemoryReport:
    """Returns the peak memory of a program.

    Args:
        program: The scheduled program, as text from `Compiled.as_text()` or parsed by `parse`.
        memory: The values of `Compiled.memory_analysis()`, by name without `_size_in_bytes`. The
            peak is that by live ranges if it has no `peak`.
        arguments: Categories by argument number of the program; missing ones are `other`.
        limit: The capacity of a device.
    """
    module = parse(program) if isinstance(program, str) else program
    ranges = live_ranges(module)
    sides = _sides(ranges, arguments)
    held = [(b, _category(b, arguments, sides)) for b in ranges.alive(ranges.peak)]
    code = memory.get("generated_code", 0)
    peak = memory.get("peak", 0) or ranges.peak_bytes
    totals = Counter(dict.fromkeys(CATEGORIES, 0))
    for buffer, category in held:
        totals[category] += buffer.bytes
    totals["code"] = code
    _settle(totals, peak - ranges.peak_bytes)
    return MemoryReport(
        peak_bytes=peak + code,
        categories=dict(totals),
        capacity=limit,
        largest=_largest(module, held),
        at=ranges.label(ranges.peak) if ranges.schedule else "",
        timeline=ranges.timeline(),
        live_bytes=ranges.peak_bytes,
    )


def _largest(
    module: Module, held: list[tuple[Buffer, str]], most: int = 10
) -> tuple[HeldBuffer, ...]:
    """Returns the largest buffers; buffers of equal size and origin are one."""
    kinds: dict[tuple[object, ...], HeldBuffer] = {}
    for b, category in held:
        shape = (arrays(b.shape) or [b.shape])[0]
        where = came_from(module, *b.made_by)
        key = (b.bytes, shape, category, where._replace(name=where.operation))
        buffer = HeldBuffer(b.bytes, shape, category, b.opcode, where.name, where.source, 0)
        kept = kinds.get(
            key, dataclasses.replace(buffer, model_path=where.model_path, phase=where.phase)
        )
        kinds[key] = dataclasses.replace(kept, count=kept.count + 1)
    return tuple(sorted(kinds.values(), key=lambda kind: -kind.bytes)[:most])


def _settle(totals: Counter[str], difference: int) -> None:
    """Adds the difference between XLA and live ranges to the least certain categories first."""
    for category in ("temporaries", "activations", "gradients", "outputs", "params"):
        change = max(difference, -totals[category])
        totals[category] += change
        difference -= change


def _category(buffer: Buffer, arguments: Mapping[int, str], sides: set[tuple[int, ...]]) -> str:
    if buffer.argument is not None:
        return arguments.get(buffer.argument, "other")
    if buffer.is_output:
        return "outputs"
    writes = {_pass(name) for name in buffer.writers}
    reads = {_pass(name) for name in buffer.readers}
    if _long_dims(buffer.shape) in sides:
        adds_up = any(
            "/while/body/" in name and _pass(name) == "optimizer" for name in buffer.writers
        )
        if "backward" in writes or adds_up:
            return "gradients"
        converts = any(name.endswith("convert_element_type") for name in buffer.writers)
        if converts and "forward" in writes | reads:
            return "params"
    if buffer.opcode.startswith("all-gather") and _is_gathered(_long_dims(buffer.shape), sides):
        return "temporaries"
    return "activations" if "forward" in writes and "backward" in reads else "temporaries"


def _is_gathered(dims: tuple[int, ...], sides: set[tuple[int, ...]]) -> bool:
    """Whether an array is a parameter, or one layer of it, after an all-gather."""
    size = math.prod(dims)
    for of_param in sides:
        for part in (of_param, *(_left_out(of_param, at) for at in range(len(of_param)))):
            shares = math.prod(part)
            common = Counter(dims) & Counter(part)
            if len(part) == len(dims) and common.total() >= len(dims) - 1 and size % shares == 0:
                return True
    return False


def _left_out(dims: tuple[int, ...], at: int) -> tuple[int, ...]:
    return dims[:at] + dims[at + 1 :]


def _pass(op_name: str) -> Pass:
    """Returns the pass of an instruction; recomputation belongs to the backward pass."""
    during = pass_of(op_name)
    return "backward" if during == "recompute" else during


def _sides(ranges: LiveRanges, arguments: Mapping[int, str]) -> set[tuple[int, ...]]:
    """Returns the sorted per-device dims of parameters and of their optimizer statistics."""
    of_params = ("params", "optimizer")
    return {
        _long_dims(b.shape)
        for b in ranges.buffers
        if b.argument is not None and arguments.get(b.argument) in of_params
    } - {()}


def _long_dims(shape: str) -> tuple[int, ...]:
    """Returns the dims of an array that are longer than 1, shortest first."""
    return tuple(sorted(size for size in dims(shape) if size > 1))
