"""`shardlib explain`."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.cli.arguments import (
    AsJson,
    ConfigPath,
    Overrides,
    check_writable,
    load_config,
    show,
    warn,
    writing,
)
from shardlib.cli.explain_serving import (
    Serve,
    ServeChunk,
    ServeMesh,
    ServeSlots,
    explain_serving,
)
from shardlib.cli.plan_serving import Cache, Context, Prompt, Weights, check_without_serving
from shardlib.errors import ConfigError

if TYPE_CHECKING:
    from shardlib.explain import StepReport
    from shardlib.run.config import RunConfig


On = Annotated[
    str | None,
    typer.Option(
        metavar="CLUSTER",
        help="Compile the step for this cluster, on any machine: v5e-16, 2xv5e-256, 64xh100, "
        "cpu:8.",
    ),
]
Abstract = Annotated[
    bool,
    typer.Option("--abstract", help="With --on: trace only, in seconds, and compile nothing."),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--diff",
        help="Compare CONFIG with the next argument, a config or a KEY=VALUE change; further keys "
        "change both. With --on.",
    ),
]
Optimize = Annotated[
    bool,
    typer.Option(
        "--optimize", help="Optimize TPU programs as for a run; takes five times as long."
    ),
]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Also write the report as a page.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Exit 1 for any fault that the baseline does not accept, or if the step does not fit; "
        "with --diff, for any fault that the first step does not have.",
    ),
]
BaselineFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Accepted faults, JSON or YAML.")
]
Accept = Annotated[bool, typer.Option("--accept", help="Write the faults found to the baseline.")]


def explain(
    config: ConfigPath,
    overrides: Overrides = None,
    on: On = None,
    abstract: Abstract = False,
    diff: Compare = False,
    optimize: Optimize = False,
    html: Html = None,
    as_json: AsJson = False,
    strict: Strict = False,
    baseline: BaselineFile = None,
    accept: Accept = False,
    serve: Serve = False,
    mesh: ServeMesh = None,
    slots: ServeSlots = None,
    chunk: ServeChunk = None,
    context: Context = None,
    prompt: Prompt = None,
    weights: Weights = None,
    cache: Cache = None,
) -> None:
    """Show how every parameter is sharded, and why.

    With --on, also show the traffic, memory and faults of the compiled step. Reports the errors
    that train would, except for errors in the data. Allocates nothing.
    """
    of_serving = {
        "mesh": mesh, "slots": slots, "chunk": chunk, "context": context, "prompt": prompt,
        "weights": weights, "cache": cache,
    }  # fmt: skip
    files = {"--html": html, "--baseline": baseline, "--accept": accept}
    if serve:
        of_training = {"KEY=VALUE": overrides, "--diff": diff, "--optimize": optimize, **files}
        options = {**of_serving, "compiles": not abstract}
        fits = explain_serving(config, on, options, of_training, as_json)
        raise typer.Exit(int(strict and not fits))
    check_without_serving(of_serving, "explains", "--serve")
    if on is not None:  # Does not use the devices of this machine.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    _check_options(on, abstract, {"--diff": diff, "--optimize": optimize, **files})
    if on is None or abstract:
        faults = _parameters(load_config(config, overrides), on, as_json, strict)
    elif diff:
        _check_diff(config, overrides, on, files)
        faults = _compare(config, overrides or [], on, optimize, as_json)
    else:
        for option, file in (("--html", html), ("--baseline", baseline if accept else None)):
            if file is not None:
                check_writable(option, file)
        loaded = load_config(config, overrides)
        report, faults = _compiled(loaded, on, optimize, baseline, accept)
        if html is not None:
            with writing(html), open(html, "w", encoding="utf-8") as file:
                file.write(report.html())
        show(report, as_json)
    if strict and faults:
        raise typer.Exit(1)


def _check_options(on: str | None, abstract: bool, given: dict[str, str | bool | None]) -> None:
    needing = [name for name, value in given.items() if value and name != "--accept"]
    looks = f"{', '.join(needing)} look{'s' * (len(needing) == 1)} at a compiled step"
    if needing and on is None:
        raise ConfigError(
            f"{looks}, and no cluster is given.\n  Name a cluster, as in --on v5e-16."
        )
    if needing and abstract:
        raise ConfigError(f"{looks}, and --abstract compiles none.\n  Leave --abstract out.")
    if given["--accept"] and not given["--baseline"]:
        raise ConfigError("--accept writes to a baseline.\n  Name it: --baseline faults.json.")
    if given["--optimize"] and on is not None:
        _check_optimize(on)


def _check_optimize(on: str) -> None:
    from shardlib.hardware import parse_cluster

    platform = parse_cluster(on).platform
    if platform != "tpu":
        raise ConfigError(
            f"--optimize is for TPU programs, and {on} has {platform.upper()} devices: their "
            "programs are already optimized as for a run.\n  Leave it out."
        )


def _check_diff(
    config: str, others: list[str] | None, on: str, files: dict[str, str | bool | None]
) -> None:
    if not others:
        raise ConfigError(
            "--diff compares two steps, but only one is given.\n  Add a config or a key to change: "
            f"shardlib explain --diff {config} mesh=fsdp=-1 --on {on}."
        )
    needless = [name for name, value in files.items() if value]
    if needless:
        raise ConfigError(
            f"{', '.join(needless)} {'is' if len(needless) == 1 else 'are'} for one step, but "
            "--diff compares two.\n  Explain the steps one by one for that. With --diff, --strict "
            "fails for faults that only the second step has."
        )


def _parameters(
    loaded: "RunConfig", on: str | None, as_json: bool, strict: bool
) -> Sequence[object]:
    """Prints the report on a run's state; returns its faults, which the report does not show."""
    from shardlib.run.reports.explaining import explain as run_explain

    report = run_explain(loaded, on)
    show(report, as_json)
    faults = report.faults()
    if strict and faults:
        print(*faults, sep="\n", file=sys.stderr)
    return faults


