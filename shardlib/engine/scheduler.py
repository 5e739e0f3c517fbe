"""The scheduler: the sequences that a step works on.

The scheduler knows no clock, no device and no text: the same calls lead to the same steps, so that
several processes that are told the same agree without a word. A step is planned before the tokens
of the step before it are known. A sequence whose last token is already asked for gives back its
slot and pages at once, because later steps run after it.
"""

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from shardlib.engine.guesses import NGrams
from shardlib.engine.page_pool import PagePool, page_key
from shardlib.engine.sizes import EncoderShape
from shardlib.engine.steps import (
    DecodeRow,
    EncodedText,
    EngineStep,
    GroupStep,
    Lane,
    SequenceState,
)
from shardlib.errors import ModelError

_MANY = 4
"""Sequences that draw tokens, for each that is read or waits, from which on they are many. With
fewer, slow reading leaves too many slots idle."""
_FEWER_ROWS = 0.75
"""Rows of all steps with few lanes, for each of one with all lanes, up to which they are quicker.
In products of 96 rows each takes 1.2 times as long as in products of 288."""
_MOST_READ = 4096
"""Tokens that a step adds to the n-grams of a sequence at most."""


class _Group:
    """The slots and pages of a group of devices."""

    def __init__(self, num_slots: int, num_pages: int):
        self.pool = PagePool(num_pages)
        self.running: dict[int, SequenceState] = {}
        self.texts: list[EncodedText] = []
        """What the step that is planned encodes."""
        self.free_slots = list(range(num_slots))

    def in_order(self) -> list[SequenceState]:
        """Returns its sequences, the first to be served first."""
        return sorted(self.running.values(), key=lambda s: s.order)


