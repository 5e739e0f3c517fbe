"""The metrics file and its guarantees, rates."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.errors import ShardlibError
from shardlib.log.metrics import MetricsWriter, StepTimer, read_metrics


def write(run_dir, steps, **keys):
    with MetricsWriter(run_dir, **keys) as writer:
        for step in steps:
            writer.write(step, {"loss": 1.0 / step})


def steps_of(run_dir):
    return [row["step"] for row in read_metrics(run_dir)]


@settings(max_examples=25, deadline=None)
@given(written=st.integers(0, 12), resume=st.integers(0, 12), more=st.integers(0, 4))
def test_resuming_keeps_steps_unique(tmp_path_factory, written, resume, more):
    run_dir = tmp_path_factory.mktemp("run")
    write(run_dir, range(1, written + 1))
    resume = min(resume, written)
    write(run_dir, range(resume + 1, resume + more + 1), resume_step=resume)
    assert steps_of(run_dir) == list(range(1, resume + more + 1))
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path):
    write(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "lo')
    assert steps_of(tmp_path) == [1, 2]
    write(tmp_path, [3], resume_step=2)
    assert steps_of(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    "foreign",
    [
        *("hello", '{"loss": 2.0}', '{"step": "2"}', '{"step": null}'),
        *('{"step": 2, "spent": "5"}', '{"step": 2, "spent": {"step": ""}}'),
    ],
)
def test_a_foreign_line_is_named(tmp_path, foreign):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "loss": 2.0}}\n{foreign}\n{{"step": 2}}\n')
    with pytest.raises(
        ShardlibError, match=r"(?s)2: not the metrics of a step.*Remove that line, or"
    ):
        read_metrics(tmp_path)


def test_a_foreign_line_does_not_keep_a_run_from_resuming(tmp_path):
    path, warnings = tmp_path / "metrics.jsonl", []
    path.write_text('{"step": 1, "loss": 2.0}\nhello\n{"step": 2}\n{"step": 3}\n')
    with MetricsWriter(tmp_path, resume_step=2, warn=warnings.append) as writer:
        assert writer.kept == {"step": 2}
        writer.write(3, {"loss": 1.0})
    assert warnings == [f"{path}:2: not the metrics of a step: 'hello'. The line is passed over."]
    lines = ['{"step": 1, "loss": 2.0}', "hello", '{"step": 2}', '{"step": 3, "loss": 1.0}']
    assert path.read_text().splitlines() == lines


def test_a_rewind_takes_rows_away_and_goes_on(tmp_path):
    write(tmp_path, [1, 2, 3])
    with MetricsWriter(tmp_path, resume_step=3) as writer:
        assert writer.kept == writer.last == {"step": 3, "loss": 1 / 3}
        for step in (4, 5, 6):
            writer.write(step, {"loss": math.nan})
        assert writer.rewind(4) == {"step": 4, "loss": pytest.approx(math.nan, nan_ok=True)}
        writer.write(5, {"loss": 0.5})
        assert writer.rewind(2) == {"step": 2, "loss": 0.5}
        assert steps_of(tmp_path) == [1, 2]
        assert writer.rewind(2) == {"step": 2, "loss": 0.5}
        with pytest.raises(
            ValueError, match=r"^metrics of step 2 follow step 2: steps must increase$"
        ):
            writer.write(2, {"loss": 1.0})
        writer.write(3, {"loss": 0.25})
    assert steps_of(tmp_path) == [1, 2, 3]
    with MetricsWriter(tmp_path, resume_step=3) as writer:
        assert writer.rewind(0) is None
    assert read_metrics(tmp_path) == []


def test_step_times_leave_out_compilation_and_pauses():
    times = iter([0.0, 9.0, 10.0, 12.0, 50.0, 51.0])
    timer = StepTimer(window=2, clock=lambda: next(times))
    assert timer.tick() == 9.0
    assert timer.mean_step_seconds is None
    assert timer.tick() == 1.0
    assert timer.tick() == 2.0
    assert timer.mean_step_seconds == 1.5
    timer.restart()
    assert timer.tick() == 1.0
    assert timer.mean_step_seconds == 1.5
