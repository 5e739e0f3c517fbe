"""One program for every schedule: a scan over ticks, manual over the mesh axis `stage`.

In each tick a stage takes its forward and backward turns, if it has them. Then activations move one
stage forward and their gradients one stage back; a stage without a turn sends nothing. A forward
turn keeps only the input of its chunk. The backward turn recomputes the chunk and differentiates
it. The last chunk does not compute its forward turns, because its backward turn has the same input
and would recompute them. That leaves time for the head and the loss, which run there.

An idle stage skips the computation (`lax.cond`), so a bubble costs no more than the schedule says.
All-reduces, all-gathers and all-to-alls inside a turn are safe, because their groups lie within one
stage. Collective-permutes are not safe: on CPU all devices of the program take part, so the program
would wait forever for idle stages. With `skip_idle=False` all stages compute in every tick and
discard unused results. A tick takes equally long, but idle ticks cost compute.

Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM"; Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost", for recomputing from kept inputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from shardlib.losses.aggregate import join, nothing, over_axes
from shardlib.losses.microbatch import widened
from shardlib.nn.stages import StageCut
from shardlib.train.pipeline.schedules import Schedule, Turns
from shardlib.train.pipeline.sends import AXIS, Sends, send, sends

Leaves = Mapping[str, jax.Array]
"""Parameters by path."""


class Part(NamedTuple):
    """One microbatch and its index."""

    batch: PyTree[Shaped[Array, "rows ..."]]
    index: Int[Array, ""]
    """Index of the microbatch among M."""


@dataclasses.dataclass(frozen=True)
class CutLoss:
    """A loss cut at its layers, as functions that also take the parameters `shared` by all stages.

    A pytree of arrays passes from chunk to chunk, and gradients flow through its floating leaves.
    """

    pre: Callable[[Leaves, Part], Any]
    """`pre(shared, part) -> x`, the input of the first chunk."""
    chunk: Callable[[Leaves, Leaves, Any, Part, "Span"], Any]
    """`chunk(layers, shared, x, part, span) -> x` for n layers, leaves [n, ...]."""
    post: Callable[[Leaves, Any, Part], tuple[jax.Array, Any]]
    """`post(shared, x, part) -> (loss, sums)`, a scalar float32 and a pytree for `join`."""
    reads: "Reads"


class Span(NamedTuple):
    """The layers of one chunk."""

    first: Int[Array, ""]
    """Its first layer."""
    count: Int[Array, ""] | None
    """The number of its layers; None if every chunk fills its slots."""


class Reads(NamedTuple):
    """Paths of the shared parameters that each function reads."""

    pre: frozenset[str]
    chunk: frozenset[str]
    post: frozenset[str]


class StageGradients(NamedTuple):
    """Gradients, sums and counts of turns from a pipeline."""

    layers: dict[str, jax.Array]
    """Gradients of this stage's layers, summed over microbatches, float32."""
    shared: dict[str, jax.Array]
    """Gradients of the shared parameters, summed over microbatches and stages, float32. Parameters
    that are not read are left out."""
    sums: PyTree
    """The sums of all microbatches."""
    turns: Float[Array, "1 2"]
    """Forward and backward turns that this stage computed, float32. A backward turn of the model's
    last chunk also counts as a forward turn, and a turn with an idle slot as the share of its
    layers."""


class Turn(NamedTuple):
    """The turn of one stage in one tick, or in [ticks] ticks."""

    runs: Bool[Array, "*ticks"]
    """Whether there is a turn. If not, the other fields are meaningless."""
    microbatch: Int[Array, "*ticks"]
    chunk: Int[Array, "*ticks"]
    """Index of the chunk on this stage."""
    slot: Int[Array, "*ticks"]
    """Slot that keeps the input of the chunk; meaningless for the first chunk."""
    place: Int[Array, "*ticks"]
    """Position of the chunk in the order in which a microbatch passes the chunks."""
    is_first: Bool[Array, "*ticks"]
    """Whether it is the first chunk of the model."""
    is_last: Bool[Array, "*ticks"]
    """Whether it is the last chunk of the model."""
    route: Int[Array, "*ticks"]
    """Index of the tick's route in `Sends`, the same on all stages."""


class Tick(NamedTuple):
    """The forward and backward turn of a stage in a tick."""

    forward: Turn
    backward: Turn | None


def ticks(schedule: Schedule) -> Tick:
    """Returns the whole schedule, with leaves [ticks, stages]."""
    forward, backward = schedule.forward, schedule.backward
    return Tick(_turns(schedule, forward, 1), backward and _turns(schedule, backward, -1))


