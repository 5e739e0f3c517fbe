"""The best mesh, slots and chunk for serving a model on a cluster.

The devices hold copies of the model, each over `expert` and `tensor`. A copy has an engine of its
own, or one engine steps all copies together, along `data`. In the steady state every slot decodes,
at every length from that of a prompt to that of the context, and each answer that ends makes room
for a prompt, which is read in chunks by the same steps.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax.numpy as jnp

from shardlib.cost import pricing
from shardlib.cost.costs import RUNTIME_BYTES, StepTime, usable
from shardlib.cost.layout import SHARDLIB, Layout, divisors
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.kernels import padded
from shardlib.cost.machine.measured import check_known, software_on
from shardlib.cost.machine.rates import rates_on
from shardlib.cost.serving.step import ServedStep, cache_cut, step_costs
from shardlib.errors import RuleError
from shardlib.nn.attention import ragged
from shardlib.plan.search import capacity_bytes
from shardlib.plan.serving.question import ServingQuestion
from shardlib.plan.serving.served_model import ServedModel

SLOTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CHUNKS = (128, 256, 512, 1024, 2048, 4096)
"""Tokens of prompts in a step."""
ALIKE = 0.98
"""Share of the most tokens per second that makes plans alike."""
_TEMPORARY_BYTES = 2**26
"""Of tables, masks and buffers of collectives; compiled steps of 8B hold 77 MB of temporaries in
all, with 288 rows and `tensor=8`."""
_KEYS = 512
"""Keys and values of each row that XLA reads at once, twice: as they lie, and by head."""
_LOGIT_BYTES = 12
"""Of a row and token: prompts may ask for the log probabilities of all their tokens."""


@dataclasses.dataclass(frozen=True)
class ServingMemory:
    """Bytes on a device; they add up to `total`."""

    weights: float
    cache: float
    temporaries: float
    runtime: float

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return sum(vars(self).values())


@dataclasses.dataclass(frozen=True)
class ServingPlan:
    """Engines of a mesh, each with some slots and chunk, and their predicted times."""

    layout: Layout
    """`data` copies of the model on `expert` x `tensor` devices each."""
    engines: int
    """Engines, which share the copies."""
    slots: int
    """Sequences that an engine continues at once."""
    chunk: int
    """Tokens of prompts that a step of each copy reads at most."""
    memory: ServingMemory
    decode: StepTime
    """Of a step that decodes."""
    mixed: StepTime
    """Of a step that reads a chunk too."""
    prompt: int
    answer: int
    most_slots: int
    """Slots of an engine that fit the memory."""
    longest_context: int
    """Tokens of the longest sequence that fits the memory of a copy."""

    @property
    def mesh(self) -> str:
        """The mesh of one engine."""
        layout = self.layout
        degrees = {"data": self.copies, "expert": layout.expert, "tensor": layout.tensor}
        return ",".join(f"{axis}={n}" for axis, n in degrees.items() if n > 1) or "data=1"

    @property
    def copies(self) -> int:
        """Copies of the model in an engine, which divide its slots."""
        return self.layout.data // self.engines

    @property
    def fits(self) -> bool:
        """Whether its slots fit the memory."""
        return self.slots <= self.most_slots

    @property
    def first_token_seconds(self) -> float:
        """Seconds to the first token of a prompt that starts at once, with all slots taken."""
        return math.ceil(self.prompt / self.chunk) * self.mixed.total

    @property
    def token_seconds(self) -> float:
        """Seconds between tokens while no prompt is read."""
        return self.decode.total

    @property
    def slowest_token_seconds(self) -> float:
        """Seconds between tokens while a prompt is read."""
        return self.mixed.total

    @property
    def reading_share(self) -> float:
        """Share of the steps of an engine that read prompts in the steady state; 1 if prompts take
        all. A prompt of one copy slows the step of all, and copies get prompts independently."""
        own = self.slots / self.copies * self.prompt / (self.answer * self.chunk)
        return 1 - (1 - min(own, 1.0)) ** self.copies

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers per second in the steady state, of all engines."""
        share = self.reading_share
        mean = share * self.mixed.total + (1 - share) * self.decode.total
        answered = min(self.slots / self.copies, self.answer * self.chunk / self.prompt)
        return self.layout.data * answered / mean

    def late(self, question: ServingQuestion) -> bool:
        """Whether it misses a time of the question."""
        slo = question.slo
        is_late = slo.ttft is not None and self.first_token_seconds > slo.ttft
        return is_late or (slo.itl is not None and self.slowest_token_seconds > slo.itl)


