"""One program for every schedule: a scan over ticks, manual over the mesh axis `stage`.

In each tick a stage takes its forward and its backward turn, if it has them, and then activations
go one stage forward and their gradients one stage back. A forward turn keeps nothing but the input
of its chunk; the backward turn runs the chunk again and differentiates it. The last chunk has no
forward turn of its own to compute: its backward turn follows at once or has all that it needs, and
would run it again. That leaves time for the head and the loss, which run there.

An idle stage skips the computation (`lax.cond`), so that a bubble costs no more than the schedule
says. All-reduces, all-gathers and all-to-alls inside of a turn are fine: their groups lie within
one stage. A collective-permute is not: on CPU all devices of the program meet in it, and stages
that have no turn would be missing for ever. With `skip_idle=False` all stages compute in every tick
and discard what is not theirs: a tick lasts as long, but an idle one no longer costs nothing.

Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM"; Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost", for recomputing from kept inputs.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.aggregate import join, nothing, over_axis
from shardlib.pipeline.schedules import Schedule
from shardlib.pipeline.turns import Tick, Turn

AXIS = "stage"
Leaves = Mapping[str, jax.Array]
"""Parameters by path."""


class Part(NamedTuple):
    """One microbatch."""

    batch: Any
    """Leaves [b / M, ...]."""
    index: jax.Array
    """Which of the M it is, scalar int32."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A loss cut at its layers. The functions see the `shared` parameters of all stages.

    What goes from chunk to chunk is a pytree of arrays; gradients flow through its floating leaves.
    """

    pre: Callable[[Leaves, Part], Any]
    """`pre(shared, part) -> x`, the input of the first chunk."""
    chunk: Callable[[Leaves, Leaves, Any, Part, jax.Array], Any]
    """`chunk(layers, shared, x, part, first_layer) -> x` for leaves [n, ...] of n layers."""
    post: Callable[[Leaves, Any, Part], tuple[jax.Array, Any]]
    """`post(shared, x, part) -> (loss, sums)`: a scalar float32 and a pytree that `join` joins."""
    reads: "Reads"


class Reads(NamedTuple):
    """Which shared parameters each function depends on, by path."""

    pre: frozenset[str]
    chunk: frozenset[str]
    post: frozenset[str]


class Result(NamedTuple):
    """What the stages found."""

    layers: dict[str, jax.Array]
    """Gradients of this stage's layers, summed over microbatches, float32."""
    shared: dict[str, jax.Array]
    """Gradients of the shared parameters, summed over microbatches and stages, float32; those that
    nothing reads are left out."""
    sums: Any
    """The sums of all microbatches."""
    turns: jax.Array
    """Forward and backward turns that this stage computed, int32 [1, 2]. A backward turn of the
    last chunk of all is a forward turn too."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A cut loss, its schedule, and how it is run."""

    cut: Cut
    schedule: Schedule
    num_layers: int
    skip_idle: bool
    pin: Callable[[dict[str, jax.Array]], dict[str, jax.Array]]
    """Places gradients by path over the mesh axes that are left to the compiler."""

    @property
    def layers_per_chunk(self) -> int:
        """Layers in each chunk."""
        return self.num_layers // (self.schedule.stages * self.schedule.chunks)

    def gradients(self, ticks: Tick, layers: Leaves, shared: Leaves, batch: Any) -> Result:
        """Runs the schedule on one stage, forward and backward.

        Args:
            ticks: This stage's column of `turns.ticks`, leaves [ticks].
            layers: This stage's layers, leaves [layers, ...], chunk after chunk.
            shared: All other parameters.
            batch: The whole batch, leaves [b, ...].
        """
        run = _Run(self, layers, shared, _parts(batch, self.schedule.microbatches))
        carry, _ = jax.lax.scan(run.tick, run.start(ticks), ticks)
        shared_grads, sums = over_axis((carry.shared, carry.sums), AXIS)
        return Result(carry.layers, self.pin(shared_grads), sums, carry.turns[None])

    def sums(self, ticks: Tick, layers: Leaves, shared: Leaves, batch: Any) -> Any:
        """Runs the forward turns alone; returns the sums of all microbatches."""
        run = _Run(self, layers, shared, _parts(batch, self.schedule.microbatches))
        zeros = (run.zero_x(ticks), run.zero_sums(ticks))
        (_, sums), _ = jax.lax.scan(run.forward_tick, zeros, ticks)
        return over_axis(sums, AXIS)


