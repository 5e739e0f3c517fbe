"""Answers to many prompts at once, from one model on one mesh."""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from shardlib.engine.adjustment import Adjustment
from shardlib.engine.answering import EngineStats, Request
from shardlib.engine.arguments import (
    Prompt,
    check_adapter,
    check_encoded,
    check_exact,
    check_limits,
    check_options,
    check_version,
    one_each,
    one_sampling,
    prompt_list,
    start_tokens,
    token_ids,
    tokens_left,
    ways_of,
)
from shardlib.engine.encoder import (
    TextArrays,
    empty_texts,
    longest_text,
    opened_encoder,
    said_of,
    text_arrays,
)
from shardlib.engine.grammars import GrammarReader
from shardlib.engine.layer_kernels import layer_kernels, stored_by_column
from shardlib.engine.open_requests import InFlight, OpenRequests, steps_of
from shardlib.engine.programs import (
    Arranger,
    DeviceState,
    EnginePrograms,
    num_groups,
)
from shardlib.engine.requests import Completion, FinishReason, Sampling
from shardlib.engine.room import return_unused
from shardlib.engine.scheduler import Scheduler
from shardlib.engine.servable import Servable, TextTokenizer
from shardlib.engine.sizes import EngineSizes, engine_sizes
from shardlib.engine.steps import EngineStep, GroupStep, SequenceState
from shardlib.engine.texts import TextStream
from shardlib.engine.weights import ServedWeights, placed, shardings_of
from shardlib.errors import DataError, ModelError
from shardlib.functional.quantized import Bits, check_bits
from shardlib.hf.pooling import Pooling
from shardlib.nn.attention import PageBackend


