"""Stages of a pipeline: whether the layers of a model can be cut into them, and the rule for it.

Each stage holds and runs its layers on its part of the mesh, under the rules of the integer program
for that part.
"""

import dataclasses
from collections.abc import Sequence, Set

from shardlib.find.axes import MOVE, SLICE
from shardlib.find.equivalence import Classes
from shardlib.find.problem import Solution
from shardlib.nn.staged import MetStack
from shardlib.nn.stages import layer_faults
from shardlib.plan.problem import worth_cutting
from shardlib.rules.resolve import STAGE

_FIX = "\n  Make all layers with stack_layers and run them with scan_layers, or leave stage out."


@dataclasses.dataclass(frozen=True)
class FoundStages:
    """The stack of layers of a model, if it has exactly one."""

    stacks: tuple[MetStack, ...]
    """All stacks that the loss runs."""
    params: frozenset[int]
    """The tensor classes of stacked parameters."""
    axes: frozenset[int]
    """The axes of their layers."""
    updates: tuple[str, ...]
    """Faults of losses that update model state, or read the layers outside of their loop."""
    part_of_flops: float
    """Part of the products of the model that the layers compute, at least."""

    def faults(self, stages: int) -> Sequence[str]:
        """Returns why the layers cannot be cut into a number of stages, each with its fix."""
        if len(self.stacks) != 1:
            calls = f"calls it {len(self.stacks)} times" if self.stacks else "does not call it"
            return [
                f"a pipeline divides the layers of one scan_layers, and the loss {calls}.{_FIX}"
            ]
        if len(self.axes) != 1:
            return [
                f"{len(self.axes) or 'no'} loops of the loss run stacked parameters, and stages "
                "are found for one: ranges of remat and other stacks are left out.\n"
                "  Give all layers one policy in one stack, or leave stage out."
            ]
        (stack,) = self.stacks
        return [*self.updates, *stack.faults, *layer_faults(stack.num_layers, stages)]

    def is_worth(self, stages: int) -> bool:
        """Returns whether a number of stages leaves few slots for layers idle."""
        return not self.faults(stages) and worth_cutting(self.stacks[0].num_layers, stages)

    @property
    def carry_bytes(self) -> int:
        """Bytes that pass from layer to layer, of the whole batch."""
        return self.stacks[0].carry_bytes

    def with_rule(self, solution: Solution, classes: Classes) -> Solution:
        """Returns a solution in which `stage` cuts the layers."""
        layouts, rules = dict(solution.layouts), dict(solution.rules)
        for number in self.params & layouts.keys():
            layouts[number] = ((STAGE,), *layouts[number][1:])
            rules |= {name: (STAGE,) for name in classes.tensors[number].names[:1] if name}
        return dataclasses.replace(solution, layouts=layouts, rules=rules)


def stages_of(classes: Classes, stacks: Sequence[MetStack], updated: Sequence[str]) -> FoundStages:
    """Returns the stack of layers of a model, for the stacks that its loss runs and the paths of
    the model state that it updates."""
    params = frozenset(
        number
        for number, tensor in enumerate(classes.tensors)
        if tensor.kind == "param" and tensor.axes and classes.axes[tensor.axes[0]].is_layers
    )
    axes = frozenset(classes.tensors[number].axes[0] for number in params)
    trips = max((stack.num_layers for stack in stacks), default=0)
    total = in_layers = 0.0
    for operation in classes.operations:
        flops = operation.factors.flops * operation.times
        total += flops
        # Another loop, such as one over chunks of the loss, reads parameters of its own.
        reads = (edge.tensor for edge in operation.operands)
        others = any(classes.tensors[number].copies and number not in params for number in reads)
        in_layers += flops if operation.times >= trips and not others else 0.0
    part = in_layers / total if total else 0.0
    faults = _faults(classes, params, updated)
    return FoundStages(tuple(stacks), params, axes, faults, part)


def _faults(classes: Classes, params: Set[int], updated: Sequence[str]) -> tuple[str, ...]:
    faults = []
    if updated:
        faults.append(
            f"the model updates variables when it is called: {', '.join(updated[:4])}.\n"
            "  Use a model without running statistics, or leave stage out."
        )
    outside = {
        operation.name
        for operation in classes.operations
        if operation.name not in (SLICE, MOVE)
        for edge in operation.operands
        if edge.tensor in params
    }
    if outside:
        faults.append(
            "the loss reads variables of the stacked layers outside of scan_layers "
            f"({', '.join(sorted(outside))}).\n"
            "  Read them only inside the layers, or leave stage out."
        )
    return tuple(faults)
