"""Stages of a pipeline: whether the layers of a model can be cut into them, and the rule for it.

Each stage holds and runs an equal part of the layers on its part of the mesh, under the rules of
the integer program for that part.
"""

import dataclasses
from collections.abc import Sequence

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
    part_of_flops: float
    """Part of the products of the model that the layers compute, at least."""

    def faults(self, stages: int) -> Sequence[str]:
        """Returns why the layers cannot be cut into a number of stages, each with its fix."""
        if len(self.stacks) != 1:
            calls = f"calls it {len(self.stacks)} times" if self.stacks else "does not call it"
            return [
                f"a pipeline divides the layers of one scan_layers, and the loss {calls}.{_FIX}"
            ]
        if len(self.axes) > 1:
            return [f"a pipeline divides one stack of layers, and other loops run more.{_FIX}"]
        (stack,) = self.stacks
        return [*stack.faults, *layer_faults(stack.num_layers, stages)]

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


def stages_of(classes: Classes, stacks: Sequence[MetStack]) -> FoundStages:
    """Returns the stack of layers of a model, for the stacks that its loss runs."""
    params = frozenset(
        number
        for number, tensor in enumerate(classes.tensors)
        if tensor.kind == "param" and tensor.axes and classes.axes[tensor.axes[0]].is_layers
    )
    axes = frozenset(classes.tensors[number].axes[0] for number in params)
    trips = max((stack.num_layers for stack in stacks), default=0)
    flops = [(op.factors.flops * op.times, op.times >= trips) for op in classes.operations]
    total = sum(each for each, _ in flops)
    part = sum(each for each, in_layers in flops if in_layers) / total if total else 0.0
    return FoundStages(tuple(stacks), params, axes, part)
