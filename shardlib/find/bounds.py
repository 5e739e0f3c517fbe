"""A lower bound of the seconds of a step on a mesh, from one linear program."""

import dataclasses

from shardlib.find.context import CONTEXT
from shardlib.find.problem import LayoutProblem
from shardlib.find.program import Part, Relaxation


@dataclasses.dataclass(frozen=True)
class MeshBound:
    """Seconds that a mesh adds to the time of a step on one device, divided by the devices.

    It is a lower bound of the integer programs of the mesh: for moves, and for products that the
    mesh cannot cut, without a limit of memory. A limit leaves fewer layouts, and layers that are
    computed again repeat products and moves. Passes do not count. A mesh with more `data` or `fsdp`
    cuts rows as one that cuts them over `tensor` as well.
    """

    relaxation: Relaxation
    product_seconds: float
    stages: int
    sums_once: bool
    """Whether gradients may be summed once a step, as over `data` and `context`, and not in each
    microbatch."""

    @classmethod
    def of(cls, problem: LayoutProblem) -> "MeshBound":
        """Returns the bound by the program of a step of one microbatch without a limit."""
        once = not {"data", CONTEXT}.isdisjoint(problem.network.axes)
        stages = problem.objective.stages
        return cls(problem.relaxed(), problem.product_seconds, stages, once)

    def extra_seconds(self, microbatches: int) -> float:
        """Returns the seconds of a step with so many microbatches, with any recomputation."""
        # Whole parameters (`zero2`) are gathered once a step, and their gradients scattered in each
        # microbatch: half of a sum, which is a scatter and a gather.
        repeated = 1.0 if self.sums_once else (microbatches + 1) / 2
        times: dict[Part, float] = {"products": 1, "parameters": repeated, "activations": 1}
        least = self.relaxation.least_seconds(times)
        return max(least - self.product_seconds, 0.0) / self.stages
