"""The compiled steps of the engine, and the arrays that they read and write."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.engine.prompt_scores import prompt_scores
from shardlib.engine.requests import Sampling
from shardlib.engine.sampling import Drawn, Settings, draw
from shardlib.engine.schedule import EngineStep, SequenceState
from shardlib.engine.sizes import EngineSizes
from shardlib.nn.attention import Pages, Rows
from shardlib.registry import Decoding
from shardlib.sharding.constrain import Scope, active, use

_WHOLE: dict[str, Any] = dict.fromkeys(("batch", "length", "residual_length"))
"""Activations that are not cut: a step has one batch row, of any length."""


class DeviceState(NamedTuple):
    """What stays on the devices between steps."""

    pages: tuple[Pages, ...]
    tokens: jax.Array
    """The last token of each slot: [slots] int32."""


class StepArrays(NamedTuple):
    """A step as arrays."""

    rows: Rows
    tokens: np.ndarray
    """Of the rows of lanes: [lanes * width] int32."""
    last_rows: np.ndarray
    """Of each lane, the row of its last token; then any row, as often as needed: [n] int32."""
    slots: np.ndarray
    """The slot of each lane that draws a token, and of others the number of slots: [n] int32."""
    settings: Settings
    """Of slots, then of `last_rows`."""
    added: np.ndarray | None
    """Of the same rows, what is added to the logits: [rows, vocab] float32."""
    targets: np.ndarray
    """The token after each row of a lane, where it is known: [rows] int32."""
    wants_scores: np.ndarray
    """Whether any lane wants the log probabilities of its targets: [] bool."""


class StepResult(NamedTuple):
    """What the host reads of a step."""

    drawn: Drawn
    """Of slots, then of `last_rows`."""
    scores: Drawn
    """Of the targets of all rows, if any are wanted."""


class EnginePrograms:
    """The steps of one model.

    Args:
        model: The module.
        decoding: How its family decodes.
        scope: The mesh and rules, or None for one device.
        sizes: Sizes of the steps and the cache.
    """

    def __init__(
        self, model: nnx.Module, decoding: Decoding, scope: Scope | None, sizes: EngineSizes
    ):
        self._graphdef = nnx.graphdef(model)
        self._decoding, self._scope, self._sizes = decoding, scope, sizes
        self._run = jax.jit(self._step, donate_argnums=1)
        self.num_traced = 0
        """Steps that have been traced, and so compiled."""

    def initial(self, params: nnx.State) -> DeviceState:
        """Returns an empty cache."""

        state = jax.jit(self._empty)(params)
        # Bound to their devices, as the states that steps return.
        return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))

    def abstract_state(self, params: Any) -> DeviceState:
        """Returns the shapes and shardings of an empty cache, for parameters that may be
        abstract."""
        lowered = jax.jit(self._empty).lower(params)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            lowered.out_info,
            lowered.compile().output_shardings,
        )

    def _empty(self, params: nnx.State) -> DeviceState:
        model = nnx.merge(self._graphdef, params)
        with self._scoped():
            pages = self._decoding.pages(model, self._sizes.num_pages, self._sizes.page_size)
        return DeviceState(pages, jnp.zeros(self._sizes.slots, jnp.int32))

    def run(
        self, params: nnx.State, state: DeviceState, arrays: StepArrays
    ) -> tuple[DeviceState, StepResult]:
        """Starts a step; `state` is donated. It is compiled once for each number of lanes, and once
        more for steps that add to logits."""
        return self._run(params, state, arrays)

    def lower(self, params: Any, state: Any, arrays: Any) -> jax.stages.Lowered:
        """Lowers the step for arguments that may be abstract."""
        return self._run.lower(params, state, arrays)

    def _step(
        self, params: nnx.State, state: DeviceState, arrays: StepArrays
    ) -> tuple[DeviceState, StepResult]:
        self.num_traced += 1
        model, rows, num_slots = nnx.merge(self._graphdef, params), arrays.rows, self._sizes.slots
        with self._scoped():
            tokens = jnp.concatenate([state.tokens, jnp.asarray(arrays.tokens)])
            x, pages = self._decoding.step(model, tokens, rows, state.pages, self._sizes.context)
            last = jnp.concatenate([jnp.arange(num_slots), jnp.asarray(arrays.last_rows)])
            logits = self._decoding.logits(model, x[last])
            # All rows, also of slots: few rows may be computed with other bits.
            wanted = jnp.asarray(arrays.wants_scores)
            targets = jnp.asarray(arrays.targets)
            scores = _whole(
                prompt_scores(lambda: _by_rows(self._decoding.logits(model, x)), targets, wanted)
            )
            positions = rows.positions[last] + 1
            drawn = _drawn(logits, arrays.settings, positions, arrays.added)
        # Slots that did not decode keep their token: one that a lane draws is written after.
        is_active = rows.pages[:num_slots] > 0
        slots = jnp.where(is_active, drawn.tokens[:num_slots], state.tokens)
        slots = slots.at[arrays.slots].set(drawn.tokens[num_slots:], mode="drop")
        return DeviceState(pages, slots), StepResult(drawn, scores)

    def _scoped(self) -> contextlib.AbstractContextManager[Any]:
        if self._scope is None:
            return contextlib.nullcontext()
        return use(self._scope.mesh, self._scope.rules.override(activations=_WHOLE))


def _drawn(logits: jax.Array, settings: Settings, positions: jax.Array, added: Any) -> Drawn:
    """Returns what `draw` does. Devices that share the vocabulary exchange it for rows first: each
    draws from its rows, and only what was drawn is gathered."""
    scope, count = active(), logits.shape[0]
    parts = 1 if scope is None else scope.mesh.size

    def padded(x: jax.Array) -> jax.Array:
        # As many rows as the devices can share.
        return jnp.pad(x, ((0, -count % parts), *[(0, 0)] * (x.ndim - 1)))

    logits, settings, positions, added = jax.tree.map(padded, (logits, settings, positions, added))
    added = None if added is None else _by_rows(added)
    settings, positions = _whole((settings, positions))
    drawn = draw(_by_rows(logits), settings, positions, added)
    return jax.tree.map(lambda x: x[:count], _whole(drawn))


def _by_rows(logits: jax.Array) -> jax.Array:
    """Places [rows, vocab] by rows on all devices, if they divide them. With copies along some mesh
    axis, XLA would gather the logits to find the likeliest."""
    scope = active()
    if scope is None or logits.shape[0] % scope.mesh.size:
        return logits
    sharding = NamedSharding(scope.mesh, P(scope.mesh.axis_names))
    return jax.lax.with_sharding_constraint(logits, sharding)


def _whole(tree: Any) -> Any:
    """Places arrays whole on each device."""
    scope = active()
    if scope is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(scope.mesh, P()))


class Arranger:
    """Writes steps as arrays of given sizes."""

    def __init__(self, sizes: EngineSizes):
        self.sizes = sizes

    def arrays(
        self,
        step: EngineStep,
        added: Mapping[SequenceState, np.ndarray] | None = None,
        *,
        least_lanes: int = 0,
    ) -> StepArrays:
        """Returns a step as arrays.

        Args:
            step: The step.
            added: What is added to the logits of sequences: [vocab] each.
            least_lanes: Lanes that its program has at least.
        """
        slots, width, page_size = self.sizes.slots, self.sizes.lane, self.sizes.page_size
        least = max(least_lanes, len(step.lanes))
        count = next(n for n in self.sizes.lane_counts if n >= least)
        positions, pages = (np.zeros(slots + count * width, np.int32) for _ in range(2))
        tables = np.zeros((slots, self.sizes.pages_a_row), np.int32)
        lane_tables = np.zeros((count, self.sizes.pages_a_row), np.int32)
        tokens, targets = np.zeros(count * width, np.int32), np.zeros_like(positions)
        drawn = max(slots + count, self.sizes.least_drawn)
        last_rows = np.zeros(drawn - slots, np.int32)
        lane_slots = np.full(drawn - slots, slots, np.int32)
        sampling: list[Sampling | None] = [None] * drawn
        for row in step.decodes:
            sampling[row.slot] = row.sequence.sampling
            tables[row.slot, : len(row.pages)] = row.pages
            positions[row.slot] = row.position
            pages[row.slot] = row.pages[row.position // page_size]
        for number, lane in enumerate(step.lanes):
            lane_tables[number, : len(lane.pages)] = lane.pages
            first, size = number * width, len(lane.tokens)
            at = np.arange(lane.start, lane.start + size, dtype=np.int32)
            tokens[first : first + size] = lane.tokens
            after = lane.sequence.tokens(lane.start + 1, lane.start + size + 1)
            targets[slots + first : slots + first + len(after)] = after
            positions[slots + first : slots + first + size] = at
            of_pages = lane_tables[number, at // page_size]
            pages[slots + first : slots + first + size] = of_pages
            last_rows[number] = slots + first + size - 1
            if lane.draws:
                lane_slots[number] = lane.slot
                sampling[slots + number] = lane.sequence.sampling
        rows = Rows(*map(jnp.asarray, (positions, pages, tables, lane_tables)))
        return StepArrays(
            rows,
            tokens,
            last_rows,
            lane_slots,
            settings_of(sampling),
            self._added(step, added, drawn),
            targets,
            np.asarray(any(lane.scores for lane in step.lanes)),
        )

    def _added(
        self, step: EngineStep, added: Mapping[SequenceState, np.ndarray] | None, drawn: int
    ) -> np.ndarray | None:
        if not added:
            return None
        every = np.zeros((drawn, len(next(iter(added.values())))), np.float32)
        for row, sequence in step.drawing(self.sizes.slots):
            every[row] = added.get(sequence, 0.0)
        return every


_GREEDY = Sampling()


def settings_of(sampling: Sequence[Sampling | None]) -> Settings:
    """Returns the settings of rows; None for rows whose token is not read."""

    def column(name: str, dtype: Any) -> Any:
        return np.asarray([getattr(s or _GREEDY, name) for s in sampling], dtype)

    wants = [s is not None and bool(s.logprobs) for s in sampling]
    floats = functools.partial(column, dtype=np.float32)
    return Settings(
        floats("temperature"),
        column("top_k", np.int32),
        floats("top_p"),
        floats("min_p"),
        column("seed", np.uint32),
        jnp.asarray(wants, jnp.int32),
    )
