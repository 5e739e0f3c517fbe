"""`shardlib explain`."""

import json
import os
import sys
from typing import Annotated, Any

import typer

from shardlib.cli.arguments import AsJson, ConfigPath, Overrides, console, load_config
from shardlib.errors import ConfigError

On = Annotated[
    str | None,
    typer.Option(
        metavar="CLUSTER",
        help="Compile the step for it, wherever this runs: v5e-16, 2xv5e-256, 64xh100, cpu:8.",
    ),
]


def explain(
    config: ConfigPath,
    overrides: Overrides = None,
    on: On = None,
    abstract: Annotated[
        bool,
        typer.Option("--abstract", help="With --on: trace only, in seconds, and compile nothing."),
    ] = False,
    diff: Annotated[
        bool,
        typer.Option(
            "--diff",
            help="Compare CONFIG with what follows it, a config or one KEY=VALUE of it; further "
            "keys change both. With --on.",
        ),
    ] = False,
    optimize: Annotated[
        bool,
        typer.Option(
            "--optimize", help="Compile for TPUs as for a run, which takes five times as long."
        ),
    ] = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the report as a page.")
    ] = None,
    as_json: AsJson = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit 1 for any fault that the baseline does not accept, or if the step does not "
            "fit.",
        ),
    ] = False,
    baseline: Annotated[
        str | None, typer.Option(metavar="FILE", help="Faults that are accepted, JSON or YAML.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Write the faults found to the baseline.")
    ] = False,
) -> None:
    """Show how every parameter is sharded and why; with --on, what the compiled step sends, holds
    and does wrong. Refuses what train would, but for faults of the data. Allocates nothing."""
    compiles = on is not None and not abstract
    if on is not None:  # No device of this machine has a part in it.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    _check_options(
        compiles,
        {"--diff": diff, "--html": html, "--baseline": baseline, "--optimize": optimize},
        accept=accept and baseline is None,
    )
    if diff:
        _compare(config, overrides, str(on), optimize=optimize, as_json=as_json)
        return
    loaded = load_config(config, overrides)
    report: Any
    if compiles:
        report, faults = _compiled(loaded, str(on), optimize, baseline, accept)
    else:
        from shardlib.run.inspecting import explain as run_explain

        report = run_explain(loaded, on)
        faults = report.faults()
    if html is not None:
        with open(html, "w", encoding="utf-8") as file:
            file.write(report.html())
    _print(report, as_json)
    if strict and faults:
        if not compiles:
            print(*faults, sep="\n", file=sys.stderr)
        raise typer.Exit(1)


def _check_options(compiles: bool, given: dict[str, Any], *, accept: bool) -> None:
    needing = [name for name, value in given.items() if value]
    if needing and not compiles:
        raise ConfigError(
            f"{', '.join(needing)} looks at a compiled step, and nothing says for what to compile."
            "\n  Name a cluster, as in --on v5e-16, without --abstract."
        )
    if accept:
        raise ConfigError("--accept writes to a baseline.\n  Name it: --baseline faults.json.")


def _compiled(
    loaded: Any, on: str, optimize: bool, baseline: str | None, accept: bool
) -> tuple[Any, list[str]]:
    """Returns the report without accepted faults, and what --strict fails for."""
    import dataclasses

    from shardlib.explain.baseline import Baseline, baseline_of, read_baseline, write_baseline
    from shardlib.run.inspecting import explain_compiled

    exists = baseline is not None and os.path.exists(baseline)
    accepted = read_baseline(baseline) if baseline and (exists or not accept) else Baseline()
    report = explain_compiled(loaded, on, optimize=optimize)
    if accept and baseline is not None:
        accepted = baseline_of(report.findings, accepted)
        write_baseline(accepted, baseline)
    judged = accepted.judge(report.findings)
    for entry in judged.unused:
        print(f"{baseline}: {entry} is accepted and was not found", file=sys.stderr)
    report = dataclasses.replace(report, findings=judged.new)
    return report, [*map(str, judged.new), *([] if report.fits else [report.verdict()])]


def _compare(
    config: str, others: list[str] | None, on: str, *, optimize: bool, as_json: bool
) -> None:
    if not others:
        raise ConfigError(
            "--diff compares two steps, and one is given.\n  Add a config or a key to change: "
            f"shardlib explain --diff {config} mesh=fsdp=-1 --on {on}."
        )
    from shardlib.explain.diff import diff
    from shardlib.run.inspecting import explain_compiled

    other, rest = others[0], others[1:]
    is_config = os.path.exists(other) or "=" not in other
    first = load_config(config, rest)
    second = load_config(other, rest) if is_config else load_config(config, [*rest, other])
    before, after = (explain_compiled(each, on, optimize=optimize) for each in (first, second))
    _print(diff(before, after), as_json)


def _print(report: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        console().print(report.render())
