"""Which phase each second belongs to."""

import contextlib
import sys

from shardlib.runtime.phases import PHASES, PhaseClock


def test_each_second_belongs_to_the_innermost_phase():
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    clock = PhaseClock(lambda: next(times))
    with clock.within("restore"), clock.within("compile"):  # from 1, from 3
        pass  # back in `restore` from 6, in `init` from 10, and it is 15 when asked
    assert clock.seconds() == {
        **dict.fromkeys(PHASES, 0.0),
        "init": 1.0 + 5.0,
        "restore": 2.0 + 4.0,
        "compile": 3.0,
    }


def test_a_phase_begins_anew_with_each_progress():
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    assert clock.present == ("init", 0.0)
    clock.enter("step")
    now[0] = 5.0
    assert clock.present == ("step", 5.0)
    clock.progress()
    assert clock.present == ("step", 0.0)
    now[0] = 7.0
    assert clock.present == ("step", 2.0)
    assert clock.seconds()["step"] == 7.0


def test_what_was_before_the_clock_has_not_hung():
    clock = PhaseClock(lambda: 5.0, age_seconds=3600.0)
    assert clock.present == ("init", 0.0)
    assert clock.seconds()["init"] == 3600.0


def test_an_error_ends_a_phase():
    clock = PhaseClock()
    with contextlib.suppress(OSError), clock.within("save"):
        raise OSError
    assert clock.present[0] == "init"


def test_another_thread_counts_every_second_once_at_whatever_moment_it_looks():
    """Between any two instructions of the thread that drives the clock."""
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    seen = []

    def look(frame, event, argument):
        frame.f_trace_opcodes = True
        if frame.f_globals is PhaseClock.enter.__globals__:
            seen.append((now[0], sum(clock.seconds().values()), *clock.present))
        return look

    former = sys.gettrace()
    try:
        for phase in ("compile", "step", "step", "save"):
            now[0] += 5.0
            sys.settrace(look)
            clock.enter(phase)
            clock.progress()
            sys.settrace(former)
    finally:
        sys.settrace(former)
    assert len(seen) > 100
    assert [total for _, total, _, _ in seen] == [wall for wall, _, _, _ in seen]
    assert {(phase, age) for _, _, phase, age in seen} == {
        (phase, age) for phase in ("init", "compile", "step", "save") for age in (0.0, 5.0)
    } - {("init", 0.0), ("save", 5.0)}
