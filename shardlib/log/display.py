"""The display of a run: a header, live progress or plain lines, samples and a closing card.

In a terminal the progress is redrawn in place a few times a second; elsewhere every `log_every`th
step prints one line. Nothing here waits for a device, and a step without drawing costs
microseconds.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardlib import humanize
from shardlib.log import ascii_plot

_PLOT_WIDTH = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """Facts about a run that are known before its first step."""

    devices: str
    """Description such as `8 x TPU v5e`."""
    mesh: str
    """The mesh, drawn or described; may have several lines."""
    num_params: int
    param_bytes_per_device: int | None = None
    """Largest number of parameter bytes on any device."""
    units_per_step: int
    """Tokens (or images) in one global batch."""
    flops_per_step: float | None = None
    """Model FLOPs of one step, forward and backward."""
    run_dir: str
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further rows by name."""


Row = Mapping[str, float | None]
"""The metrics of a step by the names of `metrics.jsonl`."""


class Display:
    """Prints the progress of a run. Use it as a context manager around the training loop.
    `log_every` is the steps between lines where the output is not a terminal. All processes but the
    first are not `enabled`."""

    def __init__(
        self,
        total_steps: int,
        *,
        unit: str = "tokens",
        log_every: int = 10,
        enabled: bool = True,
        console: Console | None = None,
        refresh_seconds: float = 0.2,
    ):
        self.total_steps = total_steps
        self.unit = unit
        self.log_every = log_every
        self.enabled = enabled
        self.console = console or Console(highlight=False)
        self._refresh_seconds = refresh_seconds
        self._drawn_at = -math.inf
        self._losses: list[float] = []
        self._live: Live | None = None

    def __enter__(self) -> "Display":
        live = self.console.is_terminal and not self.console.is_dumb_terminal
        if self.enabled and live:
            # No separate drawing thread: it would take time from the training loop.
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def header(self, header: Header) -> None:
        """Prints the facts known before the first step."""
        params = f"{humanize.count(header.num_params)} parameters"
        if header.param_bytes_per_device is not None:
            params += f", {humanize.size(header.param_bytes_per_device)} per device"
        step = f"{header.units_per_step:,} {self.unit}"
        if header.flops_per_step is not None:
            step += f", {humanize.flops(header.flops_per_step)}"
        rows = {
            "devices": header.devices,
            "mesh": header.mesh,
            "model": params,
            "step": step,
            **header.extra,
            "run": header.run_dir,
        }
        self._print(_panel(self._grid(rows), "shardlib"))

    def waiting(self, text: str) -> None:
        """Shows the work of the run before its next step, such as compiling."""
        if self._live is not None:
            self._live.update(self._text(text, "dim"), refresh=True)
        else:
            self.notice(text)

    def step(
        self,
        step: int,
        row: Row,
        *,
        mean_seconds: float | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """Shows one finished step: in place, or as a line for every `log_every`th step.

        Args:
            step: The number of the step.
            row: Its metrics. `loss` is required; other missing values are not shown.
            mean_seconds: Mean time of the latest steps, for the time left and the data wait.
            memory_bytes: Peak bytes in use on the fullest device.
        """
        if not self.enabled:
            return
        self._losses.append(row["loss"] or 0.0)
        is_last = step == self.total_steps
        if self._live is None:
            if step % self.log_every == 0 or step == 1 or is_last:
                fields = self._fields(row, mean_seconds, memory_bytes)
                place = f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"
                self._line("  ".join([place, *fields, *self._time_left(step, mean_seconds)]))
            return
        now = time.monotonic()
        if now - self._drawn_at >= self._refresh_seconds or is_last:
            self._drawn_at = now
            fields = self._fields(row, mean_seconds, memory_bytes)
            left = self._time_left(step, mean_seconds)
            self._live.update(self._progress(step, fields, left), refresh=True)

    def forget(self, steps: int) -> None:
        """Forgets the latest steps, which the run repeats."""
        del self._losses[max(0, len(self._losses) - steps) :]

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Prints the results of an evaluation by name."""
        shown = "  ".join(f"{name} {humanize.value(value)}" for name, value in values.items())
        self._line(f"eval at step {step}  {shown}", "cyan")

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Prints a text sample: the prompt and the model's continuation."""
        body = Text.assemble((self._safe(prompt), "bold"), self._safe(text.rstrip()))
        self._print(_panel(body, f"sample at step {step}"))

    def notice(self, text: str) -> None:
        """Prints one line, such as `saved step 200`."""
        self._line(text, "dim")

    def warning(self, text: str) -> None:
        """Prints one line as a warning."""
        self._line(f"warning: {text}", "bold yellow")

    def closing(
        self,
        title: str,
        *,
        results: Mapping[str, float | str],
        commands: Mapping[str, str],
        steps: Sequence[int] = (),
        losses: Sequence[float] = (),
    ) -> None:
        """Prints the closing card: a title such as `finished` or `stopped at step 120`, the loss
        curve (losses [n] at steps [n] in order, with gaps for non-finite values), final numbers,
        and next commands by purpose, without line breaks for copying."""
        parts: list[RenderableType] = []
        if steps:
            width = max(20, min(_PLOT_WIDTH, self.console.width - 20))
            ascii_only = self._ascii_only
            lines = ascii_plot.plot(steps, losses, width=width, ascii_only=ascii_only)
            parts += [Text("loss", "bold"), Text("\n".join(lines), "green", no_wrap=True), Text()]
        shown = {
            name: value if isinstance(value, str) else humanize.value(value)
            for name, value in results.items()
        }
        if shown:
            parts.append(self._grid(shown))
        elif parts:
            parts.pop()
        self.__exit__()
        self._print(_panel(Group(*parts), title))
        width = max((len(name) for name in commands), default=0)
        for name, command in commands.items():
            self._line(f"  {name:<{width}}  {command}")

    # The methods below convert values to text.

    @property
    def _ascii_only(self) -> bool:
        return not self.console.encoding.lower().startswith("utf")

    def _print(self, what: RenderableType) -> None:
        if self.enabled:
            self.console.print(what)

    def _line(self, text: str, style: str = "") -> None:
        if self.enabled:
            self.console.print(self._text(text, style), soft_wrap=True)

    def _text(self, text: str, style: str = "") -> Text:
        return Text(self._safe(text), style)

    def _safe(self, text: str) -> str:
        """Escapes control characters, so that model output cannot control the terminal."""
        shown = "".join(
            c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text.expandtabs(4)
        )
        return shown.encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)

    def _grid(self, rows: Mapping[str, str]) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, text in rows.items():
            grid.add_row(self._text(name), self._text(text))
        return grid

    def _fields(self, row: Row, mean_seconds: float | None, memory_bytes: int | None) -> list[str]:
        fields = [f"loss {humanize.value(row['loss'] or 0.0)}"]
        if (norm := row.get("grad_norm")) is not None:
            fields.append(f"grad norm {humanize.value(norm)}")
        if (rate := row.get(f"{self.unit}_per_second")) is not None:
            fields.append(f"{humanize.count(rate)} {self.unit}/s")
        if (mfu := row.get("mfu")) is not None:
            fields.append(f"MFU {100 * mfu:.1f} %")
        if memory_bytes is not None:
            fields.append(f"memory {humanize.size(memory_bytes)}")
        if (wait := row.get("data_wait_seconds")) is not None and mean_seconds:
            fields.append(f"data wait {100 * wait / mean_seconds:.1f} %")
        return fields

    def _time_left(self, step: int, mean_seconds: float | None) -> list[str]:
        if mean_seconds is None:
            return []
        return [f"ETA {humanize.clock(mean_seconds * max(0, self.total_steps - step))}"]

    def _progress(self, step: int, fields: list[str], left: list[str]) -> RenderableType:
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(f"step {step}/{self.total_steps}", "bold"),
            ProgressBar(total=self.total_steps, completed=step),
            Text(f"{100 * step / self.total_steps:.0f} %  {''.join(left)}"),
        )
        # A thousand losses are enough for it, and a long run has millions.
        losses = self._losses[:: len(self._losses) // 1000 + 1]
        trend = ascii_plot.sparkline(losses, 12, ascii_only=self._ascii_only)
        fields = [f"{fields[0]} {trend}", *fields[1:]]
        if not self._ascii_only:  # In a narrow terminal, lines break only between fields.
            fields = [field.replace(" ", "\N{NO-BREAK SPACE}") for field in fields]
        line = Text("  ".join(fields))
        line.stylize("bold green", 0, len(fields[0]) - len(trend))
        return Group(bar, line)


def _panel(body: RenderableType, title: str) -> Panel:
    return Panel(body, title=title, title_align="left", box=ROUNDED, expand=False, padding=(0, 1))
