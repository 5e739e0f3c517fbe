"""The compiled steps of the engine, and the arrays that they read and write."""

import contextlib
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from shardlib.engine.adapters import NO_ADAPTER, adapter_of_rows
from shardlib.engine.by_rows import by_rows
from shardlib.engine.embedding import embeddings
from shardlib.engine.layer_kernels import LayerKernels, with_kernels
from shardlib.engine.prompt_scores import prompt_scores
from shardlib.engine.requests import Sampling
from shardlib.engine.room import check_room, least_free
from shardlib.engine.sampling import Drawn, Settings, draw
from shardlib.engine.sizes import EngineSizes
from shardlib.engine.steps import EngineStep, GroupStep, SequenceState
from shardlib.mesh import entry_axes
from shardlib.nn.attention import Pages, Rows, pages_read
from shardlib.registry import Decoding
from shardlib.sharding.constrain import Scope, constrain, use

_WHOLE: dict[str, Any] = dict.fromkeys(("length", "residual_length"))
"""Activations that are not cut: a step has rows of any number."""


class DeviceState(NamedTuple):
    """What stays on the devices between steps."""

    pages: tuple[Pages, ...]
    tokens: jax.Array
    """The last token of each slot: [groups, slots] int32."""


class StepArrays(NamedTuple):
    """A step as arrays, whose first dim is that of the groups."""

    rows: Rows
    tokens: np.ndarray
    """Of the rows of lanes: [groups, lanes * width] int32."""
    last_rows: np.ndarray
    """The rows after which each lane may draw, `draws_a_lane` of them for each lane, then padding:
    [groups, n] int32."""
    slots: np.ndarray
    """The slot of each of these rows that draws a token, and of others the number of slots:
    [groups, n] int32."""
    guesses: np.ndarray
    """The guess of the token that each of them draws, or -1: [groups, n] int32."""
    settings: Settings
    """Of slots, then of `last_rows`: [groups, drawn] each."""
    added: np.ndarray | None
    """Of the same rows, what is added to the logits: [groups, drawn, vocab] float32."""
    targets: np.ndarray
    """The token after each row of a lane, where it is known: [groups, rows] int32."""
    wants_scores: np.ndarray
    """Whether any lane of a group wants the log probabilities of its targets: [groups] bool."""
    adapters: np.ndarray | None
    """The number of the adapter of each row, if the engine has any: [groups, rows] int32."""
    wants_embeddings: np.ndarray
    """Whether any lane of a group wants the embedding of its prompt: [groups] bool."""


class StepResult(NamedTuple):
    """What the host reads of a step."""

    drawn: Drawn
    """Of slots, then of `last_rows`: [groups, drawn] each."""
    scores: Drawn
    """Of the targets of all rows, if any are wanted: [groups, rows] each."""
    embeddings: jax.Array
    """The embeddings of the rows of `drawn`, or 0 if no request wants one:
    [groups, drawn, features] float32."""