@dataclasses.dataclass(frozen=True)
class Replica:
    """Devices for a copy of a model: what they hold, and what their steps take."""

    model: ServedModel
    question: ServingQuestion
    layout: Layout
    weight_bytes: int
    page_bytes: int

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the pages of a sequence on a device."""
        return math.ceil(self.question.context / self.question.page_size) * self.page_bytes

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that a program can use."""
        return usable(capacity_bytes(self.question.cluster))

    def memory(self, slots: int, chunk: int) -> ServingMemory:
        """Returns the memory of a device, with `slots` for each copy."""
        dims, tensor = self.model.dims, self.layout.tensor
        rows = slots + chunk
        values = rows * (4 * dims.embed + 3 * dims.mlp / tensor)
        readers = slots + chunk // self.question.lane
        if not self._is_read_in_place(slots, chunk):
            values += 2 * _KEYS * readers * dims.kv_width / cache_cut(dims, self.layout)
        held = self.model.widths.other * values + _LOGIT_BYTES * rows * dims.vocab / tensor
        # One page more, which nothing reads.
        cache = slots * self.sequence_bytes + self.page_bytes
        copied = cache / self.page_bytes * self._copied_page_bytes
        return ServingMemory(
            weights=self.weight_bytes,
            cache=cache,
            temporaries=_TEMPORARY_BYTES + held + copied,
            runtime=RUNTIME_BYTES[self.question.cluster.platform],
        )

    def _is_read_in_place(self, slots: int, chunk: int) -> bool:
        """Returns whether a kernel reads keys and values where they lie."""
        dims, question = self.model.dims, self.question
        cut = cache_cut(dims, self.layout)
        is_cut_as_queries = cut == min(dims.kv_heads, self.layout.tensor)
        if question.cluster.platform != "tpu" or question.cache or not is_cut_as_queries:
            return False
        dtype = jnp.float32 if self.model.widths.cached == 4 else jnp.bfloat16
        tables = slots, chunk // question.lane, math.ceil(question.context / question.page_size)
        heads, of_head = dims.heads // self.layout.tensor, (dims.score_dim, dims.value_dim)
        of_device = heads, dims.kv_heads // cut
        is_held = ragged.can_hold(*of_device, of_head, dtype, question.page_size)
        return is_held and ragged.can_read(*tables)

    @property
    def _copied_page_bytes(self) -> float:
        """Bytes of a page that a step copies. TPUs copy the scales of int8 of a layer, twice, in
        tiles of 128; of all layers where memory is left, which this does not count."""
        if self.question.cache is None or self.question.cluster.platform != "tpu":
            return 0.0
        dims, size = self.model.dims, self.question.page_size
        scales = dims.kv_heads // cache_cut(dims, self.layout) * size
        return 2 * 2 * 4 * padded(scales, 128)

    def over(self, slots: int, chunk: int) -> float:
        """Returns the bytes by which a copy with `slots` exceeds the memory of a device; negative
        if it fits."""
        return self.memory(slots, chunk).total - self.usable_bytes

    def most_slots(self, chunk: int) -> int:
        """Returns the slots of a copy that fit."""
        # Memory is linear in the slots.
        free = -self.over(0, chunk)
        slots = max(int(free / (self.over(1, chunk) + free)), 0)
        while slots and self.over(slots, chunk) > 0:
            slots -= 1
        return slots

    def longest_chunk(self) -> int:
        """Returns the tokens of the longest chunk that fits with one sequence."""
        lane = self.question.lane
        # Memory is linear in the lanes.
        free = -self.over(1, 0)
        lanes = max(int(free / (self.over(1, lane) + free)), 0)
        while lanes and self.over(1, lanes * lane) > 0:
            lanes -= 1
        return lanes * lane

    def longest_context(self, chunk: int) -> int:
        """Returns the tokens of the longest sequence that fits, one at a time."""
        pages = int(max(-self.over(0, chunk), 0) / self.page_bytes)
        tokens = pages * self.question.page_size
        longest = self.model.longest
        return tokens if longest is None else min(tokens, longest)

    @functools.cached_property
    def machine(self) -> pricing.Machine:
        """One device with its rates and links. Replicas do not wait for each other."""
        cluster, constants = self.question.cluster, committed()
        software = software_on(cluster, SHARDLIB)
        rates = rates_on(cluster, self.question.precision, constants)
        rates = dataclasses.replace(rates, jitter=0.0, skew=0.0)
        links_of = pricing.by_joint_axes(self.layout, cluster, constants, software)
        return pricing.Machine(self.layout, software, cluster, rates, links_of)

    def step(self, slots: int, chunk: int = 0) -> StepTime:
        """Returns the time of a step, with `slots` for each copy."""
        question = self.question
        work = ServedStep(
            slots=slots,
            seen=question.prompt + question.answer / 2,
            chunk=chunk,
            lane=question.lane,
            before=question.prompt / 2,
        )
        costs = step_costs(self.model.dims, work, self.layout, self.model.widths)
        return pricing.step_time(costs, self.machine)

    def plan(self, slots: int, chunk: int, engines: int) -> ServingPlan:
        """Returns the plan of some engines, with `slots` for each copy."""
        copies = self.layout.data // engines
        return ServingPlan(
            layout=self.layout,
            engines=engines,
            slots=slots * copies,
            chunk=chunk,
            memory=self.memory(slots, chunk),
            decode=self.step(slots),
            # The last chunk of a prompt is rarely full.
            mixed=self.step(slots, min(chunk, _up(self.question.prompt, self.question.lane))),
            prompt=self.question.prompt,
            answer=self.question.answer,
            most_slots=self.most_slots(chunk) * copies,
            longest_context=self.longest_context(chunk),
        )

    @property
    def engines(self) -> tuple[int, ...]:
        """Numbers of engines to try: one for each copy, and one for all."""
        return tuple(dict.fromkeys((self.layout.data, 1)))

    def plans(self, engines: int, asked: int | None = None) -> Iterator[ServingPlan]:
        """Yields the plans that fit the memory, with the chunk that is asked for or several."""
        for chunk in chunks_for(self.question) if asked is None else [asked]:
            most = self.most_slots(chunk)
            for slots in sorted({n for n in (*SLOTS, most) if 0 < n <= min(most, SLOTS[-1])}):
                yield self.plan(slots, chunk, engines)