def _turns(schedule: Schedule, turns: Turns, step: int) -> Turn:
    place = turns.chunk * schedule.stages + np.arange(schedule.stages, dtype=np.int32)[None]
    runs = turns.microbatch >= 0
    numbers = (np.maximum(x, 0) for x in (turns.microbatch, turns.chunk, turns.slot))
    is_last = place == schedule.chunks * schedule.stages - 1
    route = np.broadcast_to(sends(schedule, turns, step).ticks[:, None], place.shape)
    return Turn(*map(jnp.asarray, (runs, *numbers, place, place == 0, is_last, route)))


class _Carry(NamedTuple):
    x: PyTree
    """Activations from the previous stage."""
    dx: PyTree
    """Gradients of the floating leaves of `x`, from the next stage."""
    kept: PyTree[Shaped[Array, "slots ..."]]
    """Kept inputs of chunks."""
    layers: dict[str, jax.Array]
    shared: dict[str, jax.Array]
    sums: PyTree
    turns: jax.Array


class _Backward(NamedTuple):
    """The result of a backward turn."""

    dx: PyTree
    layers: PyTree
    shared: PyTree
    sums: PyTree
    turns: jax.Array


@dataclasses.dataclass(frozen=True)
class Stage:
    """The turns of one stage of a pipeline."""

    loss: CutLoss
    schedule: Schedule
    layers_cut: StageCut
    skip_idle: bool
    pin: Callable[[dict[str, jax.Array]], dict[str, jax.Array]]
    """Constrains gradients by path over the mesh axes that are not manual."""
    layers: Mapping[str, Shaped[Array, "layers ..."]]
    """The trained parameters of this stage's layers, in chunk order."""
    frozen: Mapping[str, Shaped[Array, "layers ..."]]
    """Their frozen variables, which get no gradients."""
    shared: Leaves
    """All other parameters."""
    batch: PyTree[Shaped[Array, "rows microbatches ..."]]
    """All microbatches; microbatch m is `[:, m]`, as in `microbatch.split`."""

    def gradients(
        self, ticks: Tick, axis: str | None = None, summed: Collection[str] = ()
    ) -> StageGradients:
        """Runs the schedule forward and backward. `tick` is this stage's column of `ticks`. `axis`
        is the manual axis of groups with their own stages, or None; the gradients of the paths in
        `summed` are summed over it too."""
        carry, _ = jax.lax.scan(self.tick, self.start(ticks), ticks)
        apart = {path: x for path, x in carry.shared.items() if path not in summed}
        apart, sums = over_axes((apart, carry.sums), (AXIS,))
        joint = {path: x for path, x in carry.shared.items() if path in summed}
        joint = jax.lax.psum(joint, (AXIS, axis)) if joint else {}
        return StageGradients(carry.layers, self.pin(apart | joint), sums, carry.turns[None])

    def sums(self, ticks: Tick) -> PyTree:
        """Runs only the forward turns and returns the sums of all microbatches."""
        zeros = (self.zero_x(ticks), self.zero_sums(ticks))
        (_, sums), _ = jax.lax.scan(self.forward_tick, zeros, ticks)
        return over_axes(sums, (AXIS,))

    @functools.cached_property
    def sends(self) -> Sends:
        return sends(self.schedule, self.schedule.forward, 1)

    @functools.cached_property
    def sends_back(self) -> Sends:
        assert self.schedule.backward is not None
        return sends(self.schedule, self.schedule.backward, -1)

    def start(self, ticks: Tick) -> _Carry:
        x, reads = self.zero_x(ticks), self.loss.reads
        slots = self.schedule.num_slots
        return _Carry(
            x,
            _inexact(x),
            jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), x),
            self.pin(_zeros(self.layers)),
            self.pin(_zeros(_only(self.shared, reads.pre | reads.chunk | reads.post))),
            self.zero_sums(ticks),
            jnp.zeros(2, jnp.float32),
        )

    def zero_x(self, ticks: Tick) -> PyTree:
        """Returns a zero input of a chunk."""
        first = jax.tree.map(lambda leaf: leaf[0], ticks.forward)
        shapes = jax.eval_shape(lambda: self.loss.pre(self.shared, self.part(first)))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def zero_sums(self, ticks: Tick) -> PyTree:
        first = jax.tree.map(lambda leaf: leaf[0], ticks.forward)

        def sums() -> PyTree:
            part, cut = self.part(first), self.loss
            return cut.post(self.shared, cut.pre(self.shared, part), part)[1]

        return nothing(jax.eval_shape(sums))

    def part(self, turn: Turn) -> Part:
        def pick(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, turn.microbatch, 1, keepdims=False)

        return Part(jax.tree.map(pick, self.batch), turn.microbatch)

    def chunk_of(self, turn: Turn, leaves: Leaves) -> dict[str, jax.Array]:
        n = self.layers_cut.slots
        return {
            path: jax.lax.dynamic_slice_in_dim(leaf, turn.chunk * n, n)
            for path, leaf in leaves.items()
        }

    def tick(self, carry: _Carry, tick: Tick) -> tuple[_Carry, None]:
        forward, backward = tick.forward, tick.backward
        assert backward is not None
        kept = _keep(carry.kept, carry.x, forward.slot, forward.runs & ~forward.is_first)

        def run_forward() -> PyTree:
            part = self.part(forward)
            x = self.apply(forward, self.input(forward, carry.x, part), part)
            return x, self.share(forward)

        computes = forward.runs & ~forward.is_last
        x, forwards = self.when(computes, run_forward, (carry.x, jnp.float32(0)))
        x_kept = jax.tree.map(lambda leaf: leaf[backward.slot], kept)
        idle = _Backward(
            carry.dx,
            _zeros(self.chunk_of(backward, self.layers)),
            _zeros(carry.shared),
            nothing(carry.sums),
            jnp.zeros(2, jnp.float32),
        )
        grads = self.when(
            backward.runs, lambda: self.backward(backward, x_kept, carry.dx, idle), idle
        )
        return self.next(carry, tick, kept, x, grads, forwards), None

    def next(
        self,
        carry: _Carry,
        tick: Tick,
        kept: PyTree,
        x: PyTree,
        grads: _Backward,
        forwards: jax.Array,
    ) -> _Carry:
        """Adds the gradients and sums of a tick, and sends its results to the neighbours."""
        n, backward = self.layers_cut.slots, tick.backward
        assert backward is not None

        def add(path: str, total: jax.Array) -> jax.Array:
            at = backward.chunk * n
            old = jax.lax.dynamic_slice_in_dim(total, at, n)
            return jax.lax.dynamic_update_slice_in_dim(total, old + grads.layers[path], at, 0)

        return _Carry(
            send(x, self.sends, tick.forward.route),
            send(grads.dx, self.sends_back, backward.route),
            kept,
            self.pin({path: add(path, total) for path, total in carry.layers.items()}),
            self.pin({path: g + grads.shared[path] for path, g in carry.shared.items()}),
            join(carry.sums, grads.sums),
            carry.turns + grads.turns + jnp.stack([forwards, jnp.zeros_like(forwards)]),
        )

    def forward_tick(self, carry: tuple[Any, Any], tick: Tick) -> tuple[Any, None]:
        """Runs a tick without gradients, with the carry `(x, sums)`."""
        turn, (x, sums) = tick.forward, carry

        def run() -> PyTree:
            part = self.part(turn)
            y = self.apply(turn, self.input(turn, x, part), part)

            def post() -> PyTree:
                return self.loss.post(self.shared, y, part)[1]

            return y, self.when(turn.is_last, post, nothing(sums))

        y, new = self.when(turn.runs, run, (x, nothing(sums)))
        return (send(y, self.sends, turn.route), join(sums, new)), None

    def input(self, turn: Turn, x: PyTree, part: Part) -> PyTree:
        """Returns the input of a chunk: the result of `pre` for the first chunk, otherwise `x`."""
        return self.when(turn.is_first, lambda: self.loss.pre(self.shared, part), x)

    def apply(self, turn: Turn, x: PyTree, part: Part) -> PyTree:
        layers = self.chunk_of(turn, {**self.layers, **self.frozen})
        return self.loss.chunk(layers, self.shared, x, part, self.span(turn))

    def span(self, turn: Turn) -> Span:
        """Returns the layers of a turn's chunk."""
        layers = self.layers_cut
        if layers.is_even:
            return Span(turn.place * layers.slots, None)
        tables = (jnp.asarray(layers.firsts), jnp.asarray(layers.counts))
        return Span(*(table[turn.place] for table in tables))

    def share(self, turn: Turn) -> Float[Array, ""]:
        """Returns the layers of a turn's chunk relative to the fullest chunk."""
        layers = self.layers_cut
        if layers.is_even:
            return jnp.ones((), jnp.float32)
        return jnp.asarray(layers.loads, jnp.float32)[turn.place] / max(layers.loads)

    def backward(self, turn: Turn, x: PyTree, dy: PyTree, idle: _Backward) -> _Backward:
        """Recomputes a chunk and differentiates it, with `pre` for the first chunk and `post` for
        the last."""
        cut, part, shared = self.loss, self.part(turn), self.shared
        x = self.input(turn, x, part)
        layers, frozen = (self.chunk_of(turn, leaves) for leaves in (self.layers, self.frozen))

        def chunk(layers: Leaves, read: PyTree, x: PyTree) -> PyTree:
            return cut.chunk({**layers, **frozen}, {**shared, **read}, x, part, self.span(turn))

        y, chunk_vjp = jax.vjp(chunk, layers, _only(shared, cut.reads.chunk), x)

        def last() -> PyTree:
            def post(read: PyTree, y: Any) -> PyTree:
                return cut.post({**shared, **read}, y, part)

            read = _only(shared, cut.reads.post)
            loss, vjp, sums = jax.vjp(post, read, y, has_aux=True)
            grads, dy = vjp(jnp.ones_like(loss))
            return _inexact(dy), self.wide(grads), sums

        def first(dx: PyTree) -> PyTree:
            def pre(read: PyTree) -> PyTree:
                return cut.pre({**shared, **read}, part)

            _, vjp = jax.vjp(pre, _only(shared, cut.reads.pre))
            return self.wide(vjp(dx)[0])

        no_grads = _only(idle.shared, cut.reads.post)
        dy, post_grads, sums = self.when(turn.is_last, last, (dy, no_grads, idle.sums))
        layer_grads, chunk_grads, dx = chunk_vjp(_cotangent(y, dy))
        no_grads = _only(idle.shared, cut.reads.pre)
        pre_grads = self.when(turn.is_first, lambda: first(dx), no_grads)
        shared_grads = dict(idle.shared)
        for grads in (post_grads, self.wide(chunk_grads), pre_grads):
            shared_grads |= {path: shared_grads[path] + g for path, g in grads.items()}
        share = self.share(turn)
        turns = jnp.stack([turn.is_last.astype(share.dtype) * share, share])
        return _Backward(_inexact(dx), self.wide(layer_grads), shared_grads, sums, turns)

    def wide(self, grads: PyTree) -> PyTree:
        """Returns gradients in float32, or complex, constrained to their placements."""
        return self.pin(jax.tree.map(widened, grads))

    def when(self, flag: Bool[Array, ""], run: Callable[[], Any], otherwise: PyTree) -> PyTree:
        """Returns `run()` if the flag is set, else `otherwise`; see `when`."""
        return when(flag, run, otherwise, skip=self.skip_idle)