class EnginePrograms:
    """The steps of one model."""

    def __init__(
        self, model: nnx.Module, decoding: Decoding | None, scope: Scope | None, sizes: EngineSizes
    ):
        self._graphdef = nnx.graphdef(model)
        self._decoding, self._sizes = decoding, sizes
        self._scope = scope and serving_scope(scope, nnx.state(model))
        options = _exact_options() if sizes.deterministic else None
        self._run = jax.jit(self._step, donate_argnums=1, compiler_options=options)
        self.num_traced = 0
        """Steps that have been traced, and so compiled."""
        self._new_state: jax.stages.Compiled | None = None

    def initial(self, params: nnx.State) -> DeviceState:
        """Returns an empty cache.

        Raises:
            DoesNotFitError: If the devices lack the memory for the first one. The memory of one
                that was dropped may not count as free yet.
        """
        if self._new_state is None:
            state, made = self._abstract_state(params)
            check_room(state, self._sizes, least_free(state.tokens.sharding))
            self._new_state = made
        # Bound to their devices, as the states that steps return.
        return jax.device_put(self._new_state(params), self._new_state.output_shardings)

    def abstract_state(self, params: Any) -> DeviceState:
        """Returns the shapes and shardings of an empty cache, for parameters that may be
        abstract."""
        return self._abstract_state(params)[0]

    def _abstract_state(self, params: Any) -> tuple[DeviceState, jax.stages.Compiled]:
        lowered = jax.jit(self._empty).lower(params)
        compiled = lowered.compile()
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            lowered.out_info,
            compiled.output_shardings,
        )
        return state, compiled

    def _empty(self, params: nnx.State) -> DeviceState:
        model, sizes = nnx.merge(self._graphdef, params), self._sizes
        with self._scoped():
            counts, dtype = (sizes.groups, sizes.num_pages, sizes.page_size), sizes.cache
            pages = ()
            if self._decoding is not None:
                with self._pages_read():
                    pages = self._decoding.pages(model, *counts, dtype and jnp.dtype(dtype))
            tokens = jnp.zeros((sizes.groups, sizes.slots), jnp.int32)
            return DeviceState(pages, constrain(tokens, "batch", None))

    def run(
        self,
        params: nnx.State,
        state: DeviceState,
        arrays: StepArrays,
        kernels: LayerKernels | None = None,
    ) -> tuple[DeviceState, StepResult]:
        """Starts a step; `state` is donated. It is compiled once for each number of lanes, and once
        more for steps that add to logits. `kernels` are those that `layer_kernels` returns."""
        return self._run(params, state, arrays, kernels)

    def program(self) -> Any:
        """Returns the jitted step, a function of parameters, state, arrays, and kernels if any."""
        return self._run

    def _step(
        self,
        params: nnx.State,
        state: DeviceState,
        arrays: StepArrays,
        kernels: LayerKernels | None = None,
    ) -> tuple[DeviceState, StepResult]:
        self.num_traced += 1
        step = with_kernels(self._computed, kernels) if kernels else self._computed
        return step(params, state, arrays)

    def _computed(
        self, params: nnx.State, state: DeviceState, arrays: StepArrays
    ) -> tuple[DeviceState, StepResult]:
        decoding = self._decoding
        assert decoding is not None, "an encoder has no rows and lanes"
        arrays = jax.tree.map(jnp.asarray, arrays)
        model, rows, num_slots = nnx.merge(self._graphdef, params), arrays.rows, self._sizes.slots
        with self._scoped():
            tokens = jnp.concatenate([state.tokens, arrays.tokens], axis=1)
            with adapter_of_rows(arrays.adapters), self._pages_read():
                x, pages = decoding.step(model, tokens, rows, state.pages, self._sizes.context)
            slots = jnp.broadcast_to(jnp.arange(num_slots), state.tokens.shape)
            last = constrain(jnp.concatenate([slots, arrays.last_rows], axis=1), "batch", None)
            hidden = jnp.take_along_axis(x, last[..., None], axis=1)
            logits = decoding.logits(model, hidden)
            # All rows, also of slots: few rows may be computed with other bits.
            wanted, targets = jnp.any(arrays.wants_scores), jnp.asarray(arrays.targets)
            scores = prompt_scores(lambda: decoding.logits(model, x), targets, wanted)
            positions = jnp.take_along_axis(rows.positions, last, axis=1) + 1
            drawn = by_rows(draw, logits, arrays.settings, positions, arrays.added)
            vectors = embeddings(
                lambda: decoding.embedding(model, hidden), jnp.any(arrays.wants_embeddings)
            )
            result = self._whole(StepResult(drawn, scores, vectors))
            # Slots that did not decode keep their token: one that a lane draws is written after.
            is_active, tokens = rows.pages[:, :num_slots] > 0, result.drawn.tokens
            slots = jnp.where(is_active, tokens[:, :num_slots], state.tokens)
            tokens = tokens[:, num_slots:]
            is_last = last_drawn(tokens, jnp.asarray(arrays.guesses), self._sizes.draws_a_lane)
            slots = jax.vmap(lambda x, at, new: x.at[at].set(new, mode="drop"))(
                slots, jnp.where(is_last, arrays.slots, num_slots), tokens
            )
            return DeviceState(pages, constrain(slots, "batch", None)), result

    def _whole(self, result: StepResult) -> StepResult:
        """Returns what every process can read."""
        if self._scope is None:
            return result
        whole = NamedSharding(self._scope.mesh, P())
        return jax.lax.with_sharding_constraint(result, whole)

    def _pages_read(self) -> contextlib.AbstractContextManager[None]:
        sizes = self._sizes
        tables = sizes.slots, max(sizes.lane_counts, default=0), sizes.pages_a_row
        return pages_read(sizes.attention, apart=sizes.deterministic, tables=tables)

    def _scoped(self) -> contextlib.AbstractContextManager[Any]:
        if self._scope is None:
            return contextlib.nullcontext()
        return use(self._scope.mesh, self._scope.rules)


