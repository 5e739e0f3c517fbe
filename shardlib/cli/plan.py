"""`shardlib plan` and `shardlib calibrate`."""

import json
import os
from typing import Annotated, Any

import typer

from shardlib.cli.arguments import AsJson, Overrides, console, load_config
from shardlib.errors import ConfigError


def plan(
    on: Annotated[
        str,
        typer.Option(
            metavar="CLUSTER",
            help="What to plan for: v5p-128, 2xv5e-256, 64x8xh100. A chip alone, as v5p, with "
            "--objective cost or chips, or with --tokens and --days: as many as it takes.",
        ),
    ],
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="As for train; or give --model.")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="A published model in place of a config: llama3-70b.")
    ] = None,
    global_batch: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Tokens of a step: 4M is 4 x 2**20."),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    objective: Annotated[
        str, typer.Option(help="time, cost (chip-hours) or chips (the fewest).")
    ] = "time",
    why_not: Annotated[
        list[str] | None,
        typer.Option(metavar="MESH", help="Explain why not this mesh. May be given again."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of the whole run: 1T is 10**12.")
    ] = None,
    days: Annotated[float | None, typer.Option(help="In how many days.")] = None,
    price: Annotated[
        float | None, typer.Option(metavar="USD", help="Price of an hour of one chip.")
    ] = None,
    precision: Annotated[str, typer.Option(help="With --model: f32, bf16, bf16_params.")] = "bf16",
    verify: Annotated[
        int,
        typer.Option(
            metavar="K", min=0, help="Compile the best K ahead of time, and rank them again."
        ),
    ] = 0,
    top: Annotated[int, typer.Option(min=1, help="How many meshes to rank.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Find the best mesh, rules, rematerialisation and microbatches for a cluster that need not be
    there, by a calibrated cost model; compiles nothing without --verify."""
    if verify:  # No device of this machine has a part in it.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if (config is None) == (model is None):
        raise ConfigError(
            "plan takes a config or a model.\n  Write shardlib plan CONFIG --on CLUSTER, or "
            "shardlib plan --model llama3-70b --on CLUSTER."
        )
    if verify and config is None:
        raise ConfigError(
            "--verify compiles the step of a config, and --model has none.\n"
            "  Write shardlib plan CONFIG --on CLUSTER --verify K."
        )
    given = model if config is None else load_config(config, overrides)
    from shardlib.plan import plan as make_plans

    plans = make_plans(
        given,
        on=on,
        global_batch_tokens=global_batch,
        length=length,
        objective=objective,  # type: ignore[arg-type]
        tokens=tokens,
        days=days,
        price=price,
        precision=precision,  # type: ignore[arg-type]
        why_not=why_not or (),
        top=top,
    )
    verified = _verified(plans, str(config), overrides, length, verify) if verify else None
    if as_json:
        facts = plans.to_dict()
        print(json.dumps(facts | ({"verified": verified.to_dict()} if verified else {}), indent=2))
        return
    print(plans)
    if verified:
        console().print(verified.table().render())


def _verified(
    plans: Any, config: str, overrides: list[str] | None, length: int | None, count: int
) -> Any:
    from shardlib.run.verifying import verify

    given = [*(overrides or ()), *([f"data.sequence_length={length}"] if length else ())]
    return verify(plans, lambda changes: load_config(config, [*given, *changes]), count)


def calibrate(
    on: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="cpu:8 lets the CPU stand for 8 devices."),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where to write; left out: where plan looks.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the devices at hand for `plan`: matmuls, memory, collectives. Takes a minute."""
    import pathlib

    from shardlib.plan.measured import save
    from shardlib.run import calibrating

    found = calibrating.calibrate(on)
    kept = calibrating.calibration_path(calibrating.cluster_at_hand(found))
    path = pathlib.Path(output).expanduser() if output else kept
    save(found, path)
    print(path.read_text() if as_json else f"{calibrating.report(found)}\nwritten to {path}")
