"""`shardlib checkpoint ls | verify | diff | reshard`: inspection and resharding of checkpoints."""

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.arguments import AsJson, Command, console, warn
from shardlib.errors import CheckpointError, ConfigError, check_run
from shardlib.humanize import plural, size
from shardlib.tables import Table

if TYPE_CHECKING:
    from shardlib.checkpoint import Manifest, SavedCheckpoints
    from shardlib.checkpoint.manifest import CheckpointDiff
    from shardlib.run.resharding import ReshardPlan

app = typer.Typer(
    help="List, verify, compare and reshard the checkpoints of a run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_MOST_LEAVES = 20
_MOST_CHARACTERS = 60

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Directory of a run, or of its checkpoints."),
]
RunAtStep = Annotated[
    str,
    typer.Argument(metavar="RUN[@STEP]", help="Directory of a run, or of one checkpoint."),
]
Step = Annotated[int | None, typer.Option(help="The checkpoint; default: the newest.")]


@app.command("ls", cls=Command)
def list_(run: Run, as_json: AsJson = False) -> None:
    """List the checkpoints of a run.

    The columns are step, time, size, mesh, samples seen and metrics.
    """
    _check_whole(run)
    saved = _open(run)
    rows = [
        _facts(manifest, tier)
        for tier, place in saved.tiers.items()
        for manifest in place.manifests().values()
    ]
    rows.sort(key=lambda row: row["step"])
    is_damaged = not rows and bool(_candidates(saved, None))
    if not rows and not is_damaged:  # An empty list is for a run that has not saved yet.
        from shardlib.run.directory import RunDirectory

        RunDirectory(run).config_of_run()
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        console().print(_table(rows, with_tier=len(saved.tiers) > 1))
    elif not is_damaged:
        print(f"no checkpoint in {saved.directory}")
    if is_damaged:
        raise _nothing_complete(saved, run)