@functools.cache
def _exact_options() -> dict[str, str]:
    """Returns options of XLA for CPU with which sums of a row have the same bits in programs of any
    number of rows: a library takes the sums of 4096 numbers or more in another order. It warns on
    CPUs if the compiler has no such option."""
    options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        if jax.default_backend() == "cpu":
            warnings.warn(
                f"deterministic=True: this jax has no {', '.join(options)}, so that bits may "
                "depend on the number of rows in models with qk_norm or 13 to 63 experts.\n"
                "  Install jax 0.10.2 for equal bits.",
                stacklevel=2,
            )
        return {}
    return options


def last_drawn(
    tokens: Int[Array, "groups rows"], guesses: Int[Array, "groups rows"], draws_a_lane: int
) -> Bool[Array, "groups rows"]:
    """Returns which row of each lane draws its last token: the first whose guess is wrong, or that
    has none."""
    is_right = (tokens == guesses).reshape(len(tokens), -1, draws_a_lane)
    num_right = jnp.sum(jnp.cumprod(is_right, axis=-1, dtype=jnp.int32), axis=-1, keepdims=True)
    return (jnp.arange(draws_a_lane)[None, None] == num_right).reshape(tokens.shape)


def serving_scope(scope: Scope, params: Any) -> Scope:
    """Returns the mesh and rules of a step. Its batch are the groups: it is cut over the mesh axes
    of the rules' batch over which no parameter is cut."""
    used = {
        name
        for leaf in jax.tree.leaves(params)
        for entry in getattr(getattr(leaf, "sharding", None), "spec", ())
        for name in entry_axes(entry)
    }
    entry = scope.sharding(("batch",), (scope.mesh.size,), "activations").spec[0]
    axes = tuple(name for name in entry_axes(entry) if name not in used)
    batch = "+".join(axes) or None
    return Scope(scope.mesh, scope.rules.override(activations=_WHOLE | {"batch": batch}))


def num_groups(scope: Scope | None, params: Any) -> int:
    """Returns the groups of devices that have sequences of their own."""
    if scope is None:
        return 1
    return serving_scope(scope, params).parts("batch", scope.mesh.size)


