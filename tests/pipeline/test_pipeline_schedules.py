"""Schedules, played through turn by turn: what is needed is there, what is kept stays."""

import itertools
from collections import Counter

import pytest

from shardlib.errors import ModelError
from shardlib.train.pipeline import (
    bubble_fraction,
    forward_schedule,
    make_schedule,
    schedule_faults,
)
from shardlib.train.pipeline.sends import sends

SIZES = [
    (name, stages, chunks, microbatches)
    for name, stages, chunks, microbatches in itertools.product(
        ("gpipe", "1f1b", "interleaved"), (2, 3, 4, 8), (1, 2, 3), (3, 4, 8, 12, 24)
    )
    if not schedule_faults(name, stages=stages, microbatches=microbatches, chunks=chunks)
]


def play(schedule):
    """Plays a schedule as stages would; returns the forward and backward turns of each stage.

    A turn finds its input among what the stage before made in the tick before, and keeps it in its
    slot; the backward turn finds it there again.
    """
    stages, chunks = schedule.stages, schedule.chunks
    slots = [[None] * schedule.num_slots for _ in range(stages)]
    sent, sent_back = {}, {}
    done, done_back = [set() for _ in range(stages)], [set() for _ in range(stages)]
    for tick in range(len(schedule.forward.microbatch)):
        arrived, arrived_back, sent, sent_back = sent, sent_back, {}, {}
        for stage in range(stages):
            forward = [int(x[tick, stage]) for x in schedule.forward]
            microbatch, chunk, slot = forward
            if microbatch < 0:
                assert forward == [-1, -1, -1]
            else:
                place = chunk * stages + stage
                assert place == 0 or arrived.get(place) == microbatch
                assert (slot < 0) == (place == 0 or schedule.backward is None)
                if slot >= 0:
                    slots[stage][slot] = (microbatch, chunk)
                sent[place + 1] = microbatch
                assert (microbatch, chunk) not in done[stage]
                done[stage].add((microbatch, chunk))
            if schedule.backward is None:
                continue
            backward = [int(x[tick, stage]) for x in schedule.backward]
            microbatch, chunk, slot = backward
            if microbatch < 0:
                assert backward == [-1, -1, -1]
                continue
            place = chunk * stages + stage
            assert (microbatch, chunk) in done[stage], "forward comes first"
            assert place == chunks * stages - 1 or arrived_back.get(place) == microbatch
            assert (slot < 0) == (place == 0)
            assert slot < 0 or slots[stage][slot] == (microbatch, chunk)
            sent_back[place - 1] = microbatch
            done_back[stage].add((microbatch, chunk))
    return done, done_back


def every_turn(schedule):
    return set(itertools.product(range(schedule.microbatches), range(schedule.chunks)))


@pytest.mark.parametrize(("name", "stages", "chunks", "microbatches"), SIZES)
def test_every_turn_is_taken_once_with_what_it_needs(name, stages, chunks, microbatches):
    schedule = make_schedule(name, stages=stages, chunks=chunks, microbatches=microbatches)
    done, done_back = play(schedule)
    assert done == done_back == [every_turn(schedule)] * stages


@pytest.mark.parametrize(("name", "stages", "chunks", "microbatches"), SIZES)
def test_idle_turns_are_the_bubble_of_the_literature(name, stages, chunks, microbatches):
    schedule = make_schedule(name, stages=stages, chunks=chunks, microbatches=microbatches)
    taken = 2 * chunks * microbatches
    fraction = (stages - 1) / (chunks * microbatches + stages - 1)
    assert 1 - taken / schedule.turns == pytest.approx(fraction, rel=1e-12)
    found = bubble_fraction(stages=stages, microbatches=microbatches, chunks=chunks)
    assert found == pytest.approx(fraction, rel=1e-12)


@pytest.mark.parametrize(("name", "stages", "chunks", "microbatches"), SIZES)
def test_stages_send_once_a_turn_and_never_when_idle(name, stages, chunks, microbatches):
    schedule = make_schedule(name, stages=stages, chunks=chunks, microbatches=microbatches)
    for turns, step, end in ((schedule.forward, 1, stages - 1), (schedule.backward, -1, 0)):
        found = sends(schedule, turns, step)
        sent = [pair for tick in found.ticks for pair in found.routes[tick]]
        assert {target for source, target in sent if source == 0} <= {step % stages}
        expected = dict.fromkeys(range(stages), microbatches * chunks)
        expected[end] -= microbatches  # of the chunk at the end of the model
        assert Counter(source for source, _ in sent) == Counter(expected)
        assert len(found.routes) <= 2 * stages
        assert found.scope.split("_")[2:] == [
            str((found.ticks == at).sum()) for at in range(len(found.routes))
        ]


def test_kept_inputs_are_bounded_by_stages_or_by_microbatches():
    for stages, microbatches in itertools.product((2, 4, 8), (8, 16, 64)):
        sizes = {"stages": stages, "microbatches": microbatches}
        assert make_schedule("1f1b", **sizes).num_slots == min(2 * stages - 3, microbatches)
        assert make_schedule("gpipe", **sizes).num_slots == microbatches
    for stages, chunks in itertools.product((2, 4, 8), (2, 3)):
        found = {
            make_schedule(
                "interleaved", stages=stages, chunks=chunks, microbatches=groups * stages
            ).num_slots
            for groups in (4, 8, 16)
        }
        assert found == {(chunks + 1) * stages - 3}


@pytest.mark.parametrize("microbatches", [1, 3, 4, 16])
def test_forward_alone(microbatches):
    schedule = forward_schedule(stages=4, microbatches=microbatches)
    done, _ = play(schedule)
    assert done == [every_turn(schedule)] * 4
    assert len(schedule.forward.microbatch) == schedule.turns == microbatches + 3


REFUSALS = {
    "unknown": ({"name": "1fb1"}, "'1fb1'. Did you mean '1f1b'.*\n  Choose one of: 1f1b, gpipe"),
    "few": ({"name": "1f1b"}, "2 microbatches do not fill 4 .*\n  Use at least microbatches=4"),
    "groups": ({"name": "interleaved", "chunks": 2}, "in groups of 4.\n  Use a multiple of 4, or"),
    "chunks": ({"name": "gpipe", "chunks": 2}, "2 chunks of layers .*\n  Only interleaved cuts"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused(case):
    options, text = REFUSALS[case]
    with pytest.raises(ModelError, match=text):
        make_schedule(stages=4, microbatches=2, **options)


def test_layers_that_do_not_divide():
    faults = schedule_faults("interleaved", stages=4, microbatches=8, chunks=2, num_layers=12)
    assert faults == [
        "12 layers cannot be cut into 4 stages of 2 chunks: each stage stores 3.\n"
        "  Use a number of layers that 8 divides, or other stages or chunks."
    ]
    faults = schedule_faults("1f1b", stages=4, microbatches=3, num_layers=3)
    assert [fault.split()[:2] for fault in faults] == [["3", "microbatches"], ["4", "stages"]]
    assert not schedule_faults("interleaved", stages=4, microbatches=8, chunks=2, num_layers=13)