class Engine:
    """Continues or embeds prompts, many at once, and starts new ones between the steps of others.

    A decoding step feeds one token of each sequence; lanes of the same step read new prompts. Keys
    and values lie in pages that sequences with an equal beginning share. Each step starts before
    the tokens of the last one are read, unless they are guessed.

    Args:
        servable: A decoder, an encoder with a decoder such as T5, or an encoder such as BERT, for
            `embed` alone, with its tokenizer: what `hf.load(folder)` or `load_run(run_dir)`
            returns. It is served on the mesh and by the rules that it was loaded under.
        slots: Sequences that are continued at once. Devices along mesh axes that cut the batch, and
            no parameter, share them and `pages`, and have a chunk each.
        context: Most tokens of a prompt and its answer; None for all that the model and `pages`
            have, at most 4096, or 1024 for an encoder with a decoder.
        pages: Pages of the cache; None for as many as all slots need at most.
        page_size: Positions of a page.
        chunk: Tokens of prompts that a step reads at most. On a CPU a step reads one or two lanes
            of a longer prompt while four sequences or more are continued for each that is read or
            waits; and of all prompts, without `speculate`, where that reads what is left sooner. An
            encoder reads texts of about so many tokens at once, or one longer text.
        lane: Tokens of one prompt that stand together in a step; divides `chunk`.
        prefix_cache: Whether equal beginnings of prompts are computed once.
        overlap: Whether a step starts before the tokens of the last one are known; not with
            `speculate`.
        speculate: Tokens of a running sequence at most that a step guesses, from what followed its
            last tokens before, and checks. Answers stay the same, up to rounding unless they are
            `deterministic`; those that repeat their prompt or themselves take fewer steps. A guess
            takes one of the lanes that read prompts; prompts come first. Programs with lanes
            compute so many more rows of logits for each.
        deterministic: Whether the bits of an answer depend on its request alone, and not on other
            requests, the prefix cache, `chunk`, preemption, `overlap` or `speculate`. Tested with
            float32 parameters of width 64 or more on a CPU. Steps then have 64 rows or more, and
            attention reads the keys of each row apart.
        weights: `int8` for kernels of layers in 8 bits with a scale for each output, widened where
            they are read; None for weights as they are.
        cache: `int8` for keys and values in 8 bits with a scale for each head of a position; None
            for the dtype of the model.
        attention: What reads the pages: `auto` for JAX's ragged paged attention on TPUs, for most
            heads of 128 dims without sinks and tables of up to 960 KiB, for a kernel of shardlib on
            one CPU in float32, and else for XLA; `xla` for XLA; `cudnn` for cuDNN on GPUs, in 16
            bits and for heads of up to 128 dims without softcaps or sinks. The first step refuses
            other models.
        adapters: Models with low-rank adapters by name, as `sl.finetune.load_adapter` returns them.
            A request chooses one by `Sampling.adapter`; all are computed for each row.
        pooling: How an encoder's output becomes one vector: `cls` for that at the first token,
            `mean` or `max` of all; None for what the folder says, or else `mean`.

    Raises:
        ModelError: If the engine does not run the model, sizes do not fit, options are not for the
            model, or `deterministic` is asked of other parameters than float32 on a CPU.
    """

    def __init__(
        self,
        servable: Servable,
        *,
        slots: int = 32,
        context: int | None = None,
        pages: int | None = None,
        page_size: int = 16,
        chunk: int = 256,
        lane: int = 32,
        prefix_cache: bool = True,
        overlap: bool = True,
        speculate: int = 0,
        deterministic: bool = False,
        weights: Bits | None = None,
        cache: Bits | None = None,
        attention: PageBackend = "auto",
        adapters: Mapping[str, Any] | None = None,
        pooling: Pooling | None = None,
    ):
        check_bits(weights=weights, cache=cache)
        (decoding, encoding, max_length), self._adapters = ways_of(servable), tuple(adapters or ())
        of_cache = {"pages": pages, "page_size": page_size, "lane": lane, "cache": cache}
        of_model = {"prefix_cache": prefix_cache, "adapters": adapters, "pooling": pooling}
        check_options(servable, **of_cache, **of_model, speculate=speculate, attention=attention)
        self._weights = ServedWeights(servable.model, weights, adapters or {})
        params = nnx.state(model := self._weights.served(nnx.state(servable.model)))
        sizes = self._sizes = engine_sizes(
            groups=num_groups(servable.scope, params),
            slots=slots,
            context=longest_text(servable) if context is None else context,
            chunk=chunk,
            max_length=max_length(servable.config),
            deterministic=deterministic,
            num_guesses=speculate,
            attention=attention,
            encodes=encoding is not None,
            writes=decoding is not None,
            **of_cache,
        )
        self.context, self.vocab_size = sizes.context, int(servable.config.vocab_size)
        self.tokenizer: TextTokenizer | None = getattr(servable, "texts", servable.tokenizer)
        self._kind, self._ends = type(servable.model).__name__, servable.end_tokens
        self._starts = start_tokens(servable)
        self._grammars = GrammarReader(self.tokenizer, self._ends, self.vocab_size)
        self._programs = EnginePrograms(model, decoding, servable.scope, sizes)
        self._arranger = Arranger(sizes, self._adapters)
        self._encoder = opened_encoder(servable, model, pooling)
        self._lowers = (said := said_of(servable)) is not None and said.lowers
        if deterministic:
            check_exact(params)
        self._shardings = shardings_of(params, servable.scope)
        self._set_params(params)
        self._state: DeviceState | None = self._programs.initial(self._params)
        self.scheduler = _scheduler(sizes, chunk // lane, prefix_cache, self._state)
        self._overlap, self._lock = overlap and not speculate, threading.RLock()
        self._open = OpenRequests(self.scheduler, sizes)
        self._in_flight, self._num_steps = steps_of(self), 0
        self.version = 0
        """The version of the parameters; see `update`."""

    def _set_params(self, params: nnx.State) -> None:
        params = placed(params, self._shardings)
        # Products of a kernel and of its transpose may differ in bits; encoders slice their stacks.
        if not self._sizes.deterministic and self._encoder is None:
            params = stored_by_column(params)
        # Together, or a failed one would leave kernels of other parameters.
        self._params, self._kernels = params, layer_kernels(params)

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        priority: int = 0,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> Request:
        """Queues a prompt; `step` computes its answer.

        Args:
            prompt: A text, or token ids.
            sampling: How the answer is drawn, and where it ends.
            priority: Requests with a lower one are served first, and take the place of running
                ones.
            timeout_seconds: The time after which the answer ends as it is; for one process.
            options: Fields of `Sampling`, in place of it.

        Raises:
            ModelError: If the prompt is empty, too long, or has tokens that the model lacks, or the
                grammar is malformed.
        """
        limits = {"priority": priority, "timeout_seconds": timeout_seconds}
        return self.enqueue(self._asked(prompt, sampling, **limits, **options))

    def _asked(
        self,
        prompt: Prompt,
        sampling: Sampling | None,
        priority: int = 0,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> Request:
        limits = {"priority": priority, "timeout_seconds": timeout_seconds}
        return self.prepare(prompt, one_sampling(sampling, options), **limits)

    def prepare(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        priority: int = 0,
        timeout_seconds: float | None = None,
    ) -> Request:
        """Returns a request for `enqueue`. It may be called by any thread, and waits for no step.
        It takes and raises what `submit` does."""
        tokens, num_encoded = self._framed(self.encode(prompt), sampling)
        left = tokens_left(len(tokens), num_encoded, sampling, self.context)
        if sampling.stop and self.tokenizer is None:
            raise ModelError(
                "stop texts need a tokenizer, and the model has none.\n  Give stop_tokens instead."
            )
        check_adapter(sampling.adapter, self._adapters)
        ends = () if sampling.ignore_end else self._ends
        sequence = SequenceState(
            prompt=tokens,
            # A text that is only embedded ends with its embedding.
            max_tokens=left if num_encoded == len(tokens) else sampling.max_tokens or left,
            sampling=sampling,
            adjustment=self._adjustment(sampling),
            stops=frozenset((*sampling.stop_tokens, *ends)),
            priority=priority,
            root=(sampling.adapter or "").encode(),
            num_encoded=num_encoded,
        )
        check_limits(priority, timeout_seconds)
        if timeout_seconds is not None and jax.process_count() > 1:
            raise ModelError(
                "a timeout of a request on several processes, whose clocks differ.\n"
                "  Leave timeout_seconds out, and cancel the request in all of them."
            )
        now = time.monotonic()
        deadline = None if timeout_seconds is None else now + timeout_seconds
        return Request(sequence, self._stream(sequence), deadline, submitted_at=now)

    def _stream(self, sequence: SequenceState) -> TextStream | None:
        """Returns the text of an answer, if the model has a tokenizer. It continues the prompt,
        unless an encoder has read that."""
        if self.tokenizer is None:
            return None
        before = () if self._encoder is not None else sequence.prompt
        return TextStream(self._decoded, sequence.sampling.stop, before)

    def _framed(self, tokens: tuple[int, ...], sampling: Sampling) -> tuple[tuple[int, ...], int]:
        """Returns the prompt of a sequence, and how many of its tokens an encoder reads."""
        if self._encoder is None:
            return tokens, 0
        check_encoded(sampling, self._kind, self._starts)
        return (*tokens, *self._starts), len(tokens)

    def enqueue(self, request: Request) -> Request:
        """Queues a request that was prepared, and returns it.

        Raises:
            ModelError: If it does not fit into the cache even alone.
        """
        with self._lock:
            self._open.add(request)
        return request

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """Ends an answer as it is; its slot and pages are free for the next step."""
        with self._lock:
            self._open.end(request, reason)

    def step(self) -> bool:
        """Runs one step, and reads the tokens of the last one; returns whether work is left.

        If it raises, also by an interrupt, no token is lost: a later step goes on from the tokens
        that were read. After an error, prompts are admitted one at a time, and one with which a
        step fails again ends alone with that error.
        """
        with self._lock:
            try:
                return self._step()
            except Exception as error:
                if self.scheduler.suspect is not None:
                    self._open.fail(self.scheduler.suspect, error)
                self._restart(is_careful=True)
                raise
            except BaseException:
                self._restart(is_careful=False)
                raise

    def _step(self) -> bool:
        self._open.expire()
        planned, added = self.scheduler.plan(), {}
        if planned is not None:
            added = self._added(planned)
            self._in_flight.append(self._run(planned, added))
            self._num_steps += 1
        # What is added to the logits of the next token depends on this one.
        is_ahead = self._overlap and not added and not self.scheduler.is_careful
        keep = 1 if is_ahead and planned is not None else 0
        while len(self._in_flight) > keep:
            self._open.read(self._in_flight.popleft())
        return self.busy

    def _run(self, step: EngineStep, added: dict[SequenceState, np.ndarray]) -> InFlight:
        """Starts the programs of a step."""
        result = embeddings = None
        if self._encoder is not None and step.encodes:
            texts = text_arrays(step, self._sizes)
            self._state, embeddings = self._encoded(texts)
        if step.draws:
            arrays = self._arranger.arrays(step, added)
            self._state, result = self._programs.run(
                self._params, self._ready(), arrays, self._kernels
            )
        return InFlight(step, result, embeddings, self.version)

    def _encoded(self, texts: TextArrays) -> tuple[DeviceState, jax.Array | None]:
        """Starts the program of texts; returns the state after it, and embeddings if it makes
        them."""
        assert self._encoder is not None
        state = self._ready()
        pages, embeddings = self._encoder.run(self._params, state.pages, texts)
        return state._replace(pages=pages), embeddings

    def _ready(self) -> DeviceState:
        """Returns the state of the devices; an empty one if it was released."""
        if self._state is None:
            self._state = self._programs.initial(self._params)
        return self._state

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.busy or bool(self._in_flight)

    def warm_up(self) -> None:
        """Compiles all programs, so that no request waits for one. Memory that compilation and
        loading no longer need goes back to the system."""
        with self._lock:
            if self._encoder is not None:
                for shape in self._sizes.encoder_shapes:
                    self._state, _ = self._encoded(empty_texts(shape, self._sizes))
            for count in self._sizes.lane_counts:
                idle = EngineStep((GroupStep((), ()),) * self._sizes.groups)
                arrays = self._arranger.arrays(idle, least_lanes=count)
                shape = *arrays.settings.seed.shape, self.vocab_size
                for added in (None, np.zeros(shape, np.float32)):
                    with_added = arrays._replace(added=added)
                    self._state, _ = self._programs.run(
                        self._params, self._ready(), with_added, self._kernels
                    )
            jax.block_until_ready(self._state)
        return_unused()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Returns the answers to prompts, in order.

        Args:
            prompts: Texts or lists of token ids, or one of them.
            sampling: As in `submit`, for all prompts, or one for each of them. Equal prompts with
                equal seeds have equal answers.
            options: As in `submit`.

        Raises:
            ModelError: If a prompt cannot be answered; then all are left out.
        """
        every = prompt_list(prompts)
        samplings = one_each(sampling, len(every))
        requests: list[Request] = []
        try:
            for number, (prompt, one) in enumerate(zip(every, samplings, strict=True)):
                try:
                    requests.append(self.submit(prompt, one, **options))
                except ModelError as error:
                    raise ModelError(f"prompt {number}: {error}") from None
            while not all(request.finished for request in requests):
                self.step()
        finally:
            for request in requests:
                self.cancel(request)
        return [request.answer() for request in requests]

    def embed(
        self, prompts: Prompt | Iterable[Prompt], *, adapter: str | None = None
    ) -> np.ndarray:
        """Returns the embeddings of prompts: [prompts, features] float32, each of length 1.

        Of an encoder it is its output, pooled. Of a decoder it is what the head reads of the last
        token, as for decoders that are trained to embed texts.

        Args:
            prompts: Texts or lists of token ids, or one of them, each within the context, and
                shorter for a decoder.
            adapter: The adapter; None for the model without one.

        Raises:
            ModelError: If there are no prompts, or one cannot be read.
        """
        sampling = Sampling(max_tokens=1, embedding=True, adapter=adapter)
        vectors = [one.embedding for one in self.generate(prompts, sampling)]
        if not vectors:
            raise ModelError("there are no prompts to embed.\n  Give one or more.")
        return np.asarray(vectors)

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Any
    ) -> Iterator[str]:
        """Returns an iterator over the text of an answer as it comes. The prompt is queued when the
        first text is asked for. Arguments and errors are as in `submit`.

        Raises:
            ModelError: If there is no tokenizer. The stream raises it if an error ends the answer.
        """
        if self.tokenizer is None:
            raise ModelError("the model has no tokenizer.\n  Use generate, and read its ids.")
        return self._streamed(self._asked(prompt, sampling, **options))

    def _streamed(self, request: Request) -> Iterator[str]:
        request.restart_clock()
        try:
            self.enqueue(request)
            while True:
                # Another thread may finish it: the text is read after that.
                finished = request.finished
                if text := request.new_text():
                    yield text
                if finished:
                    request.answer()
                    return
                self.step()
        finally:
            self.cancel(request)

    def update(self, params: Any, version: int | None = None) -> None:
        """Serves other parameters from the next step on; prefixes that the old ones made are
        forgotten, and answers that have begun go on with the new ones.

        Args:
            params: The state of a module of the same structure and shapes, on any mesh. Arrays that
                lie as the engine's do are not copied: do not donate them. On one CPU it waits until
                they are computed, and copies the kernels that are stored by column.
            version: Their version, such as the training step, which their tokens have; None for
                one more than the last.

        Raises:
            ModelError: If structure, shapes or dtypes differ, or the version is not a number.
        """
        check_version(version)
        served = nnx.state(self._weights.served(params))
        with self._lock:
            # First, or an interrupt would leave prefixes of the old parameters.
            self.scheduler.forget()
            self._set_params(served)
            self.version = self.version + 1 if version is None else version

    def release(self) -> None:
        """Frees the memory of the cache until the next step, for other work on the devices. The
        programs stay compiled; prefixes are forgotten.

        Raises:
            ModelError: If requests are open.
        """
        with self._lock:
            if self.scheduler.busy:
                raise ModelError(
                    "the cache holds requests that are not finished.\n"
                    "  Finish them, or cancel them."
                )
            while self._in_flight:
                self._open.read(self._in_flight.popleft())
            self.scheduler.forget()
            jax.tree.map(lambda x: x.delete(), self._state)
            self._state = None

    def stats(self) -> EngineStats:
        """Returns what the engine holds and has done."""
        with self._lock:
            scheduler, pools, counts = self.scheduler, self.scheduler.pools, self._open.counts
            return EngineStats(
                num_waiting=len(scheduler.waiting),
                num_running=len(scheduler.running),
                pages=sum(pool.num_pages - 1 for pool in pools),
                pages_used=sum(pool.num_used for pool in pools),
                pages_idle=sum(pool.num_idle for pool in pools),
                num_steps=self._num_steps,
                num_preemptions=scheduler.num_preemptions,
                prompt_tokens=counts["prompt"],
                cached_tokens=counts["cached"],
                answer_tokens=counts["answer"],
                guessed_tokens=counts["guessed"],
                right_tokens=counts["right"],
                num_compiled=self._programs.num_traced
                + (self._encoder.num_traced if self._encoder is not None else 0),
            )

    def _added(self, step: EngineStep) -> dict[SequenceState, np.ndarray]:
        """Returns what is added to the logits of sequences; ends those whose grammar fails."""
        added = {}
        for _, work in self._open.drawing(step):
            sequence = work.sequence
            if sequence.adjustment is not None:
                try:
                    added[sequence] = sequence.adjustment.row(sequence.out)
                except Exception as error:
                    self._open.fail(sequence, error)
        return added

    def _restart(self, *, is_careful: bool) -> None:
        """Drops a step that failed: the cache may be lost, and the schedule half made."""
        self._in_flight.clear()
        self._open.restart(is_careful=is_careful)
        # The old cache first, or two of them would have to fit.
        jax.tree.map(lambda x: x.delete(), self._state)
        self._state = self._programs.initial(self._params)

    def _adjustment(self, sampling: Sampling) -> Adjustment | None:
        if not sampling.adjusts:
            return None
        matcher = None if sampling.grammar is None else self._grammars.read(sampling.grammar)
        return Adjustment(sampling, self.vocab_size, matcher)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the token ids of a prompt.

        Raises:
            ModelError: If the prompt is empty, or has tokens that the model lacks.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ModelError("the model has no tokenizer.\n  Give token ids.")
            try:
                encoded = self.tokenizer.encode(prompt.lower() if self._lowers else prompt)
            except UnicodeError as error:
                raise ModelError(f"the prompt is not Unicode: {error}.\n  Repair it.") from None
            except DataError as error:
                raise ModelError(str(error)) from None
            prompt = getattr(encoded, "ids", encoded)
        tokens = token_ids(prompt)
        if not tokens:
            raise ModelError("the prompt has no tokens.\n  Start from 1 token or more.")
        wrong = [token for token in tokens if not 0 <= token < self.vocab_size]
        if wrong:
            raise ModelError(
                f"the prompt has the tokens {', '.join(map(str, wrong[:4]))}, but the model has "
                f"only 0 to {self.vocab_size - 1}.\n  Encode the text with the model's tokenizer."
            )
        return tokens

    def _decoded(self, tokens: Sequence[int]) -> str:
        assert self.tokenizer is not None, "only texts are streamed"
        return self.tokenizer.decode(list(tokens))


def _scheduler(
    sizes: EngineSizes, num_lanes: int, share_prefixes: bool, state: DeviceState
) -> Scheduler:
    # Steps on a CPU take longer with each row; others read weights meanwhile.
    is_cpu = {device.platform for device in state.tokens.devices()} == {"cpu"}
    few_lanes = min([num_lanes, *(n for n in sizes.lane_counts if n)]) if is_cpu else num_lanes
    return Scheduler(
        num_groups=sizes.groups,
        num_slots=sizes.slots,
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        num_lanes=num_lanes,
        lane_width=sizes.lane,
        share_prefixes=share_prefixes,
        num_guesses=sizes.num_guesses,
        encoder_shapes=sizes.encoder_shapes,
        few_lanes=few_lanes,
    )
