"""`shardlib plan` and `shardlib calibrate`."""

import json
import os
from typing import Annotated, Any

import typer

from shardlib.cli import plan_options as options
from shardlib.cli.arguments import AsJson, Overrides, console, load_config
from shardlib.errors import ConfigError
from shardlib.hardware import is_mixed


def plan(
    on: options.On,
    config: options.Config = None,
    overrides: Overrides = None,
    model: options.Model = None,
    global_batch: options.GlobalBatch = None,
    length: options.Length = None,
    objective: options.Objective = "time",
    why_not: options.WhyNot = None,
    tokens: options.Tokens = None,
    days: options.Days = None,
    price: options.Price = None,
    precision: options.Precision = None,
    verify: options.Verify = 0,
    top: options.Top = 5,
    as_json: AsJson = False,
) -> None:
    """Find the best mesh and its settings for a cluster.

    The cluster need not be present: a calibrated cost model ranks meshes, rules, rematerialisation
    and microbatches. Compiles nothing without --verify.
    """
    _check(on, config, model, verify)
    given = model if config is None else load_config(config, overrides)
    from shardlib.plan import plan as make_plans

    plans = make_plans(
        given, on=on, global_batch_tokens=global_batch, length=length, tokens=tokens, days=days,
        price=price, objective=objective, precision=precision,  # type: ignore[arg-type]
        why_not=why_not or (), top=top,
    )  # fmt: skip
    verified = _verified(plans, str(config), overrides, length, verify) if verify else None
    if as_json:
        facts = plans.to_dict()
        print(json.dumps(facts | ({"verified": verified.to_dict()} if verified else {}), indent=2))
        return
    print(plans)
    if verified:
        console().print(verified.table())


def _check(on: str, config: str | None, model: str | None, verify: int) -> None:
    """Raises `ConfigError` for arguments that exclude each other."""
    if (config is None) == (model is None):
        raise ConfigError(
            "plan takes a config or a model.\n  Write shardlib plan CONFIG --on CLUSTER, or "
            "shardlib plan --model llama3-70b --on CLUSTER."
        )
    if not verify:
        return
    if config is None:
        raise ConfigError(
            "--verify compiles the step of a config, but --model has none.\n"
            "  Write shardlib plan CONFIG --on CLUSTER --verify K."
        )
    if is_mixed(on):
        raise ConfigError(
            f"--verify compiles for clusters of one kind, but {on} has several.\n"
            f"  Leave it out, or verify the plans of one kind: --on {on.split('+')[0]}"
        )
    # Does not use the devices of this machine.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _verified(
    plans: Any, config: str, overrides: list[str] | None, length: int | None, count: int
) -> Any:
    from shardlib.run.verify_plans import verify

    given = [*(overrides or ()), *([f"data.sequence_length={length}"] if length else ())]
    return verify(plans, lambda changes: load_config(config, [*given, *changes]), count)


def calibrate(
    on: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="cpu:8 emulates 8 devices on the CPU."),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Output file; default: where plan looks.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the available devices for `plan`.

    Matmuls, memory and collectives take a minute.
    """
    import pathlib

    from shardlib.cost.machine.measured import save
    from shardlib.run import calibrating

    found = calibrating.calibrate(on)
    calibrating.check_steady(found)
    kept = calibrating.calibration_path(calibrating.cluster_at_hand(found))
    path = pathlib.Path(output).expanduser() if output else kept
    save(found, path)
    print(path.read_text() if as_json else f"{calibrating.report(found)}\nwritten to {path}")