class Scheduler:
    """Sequences that wait, and sequences that have a slot in one of several groups of devices.

    Args:
        num_slots: Sequences that run at once in a group.
        num_pages: Pages of the cache of a group, with page 0.
        page_size: Positions of a page.
        num_lanes: Lanes of a step in a group at most.
        lane_width: Tokens of a lane at most.
        share_prefixes: Whether sequences of a group share the pages of equal prefixes.
        num_groups: Groups of devices.
        num_guesses: Tokens of a lane at most that are guessed; less than `lane_width`. A step with
            guesses is read before the next is planned.
        encoder_shapes: Shapes of texts that an encoder reads; a step has texts of one shape.
        few_lanes: Lanes of a step at most while a prompt of more tokens than a step reads would
            hold up many sequences that draw tokens, each of its steps; and, without guesses, where
            steps with few lanes read all that is left sooner than one step with all lanes. None for
            `num_lanes`.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        num_lanes: int,
        lane_width: int,
        share_prefixes: bool = True,
        num_groups: int = 1,
        num_guesses: int = 0,
        encoder_shapes: Sequence[EncoderShape] = (),
        few_lanes: int | None = None,
    ):
        self._encoder_shapes = tuple(encoder_shapes)
        self.page_size, self.num_lanes, self.lane_width = page_size, num_lanes, lane_width
        self.share_prefixes, self.num_guesses = share_prefixes, num_guesses
        self.few_lanes = num_lanes if few_lanes is None else few_lanes
        rows, rows_of_few = (num_slots + n * lane_width for n in (num_lanes, self.few_lanes))
        self._most_by_few = self.few_lanes * int(_FEWER_ROWS * rows / rows_of_few)
        """Lanes that steps with few lanes read sooner than one step with all."""
        self._sizes = num_slots, num_pages
        self._groups = [_Group(*self._sizes) for _ in range(num_groups)]
        self.waiting: list[SequenceState] = []
        self._count = 0
        self.num_preemptions = 0
        self._trial: tuple[SequenceState, int] | None = None
        """The last sequence that was admitted, and how many tokens of its answer were known."""
        self._careful_until = 0
        """Sequences up to this number may break a step, and are admitted one at a time."""

    @property
    def suspect(self) -> SequenceState | None:
        """The sequence that a failed step is put down to: the last one admitted, if they are
        admitted one at a time and it has drawn no token since."""
        if not self.is_careful or self._trial is None:
            return None
        sequence, known = self._trial
        is_waiting = sequence.slot is None and not sequence.in_flight
        is_tried = sequence.ended or len(sequence.out) > known or is_waiting
        return None if is_tried else sequence

    @property
    def is_careful(self) -> bool:
        """Whether sequences are admitted one at a time, as one of them may break a step."""
        return self._careful_until > 0

    @property
    def pools(self) -> list[PagePool]:
        """The pages of each group."""
        return [group.pool for group in self._groups]

    @property
    def num_slots(self) -> int:
        """Sequences that run at once in all groups."""
        return self._sizes[0] * len(self._groups)

    @property
    def running(self) -> list[SequenceState]:
        """The sequences that have a slot."""
        return [one for group in self._groups for one in group.running.values()]

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or has a slot."""
        return bool(self.waiting or self.running)

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence.

        Raises:
            ModelError: If it does not fit into the cache even alone.
        """
        longest, have = len(sequence.prompt) + sequence.max_tokens, self._sizes[1] - 1
        if self._pages_for(longest) > have:
            raise ModelError(
                f"{longest} tokens need {self._pages_for(longest)} pages, and the cache has "
                f"{have}.\n  Ask for fewer tokens, or give the engine more pages."
            )
        self._count += 1
        sequence.number = self._count
        self._queue(sequence)

    def end(self, sequence: SequenceState) -> None:
        """Ends a sequence, wherever it is. Tokens that come later are dropped."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self._leave(sequence)
        sequence.ended = True

    def encoded(self, sequence: SequenceState) -> None:
        """Ends a sequence whose embedding is known, and all that was to be computed."""
        sequence.in_flight = 0
        self.end(sequence)

    def checked(self, lane: Lane, num_right: int) -> None:
        """Records how many guesses of a lane were right; `drawn` records its tokens after that."""
        lane.sequence.computed -= len(lane.guessed) - num_right
        lane.sequence.in_flight += num_right

    def drawn(self, sequence: SequenceState, token: int) -> None:
        """Records the next token of a sequence; the answer ends at a stop or at its longest."""
        sequence.in_flight -= 1
        if sequence.ended:
            return
        sequence.out.append(token)
        if token in sequence.stops or len(sequence.out) == sequence.max_tokens:
            self.end(sequence)
        elif sequence.slot is not None:
            self._offer(sequence)

    def forget(self) -> None:
        """Forgets all prefixes, also those that running sequences have begun."""
        for pool in self.pools:
            pool.forget()
        for sequence in self.running:
            sequence.is_stale = True

    def restart(self, sequences: Iterable[SequenceState], *, is_careful: bool = False) -> None:
        """Begins with an empty cache: `sequences`, all that are not complete, wait with the tokens
        that they have. If `is_careful`, they are admitted one at a time, so that one which breaks a
        step is found."""
        self._trial, self._careful_until = None, self._count if is_careful else 0
        self._groups = [_Group(*self._sizes) for _ in self._groups]
        self.waiting = []
        for sequence in sequences:
            sequence.slot, sequence.pages, sequence.ended = None, [], False
            sequence.computed = sequence.in_flight = sequence.num_offered = 0
            sequence.ngrams = NGrams()
            del sequence.keys[sequence.num_known // self.page_size :]
            self._queue(sequence)

    def plan(self) -> EngineStep | None:
        """Returns the next step; None if there is nothing to compute until a token is known."""
        self._make_way()
        decodes = [list(self._decodes(group)) for group in self._groups]
        for group in self._groups:
            group.texts = []
        most = self._most_lanes()
        lanes = self._lanes(most)
        guesses = [
            list(self._guesses(group, rows, most - len(taken)))
            for group, rows, taken in zip(self._groups, decodes, lanes, strict=True)
        ]
        texts = [group.texts for group in self._groups]
        step = EngineStep(tuple(map(_group_step, decodes, lanes, guesses, texts)))
        works = [work for group in step.groups for part in group for work in part]
        for row in itertools.chain(*(group.decodes for group in step.groups), *guesses):
            row.sequence.computed += 1 + len(row.guessed)
            row.sequence.in_flight += 1
        for sequence in {work.sequence: None for work in works}:
            if sequence.num_drawn == sequence.max_tokens:
                self._offer(sequence)
                self._leave(sequence)
        return step if works else None

    def _make_way(self) -> None:
        """Sends back the fewest sequences of a higher priority number for the first waiting one, if
        it fits nowhere without and somewhere with their slots and pages."""
        if not self.waiting or self.is_careful:
            return
        first, found = self.waiting[0], []
        if first.in_flight or all(one.priority <= first.priority for one in self.running):
            return
        for number, group in enumerate(self._groups):
            last_first = reversed(group.in_order())
            lower = [one for one in last_first if one.priority > first.priority]
            if self._fits(first, group, lower):
                sent = (lower[:count] for count in range(len(lower) + 1))
                fewest = next(some for some in sent if self._fits(first, group, some))
                found.append((len(fewest), number, fewest))
        if found:
            for sequence in min(found)[2]:
                self._preempt(sequence)

    def _fits(
        self, sequence: SequenceState, group: _Group, without: Sequence[SequenceState]
    ) -> bool:
        """Returns whether a group has a slot and pages for a waiting sequence, `without` some."""
        if not group.free_slots and not without:
            return False
        need = self._pages_for(sequence.num_known) + self._growing(group, without)
        released = itertools.chain.from_iterable(one.pages for one in without)
        return group.pool.has_room(need, self._prefix_keys(sequence), released)

    def _growing(self, group: _Group, without: Sequence[SequenceState] = ()) -> int:
        """Returns how many running sequences may need a page more, `without` some."""
        return sum(
            len(one.pages) < self._pages_for(len(one.prompt) + one.max_tokens)
            for one in group.running.values()
            if one not in without
        )

    def _decodes(self, group: _Group) -> Iterator[DecodeRow]:
        """Yields the sequences that draw one token after another, each with a page for it."""
        for sequence in group.in_order():
            # A later one may have been preempted for one before it.
            is_reading = sequence.computed < sequence.read_until
            if sequence.slot is not None and not is_reading and self._grown(sequence, group):
                pages = tuple(sequence.pages)
                yield DecodeRow(sequence, sequence.slot, sequence.computed, pages)

    def _guesses(self, group: _Group, rows: Iterable[DecodeRow], most: int) -> Iterator[Lane]:
        """Yields at most so many lanes in place of rows whose next tokens can be guessed."""
        for row in rows:
            if most and (guessed := self._guessed(row.sequence, group)):
                most -= 1
                tokens = (*row.sequence.tokens(row.position, row.position + 1), *guessed)
                pages = tuple(row.sequence.pages)
                yield Lane(row.sequence, row.slot, row.position, tokens, True, pages, guessed)

    def _guessed(self, sequence: SequenceState, group: _Group) -> tuple[int, ...]:
        """Returns the tokens that may follow the last one of a sequence, with pages for them."""
        # The last token that is drawn has no use for a guess after it.
        most = min(self.num_guesses, sequence.max_tokens - len(sequence.out) - 1)
        if most < 1 or sequence.in_flight or sequence.adjustment is not None:
            return ()
        ngrams = sequence.ngrams
        # A long prompt over several steps, each of which others wait for.
        end = min(sequence.num_known, len(ngrams) + _MOST_READ)
        ngrams.extend(sequence.tokens(len(ngrams), end))
        if end < sequence.num_known:
            return ()
        guessed = ngrams.guess(most)
        need = self._pages_for(sequence.computed + 1 + len(guessed)) - len(sequence.pages)
        if guessed and need > 0 and group.pool.num_available >= need + self._growing(group):
            sequence.pages += group.pool.take(need) or []
        return guessed[: len(sequence.pages) * self.page_size - sequence.computed - 1]

    def _grown(self, sequence: SequenceState, group: _Group) -> bool:
        """Returns whether a sequence has a page for its next position, at the cost of the last ones
        if need be."""
        while len(sequence.pages) <= sequence.computed // self.page_size:
            if (pages := group.pool.take(1)) is not None:
                sequence.pages += pages
                continue
            last = max(group.running.values(), key=lambda s: s.order)
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        """Sends a sequence back; it is computed again, with the tokens that it has."""
        self._leave(sequence)
        sequence.computed = sequence.num_offered = 0
        sequence.num_preempted += 1
        self.num_preemptions += 1
        self._queue(sequence)

    def _most_lanes(self) -> int:
        """Returns the lanes of the next step in a group at most."""
        running = self.running
        readers = [one for one in running if one.computed < one.read_until]
        num_drawing, num_free = len(running) - len(readers), self.num_slots - len(running)
        admitted = [*readers, *self.waiting[:num_free]]
        readers += self.waiting
        if self.few_lanes == self.num_lanes or not readers:
            return self.num_lanes
        longest = max(one.num_known - one.num_encoded for one in readers)
        is_long = longest > self.num_lanes * self.lane_width
        if is_long and num_drawing >= _MANY * len(readers):
            return self.few_lanes
        return self.few_lanes if self._can_be_few(admitted) else self.num_lanes

    def _can_be_few(self, readers: Sequence[SequenceState]) -> bool:
        """Returns whether steps with few lanes read all that is left sooner than one with all. Not
        with guesses, which take lanes too, and texts of an encoder, which reads many at once."""
        if self.num_guesses:
            return False
        left = self._most_by_few
        for sequence in readers:
            left -= -(-self._num_unread(sequence) // self.lane_width)
            if left < 0 or sequence.num_encoded:
                return False
        return True

    def _num_unread(self, sequence: SequenceState) -> int:
        """Returns the tokens of a sequence that are to be read."""
        start = sequence.computed
        if sequence.slot is None:
            keys = self._prefix_keys(sequence)
            start = min(pool.num_shared(keys) for pool in self.pools) * self.page_size
        return sequence.num_known - start

    def _lanes(self, most: int) -> list[list[Lane]]:
        """Returns the lanes of each group, at most so many. Of one priority, sequences whose tokens
        are being read come first, and then new ones."""
        lanes: list[list[Lane]] = [[] for _ in self._groups]
        readers = [one for one in self.running if one.computed < one.read_until]
        readers.sort(key=lambda s: s.order)
        for reader in readers:
            self._admit(lanes, most, reader.priority)
            mine = lanes[reader.group]
            mine += self._lanes_of(reader, most - len(mine))
        self._admit(lanes, most)
        return lanes

    def _admit(self, lanes: list[list[Lane]], most: int, before: int | None = None) -> None:
        """Admits waiting sequences in their order while groups have slots, pages and lanes for
        them; with `before`, sequences of lower priorities alone."""
        while not self._is_trying() and (sequence := self._next()) is not None:
            if before is not None and sequence.priority >= before:
                return
            free = [
                number
                for number, group in enumerate(self._groups)
                if group.free_slots and len(lanes[number]) < most and self._has_row(group, sequence)
            ]
            free.sort(key=functools.partial(self._preference, sequence))
            if not any(self._admitted(number, sequence) for number in free):
                return
            mine = lanes[sequence.group]
            mine += self._lanes_of(sequence, most - len(mine))

    def _preference(self, sequence: SequenceState, number: int) -> tuple[int, int]:
        """Returns a number for each group, the least of the best: lanes that read what its cache
        lacks of a sequence, then how many run."""
        group = self._groups[number]
        cached = group.pool.num_shared(self._prefix_keys(sequence)) * self.page_size
        return -((cached - sequence.num_known) // self.lane_width), len(group.running)

    def _next(self) -> SequenceState | None:
        """Returns the first waiting sequence. Once a step has texts to encode, it is the first with
        a text of their shape, or without one."""
        texts = [text for group in self._groups for text in group.texts]
        if not texts:
            return self.waiting[0] if self.waiting else None
        fitting = (None, self._shape_of(texts[0].sequence))
        return next((one for one in self.waiting if self._shape_of(one) in fitting), None)

    def _shape_of(self, sequence: SequenceState) -> EncoderShape | None:
        """Returns the shape of the text of a sequence that an encoder reads; None without one."""
        if not sequence.num_encoded:
            return None
        return next(one for one in self._encoder_shapes if one.length >= sequence.num_encoded)

    def _has_row(self, group: _Group, sequence: SequenceState) -> bool:
        shape = self._shape_of(sequence)
        return shape is None or len(group.texts) < shape.rows

    def _lanes_of(self, sequence: SequenceState, most: int) -> Iterator[Lane]:
        while most and sequence.computed < sequence.read_until:
            start = sequence.computed
            end = min(start + self.lane_width, sequence.read_until)
            draws, most = end == sequence.read_until, most - 1
            assert sequence.slot is not None
            tokens = tuple(sequence.tokens(start, end))
            lane = Lane(sequence, sequence.slot, start, tokens, draws, tuple(sequence.pages))
            sequence.computed = end
            sequence.in_flight += draws
            self._offer(sequence)
            yield lane

    def _admitted(self, number: int, sequence: SequenceState) -> bool:
        """Admits a waiting sequence if a group has pages for all its tokens; returns whether."""
        group = self._groups[number]
        if sequence.in_flight:
            # It was preempted, and its last tokens are not known yet.
            return False
        known, pages = sequence.num_known, group.pool.shared(self._prefix_keys(sequence))
        # A page more for each sequence that may need one, or the new one is soon sent back.
        taken = None
        need = self._pages_for(known) - len(pages)
        if group.pool.num_available >= need + self._growing(group):
            taken = group.pool.take(need)
        if taken is None:
            group.pool.release(pages)
            return False
        self.waiting.remove(sequence)
        sequence.group, sequence.slot = number, group.free_slots.pop(0)
        group.running[sequence.slot] = sequence
        sequence.pages = [*pages, *taken]
        sequence.computed = sequence.num_encoded or len(pages) * self.page_size
        sequence.num_offered, sequence.read_until = len(pages), known
        sequence.is_stale = False
        self._trial = sequence, len(sequence.out)
        if sequence.num_cached is None:
            sequence.num_cached = len(pages) * self.page_size
        if sequence.num_encoded:
            group.texts.append(EncodedText(sequence, tuple(sequence.pages)))
            sequence.in_flight += sequence.is_encoded_only
        return True

    def _is_trying(self) -> bool:
        """Returns whether a suspect is being tried; the last one that passes ends the trials."""
        if not self.is_careful:
            return False
        if self.suspect is not None:
            return True
        if all(one.number > self._careful_until for one in self.waiting):
            self._careful_until = 0
        return False

    def _prefix_keys(self, sequence: SequenceState) -> list[bytes]:
        """Returns the keys of the pages that a sequence may share."""
        # The scores of a prompt are computed with its keys and values, and an encoder reads all.
        is_read = sequence.sampling.prompt_logprobs or sequence.num_encoded
        if not self.share_prefixes or is_read:
            return []
        # The last token is always computed: what follows it is not in the cache.
        most = (sequence.num_known - 1) // self.page_size
        self._extend_keys(sequence, most)
        return sequence.keys[:most]

    def _offer(self, sequence: SequenceState) -> None:
        """Offers the pages that are full of known tokens."""
        if not self.share_prefixes or sequence.is_stale or sequence.num_encoded:
            return
        pool = self._groups[sequence.group].pool
        full = min(sequence.computed, sequence.num_known) // self.page_size
        self._extend_keys(sequence, full)
        for number in range(sequence.num_offered, full):
            pool.publish(sequence.pages[number], sequence.keys[number])
        sequence.num_offered = max(sequence.num_offered, full)

    def _extend_keys(self, sequence: SequenceState, count: int) -> None:
        for number in range(len(sequence.keys), count):
            start = number * self.page_size
            parent = sequence.keys[-1] if sequence.keys else sequence.root
            tokens = sequence.tokens(start, start + self.page_size)
            sequence.keys.append(page_key(parent, tokens))

    def _leave(self, sequence: SequenceState) -> None:
        """Takes slot and pages from a sequence."""
        if sequence.slot is None:
            return
        group = self._groups[sequence.group]
        del group.running[sequence.slot]
        bisect.insort(group.free_slots, sequence.slot)
        sequence.slot, sequence.ngrams = None, NGrams()
        group.pool.release(sequence.pages)
        sequence.pages = []

    def _queue(self, sequence: SequenceState) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def _group_step(
    rows: Iterable[DecodeRow], lanes: list[Lane], guesses: list[Lane], texts: list[EncodedText]
) -> GroupStep:
    """Returns the work of a group, with lanes that have guesses in place of the rows of their
    sequences."""
    slots = {lane.slot for lane in guesses}
    decodes = tuple(row for row in rows if row.slot not in slots)
    return GroupStep(decodes, (*lanes, *guesses), tuple(texts))
