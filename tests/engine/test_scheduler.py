"""The scheduler and its pages, run against a memory of tokens in place of a model.

The next token of a sequence is a digest of all before it, so that a wrong page would change it.
"""

import random

import pytest

from shardlib.engine.page_pool import PagePool, page_key
from shardlib.engine.scheduler import Scheduler
from shardlib.engine.sizes import EncoderShape, engine_sizes
from shardlib.engine.steps import SequenceState
from shardlib.errors import ModelError

VOCAB = 3
SHAPES = EncoderShape(3, 4), EncoderShape(2, 8), EncoderShape(1, 32)


def following(tokens):
    return hash(tuple(tokens)) % VOCAB


class Machine:
    """Runs steps on a memory that holds a token for each position of each page."""

    def __init__(self, scheduler):
        self.scheduler, self.size = scheduler, scheduler.page_size
        self.memory = {}
        self.last = {}
        self.in_flight = []
        self.num_right = 0

    def read(self, group, pages, end):
        return [self.memory[group, pages[at // self.size], at % self.size] for at in range(end)]

    def write(self, group, pages, at, token):
        self.memory[group, pages[at // self.size], at % self.size] = token

    def run_group(self, number, group):
        assert len({row.slot for row in group.decodes}) == len(group.decodes)
        for text in group.texts:
            for at, token in enumerate(text.tokens):
                self.write(number, text.pages, at, token)
        for row in group.decodes:
            self.write(number, row.pages, row.position, self.last[number, row.slot])
        for lane in group.lanes:
            for at, token in enumerate(lane.tokens, lane.start):
                self.write(number, lane.pages, at, token)
        ends = [(row, row.position + 1) for row in group.decodes]
        ends += [
            (lane, lane.start + len(lane.tokens) - len(lane.guessed))
            for lane in group.lanes
            if lane.draws
        ]
        drawn = []
        for row, end in ends:
            seen = self.read(number, row.pages, end + len(row.guessed))
            sequence = row.sequence
            assert seen[:end][: sequence.num_known] == sequence.tokens(0, end)
            tokens = [following(seen[:end])]
            for guess in row.guessed:
                if tokens[-1] != guess:
                    break
                tokens.append(following(seen[: end + len(tokens)]))
            drawn.append((row, (number, row.slot), tokens))
        return drawn

    def run(self):
        """Plans and runs a step, and makes the tokens of the step before it known."""
        step = self.scheduler.plan()
        drawn = []
        if step is not None:
            for number, group in enumerate(step.groups):
                drawn += self.run_group(number, group)
            self.last |= {slot: tokens[-1] for _, slot, tokens in drawn}
        texts = [text for group in (step.groups if step else ()) for text in group.texts]
        self.check_texts(texts, step)
        self.in_flight.append((drawn, texts))
        while len(self.in_flight) > (1 if step and not self.scheduler.num_guesses else 0):
            drawn, texts = self.in_flight.pop(0)
            for text in texts:
                if text.sequence.is_encoded_only:
                    self.scheduler.encoded(text.sequence)
            for row, _, tokens in drawn:
                if row.guessed:
                    self.num_right += len(tokens) - 1
                    self.scheduler.checked(row, len(tokens) - 1)
                for token in tokens:
                    self.scheduler.drawn(row.sequence, token)
        return bool(step or self.scheduler.busy)

    @property
    def busy(self):
        return any(drawn or texts for drawn, texts in self.in_flight)

    def check_texts(self, texts, step):
        """Texts of a step have one shape, which is the first that holds them."""
        if texts:
            shape = next(one for one in SHAPES if one.length >= len(texts[0].tokens))
            shorter = max((one.length for one in SHAPES if one.length < shape.length), default=0)
            assert all(shorter < len(text.tokens) <= shape.length for text in texts)
            assert all(len(group.texts) <= shape.rows for group in step.groups)


def whole(pool):
    """Every page is free, used or idle, and just one of these."""
    used = sum(users > 0 for users in pool._users)
    assert used == pool.num_used
    assert pool.num_available + used == pool.num_pages - 1
    assert len({*pool._free, *pool._idle}) == pool.num_available


def expected(sequence):
    tokens = list(sequence.prompt)
    while len(tokens) < len(sequence.prompt) + sequence.max_tokens:
        tokens.append(following(tokens))
        if tokens[-1] in sequence.stops:
            break
    return tokens[len(sequence.prompt) :]


def simulate(seed, num_requests, guesses=False, texts=False):
    """Runs random requests; with `texts` an encoder reads some prompts, wholly or but the last
    token."""
    rng = random.Random(seed)
    width = rng.randint(1, 8)
    scheduler = Scheduler(
        num_slots=rng.randint(1, 6),
        num_pages=1 + rng.randint(12, 40),
        page_size=rng.choice([1, 2, 4, 5]),
        num_lanes=rng.randint(1, 4),
        lane_width=width,
        share_prefixes=rng.random() < 0.8,
        num_groups=rng.randint(1, 3),
        num_guesses=rng.randint(0, width - 1) if guesses else 0,
        encoder_shapes=SHAPES,
        few_lanes=1 if seed % 2 else None,
    )
    machine, sequences, cancelled = Machine(scheduler), [], set()
    stems = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(3)]
    while len(sequences) < num_requests or scheduler.busy or machine.busy:
        for _ in range(rng.choice([0, 0, 1, 3]) if len(sequences) < num_requests else 0):
            size = rng.randint(1, 10)
            prompt = (*rng.choice(stems)[: rng.randint(0, 12)], *rng.choices(range(VOCAB), k=size))
            room = (scheduler.pools[0].num_pages - 1) * scheduler.page_size - len(prompt)
            if room < 1:
                continue
            longest = min(rng.randint(1, 9), room)
            num_encoded = rng.choice([0, len(prompt) - 1, len(prompt)]) if texts else 0
            sequences.append(
                SequenceState(
                    prompt,
                    1 if num_encoded == len(prompt) else longest,
                    stops=frozenset(rng.choice([(), (1,)])),
                    priority=rng.choice([0, 0, 1]),
                    num_encoded=num_encoded,
                )
            )
            scheduler.add(sequences[-1])
        if sequences and rng.random() < 0.05:
            chosen = rng.choice(sequences)
            if not chosen.ended and len(chosen.out) != chosen.max_tokens:
                cancelled.add(chosen)
                scheduler.end(chosen)
        machine.run()
        for pool in scheduler.pools:
            whole(pool)
    for sequence in sequences:
        found, right = sequence.out, expected(sequence)
        if sequence.is_encoded_only:
            assert sequence.ended
            assert not found
            continue
        assert found == right[: len(found)] if sequence in cancelled else found == right
    assert not any(pool.num_used for pool in scheduler.pools)
    assert not any(len(sequence.ngrams) for sequence in sequences)
    shared = sum(bool(s.num_cached) for s in sequences)
    return scheduler.num_preemptions, shared, machine.num_right


@pytest.mark.rest("mesh", keep=2)
@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("texts", [False, True])
def test_every_answer_is_right_in_any_company(guesses, texts):
    counts = [simulate(seed, 60, guesses, texts) for seed in range(90 if texts else 60)]
    preempted, shared, right = map(sum, zip(*counts, strict=True))
    # The simulation reaches what it is for.
    assert preempted > 50
    assert shared > (30 if texts else 100)
    assert (right > 300) == guesses


@pytest.mark.soak
def test_nothing_leaks_over_many_requests():
    for seed in range(100, 110):
        simulate(seed, 3000, guesses=seed % 2 == 0, texts=seed % 4 > 1)


def test_a_page_that_other_weights_began_is_not_shared():
    scheduler = Scheduler(num_slots=2, num_pages=20, page_size=2, num_lanes=4, lane_width=4)
    old, new = SequenceState((1,) * 5, 6), SequenceState((1,) * 5, 1)
    scheduler.add(old)
    machine = Machine(scheduler)
    machine.run()
    scheduler.forget()
    scheduler.add(new)
    while not (old.ended and new.ended):
        machine.run()
    assert new.num_cached == 0
    # The two full pages of the new one alone, and not those of the old answer.
    late = SequenceState((*old.prompt, *old.out), 1)
    scheduler.add(late)
    machine.run()
    assert late.num_cached == 4


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_right_after_restarts(seed):
    rng = random.Random(seed)
    sizes = {"num_slots": 3, "num_pages": 14, "page_size": 2, "num_lanes": 2, "lane_width": 4}
    scheduler = Scheduler(**sizes, num_guesses=seed % 4)
    machine = Machine(scheduler)
    sequences = [SequenceState((0,) * rng.randint(1, 9), rng.randint(1, 9)) for _ in range(12)]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.busy or machine.busy:
        if rng.random() < 0.1:
            # A step that was planned, and never ran.
            scheduler.plan()
            machine.in_flight.clear()
            scheduler.restart([s for s in sequences if len(s.out) < s.max_tokens])
        machine.run()
        for pool in scheduler.pools:
            whole(pool)
    assert [s.out for s in sequences] == [expected(s) for s in sequences]
    assert not any(pool.num_used for pool in scheduler.pools)


def test_a_long_prompt_holds_up_many_sequences_a_little():
    def lanes_of_steps(size, num_drawing, num_late=1):
        """Returns the lanes of each step that reads prompts which come while others draw."""
        scheduler = Scheduler(
            num_slots=16,
            num_pages=99,
            page_size=4,
            num_lanes=4,
            lane_width=2,
            few_lanes=1,
            share_prefixes=False,
        )
        machine = Machine(scheduler)
        for _ in range(num_drawing):
            scheduler.add(SequenceState((0,), 40))
        for _ in range(10):
            machine.run()
        late = [SequenceState((1,) * size, 1) for _ in range(num_late)]
        for sequence in late:
            scheduler.add(sequence)
        counts = []
        while any(not sequence.num_drawn for sequence in late):
            step = scheduler.plan()
            counts.append(len(step.groups[0].lanes))
            assert len(step.groups[0].decodes) == num_drawing
        return counts

    assert lanes_of_steps(10, 4) == [1, 1, 1, 1, 1]
    # Prompts that a step reads, a few sequences, and prompts that wait for each other.
    assert lanes_of_steps(8, 4) == [4]
    assert lanes_of_steps(10, 3) == [4, 1]
    assert lanes_of_steps(10, 0) == [4, 1]
    assert lanes_of_steps(10, 7, num_late=2) == [4, 4, 1, 1]


def test_what_is_left_is_read_in_the_fewest_rows():
    """A step has 12 or 36 rows: 4 slots, and 2 or 8 lanes of 4 tokens."""
    scheduler = Scheduler(
        num_slots=4, num_pages=99, page_size=4, num_lanes=8, lane_width=4, few_lanes=2
    )

    def lanes_of_steps(*prompts):
        late = [SequenceState(prompt, 1) for prompt in prompts]
        for sequence in late:
            scheduler.add(sequence)
        counts = []
        while any(not sequence.num_drawn for sequence in late):
            counts.append(len(scheduler.plan().groups[0].lanes))
        for sequence in late:
            scheduler.drawn(sequence, 0)
        return counts

    assert lanes_of_steps((1,) * 16) == [2, 2]
    assert lanes_of_steps((2,) * 17) == [5]
    assert lanes_of_steps((3,) * 44) == [8, 2, 1]
    assert lanes_of_steps((4,) * 9, (5,) * 3) == [2, 2]
    assert lanes_of_steps((6,) * 9, (7,) * 5) == [5]
    # The first 40 tokens are in the cache.
    assert lanes_of_steps((3,) * 40 + (4,) * 13) == [2, 2]
    assert lanes_of_steps((3,) * 40 + (5,) * 17) == [5]


def test_guesses_and_texts_take_all_lanes_that_there_are():
    sizes = {"num_slots": 6, "num_pages": 99, "page_size": 4, "num_lanes": 8, "lane_width": 4}
    scheduler = Scheduler(**sizes, few_lanes=2, num_guesses=2)
    # The last one waits for a slot.
    for _ in range(7):
        scheduler.add(SequenceState((1, 2, 3, 1), 20))
    step = scheduler.plan().groups[0]
    for lane in step.lanes:
        scheduler.drawn(lane.sequence, 2)
    guesses = [lane.guessed for lane in scheduler.plan().groups[0].lanes]
    assert guesses == [(3, 1)] * 6

    shape = EncoderShape(rows=8, length=16)
    scheduler = Scheduler(**sizes, few_lanes=2, encoder_shapes=[shape])
    for _ in range(6):
        scheduler.add(SequenceState((1,) * 9 + (0,), 4, num_encoded=9))
    step = scheduler.plan().groups[0]
    assert (len(step.texts), len(step.lanes)) == (6, 6)


def test_a_prompt_that_never_fits_is_refused():
    scheduler = Scheduler(num_slots=2, num_pages=5, page_size=4, num_lanes=1, lane_width=8)
    with pytest.raises(ModelError, match="17 tokens need 5 pages, and the cache has 4"):
        scheduler.add(SequenceState((0,) * 10, 7))
    assert not scheduler.busy


def test_a_lower_priority_goes_first():
    scheduler = Scheduler(num_slots=1, num_pages=9, page_size=4, num_lanes=1, lane_width=8)
    late, soon = SequenceState((0,), 2, priority=1), SequenceState((0,), 2)
    scheduler.add(late)
    scheduler.add(soon)
    assert [lane.sequence for lane in scheduler.plan().groups[0].lanes] == [soon]


@pytest.mark.parametrize(("num_slots", "num_pages"), [(2, 99), (8, 1 + 6)])
def test_a_lower_priority_takes_the_place_of_a_running_sequence(num_slots, num_pages):
    """Slots bind in one case, and pages in the other."""
    scheduler = Scheduler(
        num_slots=num_slots, num_pages=num_pages, page_size=4, num_lanes=2, lane_width=8
    )
    machine = Machine(scheduler)
    late = [SequenceState((0,) * 5, 7, priority=1) for _ in range(2)]
    soon = [SequenceState((number,) * 5, 7) for number in (1, 2)]
    for sequence in late:
        scheduler.add(sequence)
    for _ in range(3):
        machine.run()
    assert all(sequence.out for sequence in late)
    for sequence in soon:
        scheduler.add(sequence)
    while any(not sequence.ended for sequence in soon):
        machine.run()
    assert not any(sequence.ended for sequence in late)
    while machine.run() or machine.busy:
        pass
    for sequence in (*late, *soon):
        assert sequence.out == expected(sequence)
    # Those of equal priority never do.
    assert scheduler.num_preemptions == sum(one.num_preempted for one in late)


def added(scheduler, *sequences):
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_long_prompt_of_a_higher_priority_number_is_read_later(num_slots):
    scheduler = Scheduler(num_slots=num_slots, num_pages=99, page_size=4, num_lanes=1, lane_width=4)
    machine = Machine(scheduler)
    (late,) = added(scheduler, SequenceState((0,) * 100, 2, priority=1))
    machine.run()
    (soon,) = added(scheduler, SequenceState((1,), 2))
    for _ in range(4):
        machine.run()
    assert soon.ended
    while machine.run() or machine.busy:
        pass
    assert late.out == expected(late)


def test_no_sequence_is_sent_back_where_a_slot_is_free():
    """One has become free since the last step."""
    scheduler = Scheduler(num_slots=2, num_pages=99, page_size=4, num_lanes=2, lane_width=4)
    machine = Machine(scheduler)
    first, late = added(scheduler, SequenceState((0,), 4), SequenceState((1,), 9, priority=1))
    machine.run()
    machine.run()
    (soon,) = added(scheduler, SequenceState((2,), 2))
    scheduler.end(first)
    while machine.run() or machine.busy:
        pass
    assert (soon.ended, late.ended, scheduler.num_preemptions) == (True, True, 0)


def test_no_sequence_is_sent_back_in_vain():
    """Its pages would not be enough: the prompt waits for one of its own priority."""
    scheduler = Scheduler(num_slots=4, num_pages=13, page_size=4, num_lanes=2, lane_width=32)
    machine = Machine(scheduler)
    most, late = added(
        scheduler, SequenceState((0,) * 24, 8), SequenceState((1,) * 4, 4, priority=1)
    )
    machine.run()
    (soon,) = added(scheduler, SequenceState((2,) * 24, 8))
    while not late.ended:
        machine.run()
    assert not most.ended
    while machine.run() or machine.busy:
        pass
    assert (scheduler.num_preemptions, soon.out) == (0, expected(soon))


def test_sequences_that_share_a_prefix_release_it_together():
    scheduler = Scheduler(num_slots=8, num_pages=41, page_size=4, num_lanes=4, lane_width=64)
    machine = Machine(scheduler)
    late = added(
        scheduler, *(SequenceState((*(0,) * 80, n, 1, 1), 9, priority=1) for n in range(4))
    )
    for _ in range(3):
        machine.run()
    assert sum(bool(one.num_cached) for one in late) > 1
    (soon,) = added(scheduler, SequenceState((1,) * 120, 3))
    for _ in range(6):
        machine.run()
    assert soon.ended
    while machine.run() or machine.busy:
        pass
    assert all(one.out == expected(one) for one in (*late, soon))


def test_a_prefix_that_one_sequence_holds_is_not_counted_twice():
    """It is released with its sequence, and taken again: no page is won."""
    scheduler = Scheduler(num_slots=8, num_pages=27, page_size=4, num_lanes=4, lane_width=64)
    machine = Machine(scheduler)
    most, late = added(
        scheduler, SequenceState((2,) * 60, 4), SequenceState((0,) * 32, 8, priority=1)
    )
    for _ in range(2):
        machine.run()
    assert late.slot is not None
    (soon,) = added(scheduler, SequenceState((*(0,) * 32, *(1,) * 28), 4))
    while not most.ended:
        machine.run()
    assert scheduler.num_preemptions == 0
    while machine.run() or machine.busy:
        pass
    assert soon.out == expected(soon)


def test_sequences_of_one_group_are_sent_back():
    """Both groups are full, and one has a sequence that gives way."""
    scheduler = Scheduler(
        num_slots=1, num_pages=9, page_size=4, num_lanes=1, lane_width=4, num_groups=2
    )
    machine = Machine(scheduler)
    added(scheduler, SequenceState((0,), 20), SequenceState((1,), 20, priority=1))
    machine.run()
    (soon,) = added(scheduler, SequenceState((2,), 2))
    machine.run()
    assert soon.slot is not None
    assert scheduler.num_preemptions == 1


@pytest.mark.parametrize("context", [16, 32, 64])
def test_pages_for_all_slots_fill_them(context):
    sizes = engine_sizes(
        slots=16, context=context, pages=None, page_size=16, chunk=64, lane=32, max_length=None,
        deterministic=False,
    )  # fmt: skip
    scheduler = Scheduler(
        num_slots=16, num_pages=sizes.num_pages, page_size=16, num_lanes=16, lane_width=32
    )
    half = context // 2
    added(scheduler, *(SequenceState((n,) * half, half) for n in range(16)))
    machine = Machine(scheduler)
    machine.run()
    assert len(scheduler.running) == 16
    while machine.run() or machine.busy:
        pass
    assert scheduler.num_preemptions == 0


def test_texts_of_an_encoder_fill_its_program():
    sizes = engine_sizes(
        slots=32, context=512, pages=None, page_size=16, chunk=2048, lane=32, max_length=None,
        deterministic=False, encodes=True, writes=False,
    )  # fmt: skip
    scheduler = Scheduler(
        num_slots=sizes.slots, num_pages=sizes.num_pages, page_size=sizes.page_size, num_lanes=64,
        lane_width=32, encoder_shapes=sizes.encoder_shapes,
    )  # fmt: skip
    added(scheduler, *(SequenceState((n,) * 60, 1, num_encoded=60) for n in range(64)))
    (group,) = scheduler.plan().groups
    assert len(group.texts) == sizes.encoder_shapes[0].rows == 32


def test_a_group_that_holds_the_prefix_is_chosen():
    scheduler = Scheduler(
        num_slots=4, num_pages=99, page_size=4, num_lanes=4, lane_width=8, num_groups=2
    )
    machine = Machine(scheduler)
    first, other = added(scheduler, SequenceState((0,) * 33, 9), SequenceState((1,) * 9, 9))
    machine.run()
    machine.run()
    (second,) = added(scheduler, SequenceState((0,) * 33, 9))
    machine.run()
    assert (first.group, other.group, second.group) == (0, 1, 0)
    assert second.num_cached == 32


def test_idle_pages_are_given_away_oldest_first_and_ends_before_starts():
    pool = PagePool(4)
    pages = pool.take(3)
    keys = [page_key(b"", [n]) for n in range(3)]
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    pool.release(pages)
    assert (pool.num_idle, pool.num_available) == (3, 3)
    assert pool.take(1) == [pages[2]]
    assert pool.shared(keys) == pages[:2]
    assert pool.take(1) is None


def test_forgotten_prefixes_are_not_shared():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.publish(page, b"a")
    pool.forget()
    assert pool.shared([b"a"]) == []
    pool.release([page])
    assert (pool.num_idle, pool.num_available) == (0, 2)
