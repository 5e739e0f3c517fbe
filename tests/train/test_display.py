"""What is printed, to a pipe and to a terminal, and that drawing is rare."""

import io
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shardlib import humanize
from shardlib.log import ascii_plot
from shardlib.log.display import Display, Header

HEADER = Header(
    devices="8 x CPU",
    mesh="data=2,fsdp=4",
    num_params=923_456,
    param_bytes_per_device=461_728,
    units_per_step=4096,
    flops_per_step=2.5e10,
    run_dir="runs/quickstart",
    extra={"data": "builtin:python"},
)


FULL = {"grad_norm": 0.5, "tokens_per_second": 6512.0, "mfu": 0.4125, "data_wait_seconds": 0.01}


def show(display, step, *, full=False):
    row = {"loss": 8.0 / step, "mfu": None, **(FULL if full else {})}
    more = {"mean_seconds": 0.5, "memory_bytes": 3 * 2**30} if full else {}
    display.step(step, row, **more)


class Output:
    """A console of either kind, and what it got."""

    def __init__(self, *, terminal=False, width=100, encoding="utf-8"):
        self.bytes = io.BytesIO()
        self._file = io.TextIOWrapper(self.bytes, encoding=encoding, write_through=True)
        self.console = Console(
            file=self._file,
            width=width,
            height=30,
            force_terminal=terminal,
            highlight=False,
            color_system=None,
            _environ={"TERM": "xterm"},
        )
        self.encoding = encoding

    @property
    def text(self):
        return self.bytes.getvalue().decode(self.encoding)


def test_a_pipe_gets_every_nth_step_as_one_line_however_long():
    out = Output(width=40)
    with Display(25, log_every=10, console=out.console) as display:
        for step in range(1, 26):
            show(display, step, full=step == 10)
    assert out.text == (
        "step  1/25  loss 8.000\n"
        "step 10/25  loss 0.8000  grad norm 0.5000  6.51K tokens/s  MFU 41.2 %  "
        "memory 3.0 GiB  data wait 2.0 %  ETA 0:08\n"
        "step 20/25  loss 0.4000\n"
        "step 25/25  loss 0.3200\n"
    )


def test_a_sample_cannot_steer_the_terminal_and_is_no_markup():
    out = Output()
    Display(10, console=out.console).sample(
        3, "def f(", "):\n\t\tpass\x1b[2J\x07 [bold]b[/bold] é\n"
    )
    assert "\x1b" not in out.text
    assert "\x07" not in out.text
    assert "def f(" in out.text
    assert r"        pass\x1b[2J\x07 [bold]b[/bold] é" in out.text


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_every_encoding_can_be_written(encoding):
    out = Output(encoding=encoding)
    with Display(3, console=out.console) as display:
        display.header(HEADER)
        show(display, 1)
        display.sample(1, "λ", "→ 漢字")
        display.closing(
            "finished", results={"loss": 1.0}, commands={"a": "b"}, steps=[1, 2], losses=[2.0, 1.0]
        )
    assert "finished" in out.text
    if encoding == "ascii":
        assert r"\u2192 \u6f22" in out.text


def test_other_processes_print_nothing():
    for terminal in (False, True):
        out = Output(terminal=terminal)
        with Display(3, enabled=False, console=out.console) as display:
            display.header(HEADER)
            display.waiting("compiling")
            show(display, 1, full=True)
            display.evaluation(1, {"loss": 1.0})
            display.sample(1, "a", "b")
            display.notice("c")
            display.closing("finished", results={}, commands={"a": "b"})
        assert out.text == ""


def test_a_terminal_sees_progress_in_place():
    out = Output(terminal=True)
    with Display(20, console=out.console, refresh_seconds=0.0) as display:
        for step in range(1, 11):
            show(display, step, full=True)
        display.notice("saved step 10")
    assert "step 10/20" in out.text
    assert "50 %  ETA 0:05" in out.text
    assert "loss\N{NO-BREAK SPACE}0.8000" in out.text
    assert "\x1b[2K" in out.text  # Lines are erased before they are drawn again.
    assert out.text.count("saved step 10") == 1
    assert "\x1b[?25h" in out.text  # The cursor is shown again.


def test_many_steps_draw_rarely():
    out = Output(terminal=True)
    with Display(10_001, console=out.console, refresh_seconds=3600.0) as display:
        for step in range(1, 10_001):
            show(display, step)
        assert out.text.count("step ") == 1
        show(display, 10_001)
        assert out.text.count("step ") == 2


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (humanize.count(999_999), "1M"),
        (humanize.flops(9.9999e11), "1 TFLOP"),
        (humanize.size(1023.999 * 1024), "1.0 MiB"),
        (humanize.gib(2**29), "0.5 GiB"),
        (humanize.bandwidth(31.5e9), "31.5 GB/s"),
        (humanize.bandwidth(3.352e12), "3,350 GB/s"),
        (humanize.duration(0.99999), "1 s"),
        (humanize.duration(math.nan), "?"),
        (humanize.clock(3 * 86400 + 4 * 3600 + 300), "3d 04:05"),
        (humanize.plural(2, "loss"), "2 losses"),
        (humanize.value(1.2345e-5), "1.2e-05"),
    ],
)
def test_human_readable_numbers(got, want):
    assert got == want


@settings(max_examples=200, deadline=None)
@given(st.floats(1, 9.9e14))
def test_counts_keep_three_digits(number):
    digits, unit = re.fullmatch(r"([\d.]+)([KMBT]?)", humanize.count(number)).groups()
    assert float(digits) * 1000.0 ** " KMBT".index(unit or " ") == pytest.approx(
        number, rel=5.01e-3
    )


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=200),
    width=st.integers(8, 70),
    ascii_only=st.booleans(),
)
def test_any_curve_is_drawn_within_its_box(values, width, ascii_only):
    lines = ascii_plot.plot(range(len(values)), values, width=width, ascii_only=ascii_only)
    if any(map(math.isfinite, values)):
        assert len(lines) == 10
        assert len({len(line) for line in lines}) == 1
    else:
        assert lines == ["(no finite values to draw)"]