class _Carry(NamedTuple):
    x: Any
    """What the stage before sent."""
    dx: Any
    """What the stage after sent: gradients of the floating leaves of `x`."""
    kept: Any
    """Inputs of chunks, leaves [slots, ...]."""
    layers: dict[str, jax.Array]
    shared: dict[str, jax.Array]
    sums: Any
    turns: jax.Array


class _Backward(NamedTuple):
    """What a backward turn yields."""

    dx: Any
    layers: Any
    shared: Any
    sums: Any
    turns: jax.Array


@dataclasses.dataclass(frozen=True)
class _Run:
    """The turns of one stage."""

    pipeline: Pipeline
    layers: Leaves
    shared: Leaves
    parts: Any

    def start(self, ticks: Tick) -> _Carry:
        x, cut = self.zero_x(ticks), self.pipeline.cut
        slots = self.pipeline.schedule.num_slots
        read = cut.reads.pre | cut.reads.chunk | cut.reads.post
        return _Carry(
            x,
            _floats(x),
            jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), x),
            self.pipeline.pin(_zeros(self.layers)),
            self.pipeline.pin(_zeros(_only(self.shared, read))),
            self.zero_sums(ticks),
            jnp.zeros(2, jnp.int32),
        )

    def zero_x(self, ticks: Tick) -> Any:
        """An input of a chunk, of zeros."""
        first = jax.tree.map(lambda leaf: leaf[0], ticks.forward)
        shapes = jax.eval_shape(lambda: self.pipeline.cut.pre(self.shared, self.part(first)))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def zero_sums(self, ticks: Tick) -> Any:
        first = jax.tree.map(lambda leaf: leaf[0], ticks.forward)

        def sums() -> Any:
            part, cut = self.part(first), self.pipeline.cut
            return cut.post(self.shared, cut.pre(self.shared, part), part)[1]

        return nothing(jax.eval_shape(sums))

    def part(self, turn: Turn) -> Part:
        def pick(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, turn.microbatch, 1, keepdims=False)

        return Part(jax.tree.map(pick, self.parts), turn.microbatch)

    def chunk_of(self, turn: Turn) -> Leaves:
        n = self.pipeline.layers_per_chunk
        return {
            path: jax.lax.dynamic_slice_in_dim(leaf, turn.chunk * n, n)
            for path, leaf in self.layers.items()
        }

    def tick(self, carry: _Carry, tick: Tick) -> tuple[_Carry, None]:
        forward, backward = tick.forward, tick.backward
        assert backward is not None
        kept = _keep(carry.kept, carry.x, forward.slot, forward.runs & ~forward.is_first)

        def run_forward() -> Any:
            part = self.part(forward)
            return self.apply(forward, self.input(forward, carry.x, part), part), 1

        computes = forward.runs & ~forward.is_last
        x, forwards = self.when(computes, run_forward, (carry.x, 0))
        x_kept = jax.tree.map(lambda leaf: leaf[backward.slot], kept)
        idle = _Backward(
            carry.dx,
            _zeros(self.chunk_of(backward)),
            _zeros(carry.shared),
            nothing(carry.sums),
            jnp.zeros(2, jnp.int32),
        )
        found = self.when(
            backward.runs, lambda: self.backward(backward, x_kept, carry.dx, idle), idle
        )
        return self.next(carry, backward, kept, x, found, forwards), None

    def next(
        self, carry: _Carry, turn: Turn, kept: Any, x: Any, found: _Backward, forwards: Any
    ) -> _Carry:
        """Adds what a tick found, and hands on what it made."""
        pin, n = self.pipeline.pin, self.pipeline.layers_per_chunk
        schedule = self.pipeline.schedule

        def add(path: str, total: jax.Array) -> jax.Array:
            at = turn.chunk * n
            old = jax.lax.dynamic_slice_in_dim(total, at, n)
            return jax.lax.dynamic_update_slice_in_dim(total, old + found.layers[path], at, 0)

        return _Carry(
            _send(x, 1, schedule),
            _send(found.dx, -1, schedule),
            kept,
            pin({path: add(path, total) for path, total in carry.layers.items()}),
            pin({path: g + found.shared[path] for path, g in carry.shared.items()}),
            join(carry.sums, found.sums),
            carry.turns + found.turns + jnp.stack([forwards, jnp.zeros_like(forwards)]),
        )

    def forward_tick(self, carry: tuple[Any, Any], tick: Tick) -> tuple[Any, None]:
        """A tick without gradients: `(x, sums)` goes on."""
        turn, (x, sums) = tick.forward, carry
        cut = self.pipeline.cut

        def run() -> Any:
            part = self.part(turn)
            y = self.apply(turn, self.input(turn, x, part), part)

            def post() -> Any:
                return cut.post(self.shared, y, part)[1]

            return y, self.when(turn.is_last, post, nothing(sums))

        y, found = self.when(turn.runs, run, (x, nothing(sums)))
        return (_send(y, 1, self.pipeline.schedule), join(sums, found)), None

    def input(self, turn: Turn, x: Any, part: Part) -> Any:
        """The input of a chunk: `x`, but of the first chunk what `pre` makes."""
        return self.when(turn.is_first, lambda: self.pipeline.cut.pre(self.shared, part), x)

    def apply(self, turn: Turn, x: Any, part: Part) -> Any:
        first_layer = turn.place * self.pipeline.layers_per_chunk
        return self.pipeline.cut.chunk(self.chunk_of(turn), self.shared, x, part, first_layer)

    def backward(self, turn: Turn, x: Any, dy: Any, idle: _Backward) -> _Backward:
        """Runs a chunk again and differentiates it; with it `pre` or `post` where they belong."""
        cut, part, shared = self.pipeline.cut, self.part(turn), self.shared
        x = self.input(turn, x, part)
        first_layer = turn.place * self.pipeline.layers_per_chunk

        def chunk(layers: Any, read: Any, x: Any) -> Any:
            return cut.chunk(layers, {**shared, **read}, x, part, first_layer)

        y, chunk_vjp = jax.vjp(chunk, self.chunk_of(turn), _only(shared, cut.reads.chunk), x)

        def last() -> Any:
            def post(read: Any, y: Any) -> Any:
                return cut.post({**shared, **read}, y, part)

            read = _only(shared, cut.reads.post)
            loss, vjp, sums = jax.vjp(post, read, y, has_aux=True)
            grads, dy = vjp(jnp.ones_like(loss))
            return _floats(dy), self.wide(grads), sums

        def first(dx: Any) -> Any:
            def pre(read: Any) -> Any:
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
        turns = jnp.stack([turn.is_last.astype(jnp.int32), jnp.ones((), jnp.int32)])
        return _Backward(_floats(dx), self.wide(layer_grads), shared_grads, sums, turns)

    def wide(self, grads: Any) -> Any:
        """Gradients in float32, where the rules want them."""
        return self.pipeline.pin({path: g.astype(jnp.float32) for path, g in grads.items()})

    def when(self, flag: jax.Array, run: Callable[[], Any], otherwise: Any) -> Any:
        """`run()` where the flag is set, `otherwise` where not."""
        otherwise = jax.tree.map(jnp.asarray, otherwise)

        def taken() -> Any:
            return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), run(), otherwise)

        if self.pipeline.skip_idle:
            return jax.lax.cond(flag, taken, lambda: otherwise)
        return jax.tree.map(lambda x, other: jnp.where(flag, x, other), taken(), otherwise)