def chunks_for(question: ServingQuestion) -> list[int]:
    """Returns the chunks to try: none but the smallest is longer than a prompt."""
    return [CHUNKS[0], *(n for n in CHUNKS[1:] if n <= _up(question.prompt, CHUNKS[0]))]


def replicas_of(model: ServedModel, question: ServingQuestion) -> list[Replica]:
    """Returns the ways to lay out a copy that the rules `serve` allow, leanest last.

    Raises:
        MeshError: If nothing is known about the devices.
    """
    check_known(question.cluster)
    cluster, found = question.cluster, []
    devices = cluster.num_devices
    experts = model.dims.experts
    for tensor in divisors(devices):
        for expert in divisors(devices // tensor) if experts else (1,):
            data = devices // (tensor * expert)
            if data % cluster.num_slices:
                continue
            layout = Layout(data=data, expert=expert, tensor=tensor, slices=cluster.num_slices)
            try:
                weights = model.weight_bytes(layout)
                pages = model.page_bytes(layout, question.page_size)
            except RuleError:
                continue
            found.append(Replica(model, question, layout, weights, pages))
    return sorted(found, key=lambda one: -one.over(1, CHUNKS[0]))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def best_of(plans: Iterator[ServingPlan], question: ServingQuestion) -> ServingPlan | None:
    """Returns the plan that keeps the times and answers most tokens; None without one. Of plans
    alike in that, it has the soonest first token."""
    kept = [plan for plan in plans if not plan.late(question)]
    most = max((plan.tokens_per_second for plan in kept), default=0.0)
    alike = (plan for plan in kept if plan.tokens_per_second >= ALIKE * most)
    return min(alike, key=lambda plan: plan.first_token_seconds, default=None)


def rank(plan: ServingPlan, most: float) -> tuple[bool, float]:
    """Returns the rank of a plan where the best answers `most` tokens per second."""
    rate = plan.tokens_per_second
    return (False, plan.first_token_seconds) if rate >= ALIKE * most else (True, -rate)