class Arranger:
    """Writes steps as arrays of given sizes."""

    def __init__(self, sizes: EngineSizes, adapters: Sequence[str] = ()):
        self.sizes = sizes
        self._numbers = {name: number for number, name in enumerate(adapters)}

    def arrays(
        self,
        step: EngineStep,
        added: Mapping[SequenceState, np.ndarray] | None = None,
        *,
        least_lanes: int = 0,
    ) -> StepArrays:
        """Returns a step as arrays, for a program of `least_lanes` lanes at least. `added` is what
        is added to the logits of sequences, [vocab] each."""
        most = max(least_lanes, *(len(group.lanes) for group in step.groups))
        lanes = next(n for n in self.sizes.lane_counts if n >= most)
        parts = [self._of_group(group, lanes) for group in step.groups]
        return jax.tree.map(lambda *of_groups: np.stack(of_groups), *parts)._replace(
            added=self._added(step, added, parts[0].settings.seed.size)
        )

    def _of_group(self, group: GroupStep, count: int) -> StepArrays:
        """Returns the work of a group as arrays with `count` lanes."""
        slots, width, page_size = self.sizes.slots, self.sizes.lane, self.sizes.page_size
        positions, pages = (np.zeros(slots + count * width, np.int32) for _ in range(2))
        tables = np.zeros((slots, self.sizes.pages_a_row), np.int32)
        lane_tables = np.zeros((count, self.sizes.pages_a_row), np.int32)
        tokens, targets = np.zeros(count * width, np.int32), np.zeros_like(positions)
        draws = self.sizes.draws_a_lane
        has_text = bool(self.sizes.encoder_shapes)
        more = -(-max(count * draws, self.sizes.least_drawn - slots) // draws) * draws
        last_rows, guesses = np.zeros(more, np.int32), np.full(more, -1, np.int32)
        lane_slots = np.full(more, slots, np.int32)
        sampling: list[Sampling | None] = [None] * (slots + more)
        adapters = np.full(positions.shape, NO_ADAPTER, np.int32)
        encoded = np.zeros_like(positions)
        for row in group.decodes:
            sampling[row.slot] = row.sequence.sampling
            tables[row.slot, : len(row.pages)] = row.pages
            positions[row.slot] = row.position
            pages[row.slot] = row.pages[row.position // page_size]
            adapters[row.slot] = self._adapter(row.sequence)
            encoded[row.slot] = row.sequence.num_encoded
        for number, lane in enumerate(group.lanes):
            lane_tables[number, : len(lane.pages)] = lane.pages
            first, size = number * width, len(lane.tokens)
            at = np.arange(lane.start, lane.start + size, dtype=np.int32)
            tokens[first : first + size] = lane.tokens
            after = lane.sequence.tokens(lane.start + 1, lane.start + size + 1)
            targets[slots + first : slots + first + len(after)] = after
            # Rows of a lane that are not read stand at its end: no keys before it are fetched.
            positions[slots + first : slots + first + width] = at[-1]
            positions[slots + first : slots + first + size] = at
            adapters[slots + first : slots + first + size] = self._adapter(lane.sequence)
            encoded[slots + first : slots + first + width] = lane.sequence.num_encoded
            of_pages = lane_tables[number, at // page_size]
            pages[slots + first : slots + first + size] = of_pages
            if lane.draws:
                start, known = number * draws, size - len(lane.guessed)
                mine = slice(start, start + 1 + len(lane.guessed))
                last_rows[mine] = np.arange(slots + first + known - 1, slots + first + size)
                lane_slots[mine], guesses[mine.start : mine.stop - 1] = lane.slot, lane.guessed
                for row in range(mine.start, mine.stop):
                    sampling[slots + row] = lane.sequence.sampling
        return StepArrays(
            Rows(positions, pages, tables, lane_tables, encoded if has_text else None),
            tokens,
            last_rows,
            lane_slots,
            guesses,
            settings_of(sampling),
            None,
            targets,
            np.asarray(any(lane.scores for lane in group.lanes)),
            adapters if self._numbers else None,
            np.asarray(any(lane.sequence.sampling.embedding for lane in group.lanes)),
        )

    def _adapter(self, sequence: SequenceState) -> int:
        name = sequence.sampling.adapter
        return NO_ADAPTER if name is None else self._numbers[name]

    def _added(
        self, step: EngineStep, added: Mapping[SequenceState, np.ndarray] | None, drawn: int
    ) -> np.ndarray | None:
        if not added:
            return None
        vocab = len(next(iter(added.values())))
        every = np.zeros((len(step.groups), drawn, vocab), np.float32)
        for at, work in step.drawing(self.sizes.slots, self.sizes.draws_a_lane):
            every[at] = added.get(work.sequence, 0.0)
        return every


_GREEDY = Sampling()


def settings_of(sampling: Sequence[Sampling | None]) -> Settings:
    """Returns the settings of rows; None for rows whose token is not read."""

    def column(name: str, dtype: Any) -> Any:
        return np.asarray([getattr(s or _GREEDY, name) for s in sampling], dtype)

    wants: Any = np.asarray([s is not None and bool(s.logprobs) for s in sampling], np.int32)
    floats = functools.partial(column, dtype=np.float32)
    return Settings(
        floats("temperature"),
        column("top_k", np.int32),
        floats("top_p"),
        floats("min_p"),
        column("seed", np.uint32),
        wants,
    )