def when(flag: Bool[Array, ""], run: Callable[[], Any], otherwise: PyTree, *, skip: bool) -> PyTree:
    """Returns `run()` if the flag is set, else `otherwise`; `skip` is whether not to compute
    `run()` in vain."""
    otherwise = jax.tree.map(jnp.asarray, otherwise)

    def taken() -> PyTree:
        return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), run(), otherwise)

    if skip:
        return jax.lax.cond(flag, taken, lambda: otherwise)
    return jax.tree.map(lambda x, other: jnp.where(flag, x, other), taken(), otherwise)


def _keep(kept: PyTree, x: PyTree, slot: Int[Array, ""], flag: Bool[Array, ""]) -> PyTree:
    def put(slots: jax.Array, leaf: jax.Array) -> jax.Array:
        leaf = jnp.where(flag, leaf, slots[slot])
        return jax.lax.dynamic_update_index_in_dim(slots, leaf, slot, 0)

    return jax.tree.map(put, kept, x)


def _only(leaves: Leaves, paths: frozenset[str]) -> dict[str, jax.Array]:
    return {path: leaf for path, leaf in leaves.items() if path in paths}


def _zeros(leaves: Leaves) -> dict[str, jax.Array]:
    return {path: jnp.zeros_like(widened(leaf)) for path, leaf in leaves.items()}


def _is_inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _inexact(tree: PyTree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_inexact(leaf)]


def _cotangent(like: PyTree, floats: list[Any]) -> PyTree:
    """Returns a cotangent of `like` from the cotangents of its floating leaves."""
    leaves, treedef = jax.tree.flatten(like)
    rest = iter(floats)
    none = jax.dtypes.float0
    return treedef.unflatten(
        [next(rest) if _is_inexact(x) else np.zeros(x.shape, none) for x in leaves]
    )