@app.command(cls=Command)
def verify(
    run: RunAtStep,
    step: Annotated[int | None, typer.Option(help="Only this step; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Verify every file and every array by the saved digests.

    Exits 1 on damage, or if there is nothing to verify.
    """
    run, step = one_step(run, step)
    saved = _open(run)
    checked = []
    for each, tier in _candidates(saved, step):
        fault = None
        try:
            manifest = saved.tiers[tier].verify(each)
            counted = {"file": len(manifest.files), "array": len(manifest.leaves)}
            verdict = " and ".join(plural(n, what) for what, n in counted.items()) + " are as saved"
        except CheckpointError as error:
            verdict = fault = str(error)
        checked.append({"step": each, "in": tier, "fault": fault})
        if not as_json:
            where = f" in {tier}" if len(saved.tiers) > 1 else ""
            print(f"step {each}{where}: {verdict}")
    if as_json:
        print(json.dumps(checked, indent=2))
    elif not checked:
        print(f"no checkpoint in {saved.directory}")
    if not checked or any(each["fault"] for each in checked):
        raise typer.Exit(1)


@app.command(cls=Command)
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A run (its newest step) or RUN@STEP.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other run or RUN@STEP.")],
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints by their metadata.

    The metadata are arrays, config, data and versions.
    """
    from shardlib.checkpoint.manifest import diff as compare

    differences = compare(_manifest(first), _manifest(second))
    if as_json:
        print(json.dumps(dataclasses.asdict(differences), indent=2))
    else:
        _print_diff(differences)


@app.command(cls=Command)
def reshard(
    run: RunAtStep,
    mesh: Annotated[str, typer.Option(help="The mesh, such as fsdp=4,tensor=2.")],
    to: Annotated[str | None, typer.Option(help="Directory of the copy.")] = None,
    on: Annotated[
        str | None, typer.Option(help="Cluster of the mesh, such as v5p-128; default: one host.")
    ] = None,
    step: Step = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cost of a restore there; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a run for another mesh, or show what a restore costs.

    A run resumes on any mesh without a copy; a copy only makes the reads smaller.
    """
    run, step = one_step(run, step)
    check_run(run)
    from shardlib.run import resharding

    if dry_run:
        plan = resharding.plan_reshard(run, mesh, on=on, step=step, notify=warn)
        if as_json:
            print(json.dumps(dataclasses.asdict(plan), indent=2))
        else:
            _print_plan(plan)
        return
    if to is None or on is not None:
        wrong = "--on is for --dry-run" if to else "the directory of the copy is missing"
        raise typer.BadParameter(f"{wrong}; give --to DIRECTORY, or --dry-run.")
    copied = resharding.reshard(run, mesh, to, step=step, notify=warn)
    if as_json:
        print(json.dumps({"run_dir": to, **dataclasses.asdict(copied)}))
        return
    print(f"step {copied.step} is now in {to}\n  train on  shardlib train {to}/config.yaml")
    for setting in copied.left_out:
        print(f"{setting} is left out of its config: it belongs to the other run")


def _open(run: str) -> "SavedCheckpoints":
    check_run(run)
    from shardlib.checkpoint import SavedCheckpoints, open_saved
    from shardlib.run.directory import RunDirectory

    directory = RunDirectory(run)
    if (directory.path / "manifest.json").is_file():
        raise CheckpointError(
            f"{run} is one checkpoint of a run.\n  Name the directory of the run, or RUN@STEP."
        )
    try:
        config = directory.read_config()
    except ConfigError as error:
        config = None
        reason = str(error).splitlines()[0]
        warn(f"checkpoint.local is unknown and ignored: {reason}")
    inside = directory.checkpoints
    if config is not None and (inside.is_dir() or config.checkpoint.local is not None):
        return open_saved(inside, config.checkpoint, notify=warn, owner=directory.identity)
    place = inside if inside.is_dir() else directory.path
    return SavedCheckpoints(place, notify=warn)


def _candidates(saved: "SavedCheckpoints", step: int | None) -> list[tuple[int, str]]:
    """Returns every step, or the given one, with each place that holds it."""
    candidates = sorted(
        (each, rank, tier)
        for rank, (tier, place) in enumerate(saved.tiers.items())
        for each in (*place.candidates(), *place.links())
        if step in (None, each)
    )
    if step is not None and not candidates:
        saved.manifest(step)  # Raises, and names the existing steps.
    return [(each, tier) for each, _, tier in candidates]


def _split(place: str) -> tuple[str, int | None]:
    """Returns the run and the step of RUN, RUN@STEP or the directory of one checkpoint.

    Raises:
        ConfigError: If STEP is not a number.
    """
    path = pathlib.Path(place)
    if path.is_dir():
        is_one = any((path / name).exists() for name in ("manifest.json", "state"))
        if not (is_one and path.name.isdecimal()):
            return place, None
        holder = path.parent
        return str(holder.parent if holder.name == "checkpoints" else holder), int(path.name)
    run, at, step = place.rpartition("@")
    if at and pathlib.Path(run).is_dir() and not step.isdecimal():
        raise ConfigError(
            f"{place}: the step {step!r} is not a number.\n"
            f"  Write RUN@STEP, as in {run}@1000; list the steps with: shardlib checkpoint ls {run}"
        )
    return (run, int(step)) if at and step.isdecimal() else (place, None)


def one_step(place: str, step: int | None) -> tuple[str, int | None]:
    """Returns the run and the step given by an argument and --step together."""
    run, named = _split(place)
    if None not in (named, step) and named != step:
        raise ConfigError(
            f"{place} is step {named}, and --step says {step}.\n  Leave one of them out."
        )
    return run, named if step is None else step


def _check_whole(place: str) -> None:
    run, step = _split(place)
    if step is not None and pathlib.Path(run).is_dir():
        raise ConfigError(
            f"{place} is one checkpoint, and ls lists all of a run.\n"
            f"  Name the run ({run}), or use: shardlib checkpoint verify {run} --step {step}"
        )


def _manifest(place: str) -> "Manifest":
    run, step = _split(place)
    saved = _open(run)
    chosen = saved.latest() if step is None else step
    if chosen is None:
        raise _nothing_complete(saved, run)
    return saved.manifest(chosen)


def _nothing_complete(saved: "SavedCheckpoints", run: str) -> CheckpointError:
    damaged = len(_candidates(saved, None))
    if not damaged:
        return CheckpointError(f"no checkpoint in {saved.directory}.\n  Name another run.")
    return CheckpointError(
        f"no complete checkpoint in {saved.directory}; {_are(damaged)} damaged.\n"
        f"  See what is wrong: shardlib checkpoint verify {run}"
    )


def _facts(manifest: "Manifest", tier: str) -> dict[str, Any]:
    """Returns the `ls` entry of a checkpoint; checkpoints of other programs may lack values."""
    run = manifest.run
    data = run.get("data")
    return {
        "step": manifest.step,
        "in": tier,
        "saved_at": manifest.saved_at,
        "bytes": manifest.state_bytes,
        "leaves": len(manifest.leaves),
        "mesh": run.get("mesh"),
        "samples_seen": data.get("samples_seen") if isinstance(data, dict) else None,
        "metrics": manifest.metrics,
        "format": manifest.schema,
    }


def _table(rows: list[dict[str, Any]], *, with_tier: bool) -> Table:
    where = ["in"] if with_tier else []
    columns = ("step", *where, "saved at", "size", "arrays", "mesh", "samples seen", "metrics")
    return Table("", columns, [_cells(row, where) for row in rows])


def _cells(row: dict[str, Any], where: list[str]) -> tuple[str, ...]:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
    return (
        str(row["step"]),
        *(row[name] for name in where),
        row["saved_at"],
        size(row["bytes"]),
        str(row["leaves"]),
        row["mesh"] or "-",
        "-" if row["samples_seen"] is None else f"{row['samples_seen']:,}",
        metrics or "-",
    )


def _print_diff(diff: "CheckpointDiff") -> None:
    lines = [f"{d.name}: {d.first or 'absent'} and {d.second or 'absent'}" for d in diff.shapes]
    lines += [f"{path}: different values" for path in diff.values]
    lines += [f"{path}: unknown without fingerprints" for path in diff.unknown]
    print(_are(diff.same, "array") + " equal" + (f", {_are(len(lines))} not:" if lines else ""))
    for line in lines[:_MOST_LEAVES]:
        print(f"  {line}")
    if len(lines) > _MOST_LEAVES:
        print(f"  and {len(lines) - _MOST_LEAVES} more (--json lists all)")
    others = [*diff.run, *diff.libraries]
    for each in others:
        print(f"{each.name}: {_brief(each.first)} and {_brief(each.second)}")
    if any(_brief(value) != json.dumps(value) for d in others for value in (d.first, d.second)):
        print("long values are shortened (--json has all)")


def _brief(value: object) -> str:
    """Returns a value as JSON; a long dict is reduced to its keys, other long values are cut."""
    text = json.dumps(value)
    if len(text) > _MOST_CHARACTERS and isinstance(value, dict):
        text = f"{{{', '.join(value)}}}"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _are(number: int, what: str = "") -> str:
    """Returns `1 array is` or `2 arrays are`; without a noun `1 is` or `2 are`."""
    return f"{plural(number, what) if what else number} {'is' if number == 1 else 'are'}"


def _print_plan(plan: "ReshardPlan") -> None:
    print(
        f"step {plan.step}: {plural(plan.num_leaves, 'array')}, {size(plan.state_bytes)}, "
        f"saved on {plan.saved_on}"
    )
    print(f"onto {plan.mesh} on {plural(len(plan.hosts), 'host')}")
    rows = []
    for kind in dict.fromkeys(plan.hosts):
        hosts = [i for i, host in enumerate(plan.hosts) if host == kind]
        figures = (kind.read_bytes, kind.held_bytes, kind.buffer_bytes)
        rows.append((_ranges(hosts), *map(size, figures)))
    columns = ("hosts", "each reads", "its devices hold", "peak of buffers in its memory")
    console().print(Table("", columns, rows))


def _ranges(numbers: list[int]) -> str:
    """Returns `0-3, 8` for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