def _compiled(
    loaded: "RunConfig", on: str, optimize: bool, baseline: str | None, accept: bool
) -> tuple["StepReport", list[str]]:
    """Returns the report without accepted faults, and the faults that fail --strict."""
    import dataclasses

    from shardlib.explain.lint.baseline import Baseline, baseline_of, read_baseline, write_baseline
    from shardlib.run.reports.explaining import explain_compiled

    exists = baseline is not None and os.path.exists(baseline)
    accepted = read_baseline(baseline) if baseline and (exists or not accept) else Baseline()
    report = explain_compiled(loaded, on, optimize=optimize, notify=warn)
    if accept and baseline is not None:
        accepted = baseline_of(report.findings, accepted)
        with writing(baseline):
            write_baseline(accepted, baseline)
        count = len(accepted.entries)
        print(f"{baseline}: {count} accepted fault{'s' * (count != 1)} written", file=sys.stderr)
    judged = accepted.judge(report.findings)
    for entry in judged.unused:
        print(f"{baseline}: {entry} is accepted and was not found", file=sys.stderr)
    report = dataclasses.replace(report, findings=judged.new, accepted=judged.accepted)
    return report, [*map(str, judged.new), *([] if report.fits else [report.verdict()])]


def _compare(config: str, others: list[str], on: str, optimize: bool, as_json: bool) -> list[str]:
    """Prints the changes between two steps; returns the faults that fail --strict."""
    from shardlib.explain.report.diff import diff
    from shardlib.run.reports.explaining import explain_compiled

    other, rest = others[0], others[1:]
    is_config = os.path.exists(other) or "=" not in other
    first = load_config(config, rest)
    second = load_config(other, rest) if is_config else load_config(config, [*rest, other])
    before, after = (explain_compiled(each, on, optimize=optimize) for each in (first, second))
    difference = diff(before, after, names=(config, other if is_config else f"{config} {other}"))
    show(difference, as_json)
    return [*difference.new_faults, *([] if after.fits else [after.verdict()])]