def _parts(batch: Any, microbatches: int) -> Any:
    """A batch as [b / M, M, ...]: microbatch m is `[:, m]`, as `microbatch.split` has it."""
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]), batch
    )


def _keep(kept: Any, x: Any, slot: jax.Array, flag: jax.Array) -> Any:
    def put(slots: jax.Array, leaf: jax.Array) -> jax.Array:
        leaf = jnp.where(flag, leaf, slots[slot])
        return jax.lax.dynamic_update_index_in_dim(slots, leaf, slot, 0)

    return jax.tree.map(put, kept, x)


def _send(tree: Any, step: int, schedule: Schedule) -> Any:
    """Hands arrays to the next stage (1) or the one before (-1).

    Between the last and the first stage something travels only if stages hold several chunks.
    """
    stages = range(schedule.stages)
    pairs = [(s, (s + step) % schedule.stages) for s in stages]
    if schedule.chunks == 1:
        pairs = [(a, b) for a, b in pairs if b == a + step]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def _only(leaves: Leaves, paths: frozenset[str]) -> dict[str, jax.Array]:
    return {path: leaf for path, leaf in leaves.items() if path in paths}


def _zeros(leaves: Leaves) -> dict[str, jax.Array]:
    return {path: jnp.zeros(leaf.shape, jnp.float32) for path, leaf in leaves.items()}


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _cotangent(like: Any, floats: list[Any]) -> Any:
    """A cotangent of `like` from those of its floating leaves."""
    leaves, treedef = jax.tree.flatten(like)
    rest = iter(floats)
    none = jax.dtypes.float0
    return treedef.unflatten(
        [next(rest) if _is_float(x) else np.zeros(x.shape, none) for x in leaves]
    )
