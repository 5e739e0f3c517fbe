"""`shardlib checkpoint ls | verify | diff | reshard`: what a run has saved, seen and proved."""

import dataclasses
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.arguments import AsJson, console
from shardlib.errors import CheckpointError

if TYPE_CHECKING:
    from shardlib.checkpoint import Manifest, SavedCheckpoints
    from shardlib.checkpoint.diff import CheckpointDiff
    from shardlib.run.resharding import ReshardPlan

app = typer.Typer(
    help="List, verify, compare and reshard the checkpoints of a run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_MOST_LEAVES = 20

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's directory, or that of its checkpoints."),
]
Step = Annotated[int | None, typer.Option(help="The checkpoint; the newest when left out.")]


@app.command("ls")
def list_(run: Run, as_json: AsJson = False) -> None:
    """List the checkpoints: step, time, size, mesh, samples seen and metrics."""
    saved = _open(run)
    rows = [_facts(saved, saved.manifest(step)) for step in saved.steps()]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print(f"no checkpoint in {saved.directory}")
    else:
        console().print(_table(rows))


@app.command()
def verify(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Only this one; all when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every file and every array, and compare them with what was saved; exit 1 for damage."""
    saved = _open(run)
    faults: dict[int, str | None] = {}
    for each in saved.candidates() if step is None else [step]:
        try:
            manifest = saved.verify(each)
        except CheckpointError as error:
            faults[each] = str(error)
            said = str(error)
        else:
            faults[each] = None
            said = f"{len(manifest.files)} files and {len(manifest.leaves)} arrays are as saved"
        if not as_json:
            print(f"step {each}: {said}")
    if as_json:
        print(json.dumps([{"step": s, "fault": fault} for s, fault in faults.items()], indent=2))
    elif not faults:
        print(f"no checkpoint in {saved.directory}")
    if any(faults.values()):
        raise typer.Exit(1)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A run (its newest step) or RUN@STEP.")],
    second: Annotated[str, typer.Argument(metavar="B", help="What to compare it with, alike.")],
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints by what they say of themselves: arrays, config, data, versions."""
    from shardlib.checkpoint.diff import diff as compare

    found = compare(_manifest(first), _manifest(second))
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        _print_diff(found)


@app.command()
def reshard(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory.")],
    mesh: Annotated[str, typer.Option(help="The mesh, such as fsdp=4,tensor=2.")],
    to: Annotated[str | None, typer.Option(help="Directory of the copy.")] = None,
    on: Annotated[
        str | None, typer.Option(help="The cluster of the mesh, such as v5p-128; one host if not.")
    ] = None,
    step: Step = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what a restore there takes; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a run with its checkpoint laid out for another mesh, or say what a restore there takes.

    A run goes on from its checkpoint on any mesh as it is: a copy only makes reads there smaller.
    """
    from shardlib.run import resharding

    if dry_run:
        plan = resharding.plan_reshard(run, mesh, on=on, step=step)
        if as_json:
            print(json.dumps(dataclasses.asdict(plan), indent=2))
        else:
            _print_plan(plan)
        return
    if to is None or on is not None:
        wrong = "--on is for --dry-run" if to else "nothing says where the copy goes"
        raise typer.BadParameter(f"{wrong}; give --to DIRECTORY, or --dry-run.")
    copied = resharding.reshard(run, mesh, to, step=step)
    if as_json:
        print(json.dumps({"run_dir": to, "step": copied}))
    else:
        print(f"step {copied} is now in {to}\n  train on  shardlib train {to}/config.yaml")


def _open(run: str) -> "SavedCheckpoints":
    from shardlib.checkpoint import SavedCheckpoints
    from shardlib.run.directory import RunDirectory

    place = pathlib.Path(run)
    inside = RunDirectory(place).checkpoints
    if not place.is_dir():
        raise CheckpointError(f"{run} is no directory.\n  Name the run_dir of a `shardlib train`.")
    return SavedCheckpoints(
        inside if inside.is_dir() else place, notify=lambda text: print(text, file=sys.stderr)
    )


def _manifest(place: str) -> "Manifest":
    run, at, step = place.rpartition("@")
    if not (at and step.isdecimal()):
        run, step = place, ""
    saved = _open(run)
    newest = saved.latest()
    if newest is None:
        raise CheckpointError(f"no checkpoint in {saved.directory}.\n  Name another run.")
    return saved.manifest(int(step) if step else newest)


def _facts(saved: "SavedCheckpoints", manifest: "Manifest") -> dict[str, Any]:
    """What `ls` says of a checkpoint; what another program saved may lack some of it."""
    run = manifest.run
    data = run.get("data")
    return {
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "bytes": manifest.state_bytes,
        "leaves": len(manifest.leaves),
        "mesh": run.get("mesh"),
        "samples_seen": data.get("samples_seen") if isinstance(data, dict) else None,
        "metrics": manifest.metrics,
        "format": manifest.schema,
    }


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    from shardlib.train.humanize import size

    table = Table("step", "saved at", "size", "arrays", "mesh", "samples seen", "metrics")
    for row in rows:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
        table.add_row(
            str(row["step"]),
            row["saved_at"],
            size(row["bytes"]),
            str(row["leaves"]),
            row["mesh"] or "-",
            "-" if row["samples_seen"] is None else f"{row['samples_seen']:,}",
            metrics or "-",
        )
    return table


def _print_diff(found: "CheckpointDiff") -> None:
    lines = [f"{d.name}: {d.first or 'absent'} and {d.second or 'absent'}" for d in found.shapes]
    lines += [f"{path}: other values" for path in found.values]
    lines += [f"{path}: not known, for want of fingerprints" for path in found.unknown]
    print(f"{found.same} arrays are equal" + (f", {len(lines)} are not:" if lines else ""))
    for line in lines[:_MOST_LEAVES]:
        print(f"  {line}")
    if len(lines) > _MOST_LEAVES:
        print(f"  and {len(lines) - _MOST_LEAVES} more (--json lists all)")
    for each in (*found.run, *found.libraries):
        print(f"{each.name}: {json.dumps(each.first)} and {json.dumps(each.second)}")


def _print_plan(plan: "ReshardPlan") -> None:
    from rich.table import Table

    from shardlib.train.humanize import size

    print(
        f"step {plan.step}: {plan.num_leaves} arrays, {size(plan.state_bytes)}, "
        f"saved on {plan.saved_on}"
    )
    print(f"onto {plan.mesh} on {len(plan.hosts)} host{'s' if len(plan.hosts) > 1 else ''}")
    table = Table("hosts", "each reads", "its devices hold", "peak of buffers in its memory")
    for kind in dict.fromkeys(plan.hosts):
        hosts = [i for i, host in enumerate(plan.hosts) if host == kind]
        table.add_row(
            _ranges(hosts),
            size(kind.read_bytes),
            size(kind.held_bytes),
            size(kind.buffer_bytes),
        )
    console().print(table)


def _ranges(numbers: list[int]) -> str:
    """Returns `0-3, 8` for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
