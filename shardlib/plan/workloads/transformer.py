"""Transformers by their dims, as workloads of the search."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from shardlib.cost import pricing
from shardlib.cost.costs import Memory, StepTime
from shardlib.cost.layout import AXES, SHARDLIB, Layout, Software, divisors
from shardlib.cost.machine import fabric
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.rates import Rates, rates_on
from shardlib.cost.transformer import communication, memory, step_time
from shardlib.cost.transformer.flops import step_flops
from shardlib.cost.workload import DOTS, FULL, NONE, Job, Remat
from shardlib.hardware import Cluster
from shardlib.plan.problem import Choice, MomentDtype, worth_cutting

_QKV, _OUT, _INPUT = "query,key,value", "attention_out", "layer_in"
POLICIES: dict[str, Remat] = {
    "none": NONE,
    "dots": DOTS,
    f"save:{_QKV},{_OUT}": Remat(frozenset(("qkv", "out"))),
    f"save:{_QKV}": Remat(frozenset(("qkv",))),
    f"offload:{_QKV},{_OUT}": Remat(frozenset(("qkv", "out")), frozenset(("qkv", "out"))),
    f"offload:{_INPUT},{_QKV},{_OUT}": Remat(
        frozenset(("qkv", "out")), frozenset(("input", "qkv", "out"))
    ),
    f"offload:{_QKV}": Remat(frozenset(("qkv",)), frozenset(("qkv",))),
    "full": FULL,
    f"offload:{_INPUT}": Remat(frozenset(), frozenset(("input",))),
}
"""Policies of `shardlib.nn.remat` worth trying, from the least recomputation to the most; the last
takes the least memory. All except `none` and `dots` recompute fused attention."""
_DENSE_DOTS = DOTS.kept - {"up", "down"}
"""Residuals that `dots` keeps in layers with routed experts, whose matmuls are of another kind."""
_LOSS_CHUNKS = (1, 8)
_FEW_LAYERS = 2
"""Number of layers up to which a device takes less memory when it keeps everything than when it
recomputes a layer."""
_MOMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class TransformerWorkload:
    """Training step of a transformer; a `Workload`."""

    job: Job
    """Fixed part of the job. Its remat policy varies, and so do its moments as `moments` allows."""
    policies: Collection[str] = tuple(POLICIES)
    """Names among `POLICIES`."""
    moments: tuple[MomentDtype, ...] = ("float32",)
    """Dtypes in which the optimizer may store its first moment."""
    loss_chunks: tuple[int, ...] = _LOSS_CHUNKS
    zero: tuple[Literal[1, 2, 3], ...] = (3, 2, 1)
    sequence_parallel: bool | None = None
    """Sequence parallelism; None uses it wherever it divides the length."""
    offload_optimizer: tuple[bool, ...] = (False, True)
    """Whether the optimizer state may, or must, be offloaded to host memory."""
    dropout: bool = False
    software: Software = SHARDLIB
    constants: Mapping[str, float] = dataclasses.field(default_factory=committed, hash=False)

    @property
    def batch(self) -> int:
        """Sequences per step, over all devices."""
        return self.job.batch

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.job.tokens

    @property
    def unit(self) -> str:
        """Unit of `tokens`."""
        return "tokens"

    @property
    def flops(self) -> float:
        """Model FLOPs per step, with attention under the mask of the model."""
        return step_flops(self.job, "causal" if self.job.causal else "full")

    def with_batch(self, batch: int) -> "TransformerWorkload":
        """Returns the workload with another number of sequences per step."""
        return dataclasses.replace(self, job=dataclasses.replace(self.job, batch=batch))

    def relaxed(self) -> "TransformerWorkload":
        """Returns the workload with the first moment in bfloat16 among the choices."""
        if self.job.moment_bytes < _MOMENT_BYTES["float32"] or "bfloat16" in self.moments:
            return self
        return dataclasses.replace(self, moments=(*self.moments, "bfloat16"))

    @property
    def num_layers(self) -> int:
        """Layers that may follow different policies."""
        return self.job.model.layers

    def degrees(self, axis: str, most: int) -> Sequence[int]:
        """Returns the degrees, up to `most`, that a mesh axis may have by itself."""
        if axis == "stage":
            numbers = range(1, min(most, self.num_layers) + 1)
            return [n for n in numbers if worth_cutting(self.num_layers, n)]
        numbers = [size for size, _ in self._divided(axis)]
        if axis in ("data", "fsdp", "expert"):
            numbers.append(self.batch)
        if axis == "expert" and self.job.model.experts is None:
            return (1,)
        return [n for n in divisors(math.gcd(*numbers)) if n <= most]

    def variants(self, layout: Layout, cluster: Cluster) -> Sequence[Layout]:
        """Returns the ways to use the axes of a layout that the rules can express, and the hosts of
        a cluster."""
        shared = layout.tensor > 1 and self._shares_residual(layout)
        uncut = shared and self.job.length % (layout.context * layout.tensor)
        if uncut or self._stage_faults(layout):
            return []  # The rules cannot be satisfied.
        stages: tuple[Literal[1, 2, 3], ...] = self.zero if layout.fsdp > 1 else (3,)
        apart = self.job.moment_bytes and pricing.host_link(cluster) is not None
        return [
            dataclasses.replace(
                layout, zero=zero, sequence_parallel=shared, offload_optimizer=offloaded
            )
            for offloaded in (self.offload_optimizer if apart else (False,))
            for zero in stages
        ]

    def faults(self, layout: Layout) -> list[str]:
        """Returns the reasons why a layout cannot run, as sentences."""
        reasons = [
            f"{axis}={layout.size(axis)} does not divide {what}"
            for axis in ("fsdp", "expert", "context", "tensor")
            for size, what in self._divided(axis)
            if layout.size(axis) > 1 and size % layout.size(axis)
        ]
        reasons += self._stage_faults(layout)
        if layout.expert > 1 and self.job.model.experts is None:
            reasons.append(f"expert={layout.expert}: the model has no experts")
        if self.batch % layout.batch_shards:
            reasons.append(
                f"data x fsdp x expert = {layout.batch_shards} does not divide the {self.batch} "
                "sequences of a batch"
            )
        return reasons

    def sums_once(self, layout: Layout) -> bool:
        """Returns whether a step sums gradients over `data` once by default. One with dropout does
        not: its rows draw from one stream of random numbers."""
        return not self.dropout and communication.sums_once(self.job.model, layout)

    def choices(self, layout: Layout, cluster: Cluster) -> Sequence[Choice]:
        """Returns the choices for a layout."""
        pieces = layout.stage * layout.chunks
        # Ranges of layers repeat from chunk to chunk, which therefore hold equally many.
        whole = self.num_layers % pieces > 0
        known = self._policies(cluster)
        policies: list[tuple[str, int | None]] = [
            (policy, None if policy == "none" or whole else self.num_layers // pieces)
            for policy in known
        ]
        if not whole and step_time.copies_into_stacks(cluster, self.software):
            # The time is nearly linear in the number of layers: the least that fit, or all.
            policies += [
                (policy, None)
                for policy in known
                if policy != "none" and not POLICIES[policy].offloaded
            ]
        return [
            Choice(policy, layers, moments, count, pieces if layers else 1)
            for moments in self.moments
            for count in self.loss_chunks
            for policy, layers in policies
        ]

    def lean_choices(self, layout: Layout, cluster: Cluster) -> Sequence[Choice]:
        """Returns choices of which one takes the least memory."""
        options = self._policies(cluster)
        moments = "bfloat16" if "bfloat16" in self.moments else self.moments[0]
        # Recomputation holds one more layer, which matters most with few layers. A loss in chunks
        # holds a sum of gradients in float32, a loss in one piece holds the logits.
        few = self.num_layers <= _FEW_LAYERS * layout.stage * layout.chunks
        policies: list[tuple[str, int | None]] = [(options[-1], None)]
        if few and options[0] != options[-1]:
            policies.append((options[0], None))
        if layout.stage == 1 and self.num_layers > 1 and options[-1] != "none":
            # A last layer that keeps everything is in no loop, and may hold less than in one.
            policies.append((options[-1], self.num_layers - 1))
        return [
            Choice(policy, layers=layers, moments=moments, loss_chunks=count)
            for policy, layers in policies
            for count in self.loss_chunks
        ]

    def memory(self, layout: Layout, choice: Choice, cluster: Cluster) -> Memory:
        """Returns the memory of one device at the peak."""
        job = self.chosen(choice)
        return memory.peak_memory(job, layout, cluster, self.software, dropout=self.dropout)

    def time(self, layout: Layout, choice: Choice, cluster: Cluster) -> StepTime:
        """Returns the seconds of a step."""
        machine = self._machine(layout, cluster)
        return pricing.step_time(step_time.costs(self.chosen(choice), machine), machine)

    def bound(self, layout: Layout, cluster: Cluster, most_microbatches: int) -> float:
        """Returns a lower bound of the seconds with any choice; see `pricing.least_time`."""
        machine = self._machine(layout, cluster)
        costs = step_time.costs(self._lightest, machine, keeping=False)
        return pricing.least_time(costs, machine, most_microbatches)

    def chosen(self, choice: Choice) -> Job:
        """Returns the job under a choice."""
        return self._jobs(choice)

    @functools.cached_property
    def _lightest(self) -> Job:
        moments = min(self.moments, key=_MOMENT_BYTES.__getitem__)
        return self.chosen(Choice("none", moments=moments))

    @functools.cached_property
    def _jobs(self) -> Callable[[Choice], Job]:
        return functools.lru_cache(4096)(self._job)

    def _job(self, choice: Choice) -> Job:
        remat = POLICIES[choice.remat]
        if choice.remat == "dots" and self.job.model.experts:
            remat = Remat(_DENSE_DOTS)
        moment = self.job.moment_bytes
        if choice.moments != self.moments[0]:
            moment += _MOMENT_BYTES[choice.moments] - _MOMENT_BYTES[self.moments[0]]
        return dataclasses.replace(
            self.job,
            remat=remat,
            remat_layers=None if choice.remat == "none" else choice.num_layers,
            moment_bytes=moment,
            loss_chunks=choice.loss_chunks,
        )

    def _policies(self, cluster: Cluster) -> list[str]:
        """Returns the policies that the devices of a cluster can use, in the order of
        `POLICIES`."""
        has_host = pricing.host_link(cluster) is not None
        known = [name for name in POLICIES if name in self.policies]
        return [name for name in known if has_host or not POLICIES[name].offloaded] or known

    def _machine(self, layout: Layout, cluster: Cluster) -> pricing.Machine:
        software = step_time.software_for(self.job, layout, cluster, self.software)
        links_of = self._links(layout, cluster)
        return pricing.Machine(layout, software, cluster, self._rates(cluster), links_of)

    @functools.cached_property
    def _rates(self) -> Callable[[Cluster], Rates]:
        @functools.lru_cache(64)
        def found(cluster: Cluster) -> Rates:
            return rates_on(cluster, self.job.precision, self.constants)

        return found

    @functools.cached_property
    def _known_links(self) -> dict[object, pricing.LinksOf]:
        return {}

    def _links(self, layout: Layout, cluster: Cluster) -> pricing.LinksOf:
        key = (cluster.name, layout.slices, *(layout.size(axis) for axis in AXES))
        if key not in self._known_links:
            rail = self.software.single_rail
            links = fabric.links(cluster, layout, self.constants, single_rail=rail)
            self._known_links[key] = pricing.by_axis(links, cluster)
        return self._known_links[key]

    def _shares_residual(self, layout: Layout) -> bool:
        divides = self.job.length % (layout.context * layout.tensor) == 0
        return divides if self.sequence_parallel is None else self.sequence_parallel

    def _stage_faults(self, layout: Layout) -> list[str]:
        """Returns the reasons why a layout cannot cut the layers into stages."""
        layers, embed, stage = self.num_layers, self.job.model.embed, layout.stage
        if stage > layers:
            return [f"stage={stage} exceeds the {layers} layers"]
        if layers % stage and embed % (stage * layout.fsdp):
            # The state of such layers is cut along another dim.
            return [
                f"stage={stage} divides neither the {layers} layers nor the embedding of {embed} "
                f"on fsdp={layout.fsdp}"
            ]
        return []

    def _divided(self, axis: str) -> list[tuple[int, str]]:
        """Returns the dims that an axis shards, each with its description."""
        model, experts = self.job.model, self.job.model.experts
        if axis == "fsdp":
            return [(model.embed, f"the embedding of {model.embed}")]
        if axis == "expert":
            return [(experts.number, f"the {experts.number} experts")] if experts else []
        if axis == "context":
            # In zig-zag order each device holds an early and a late chunk of a row.
            return [(self.job.length // 2, f"half of the {self.job.length} tokens of a row")]
        if axis != "tensor":
            return []
        sizes = [(model.heads, f"the {model.heads} heads"), (model.vocab, f"vocab {model.vocab}")]
        if model.dense_layers:
            sizes.append((model.mlp, f"the MLP of {model.mlp}"))
        if experts:
            sizes.append((experts.mlp, f"the experts of {experts.mlp}"))
            if experts.shared_mlp:
                sizes.append((experts.shared_mlp, f"the shared expert of {experts.shared_mlp}"))
        return sizes
