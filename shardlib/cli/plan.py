"""`shardlib plan` and `shardlib calibrate`."""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.arguments import AsJson, Overrides, console, load_config, say, warn
from shardlib.cli.plan_serving import (
    Cache,
    Context,
    Prompt,
    Serve,
    Slo,
    Weights,
    check_without_serving,
    plan_serving,
)
from shardlib.errors import ConfigError, ShardlibError
from shardlib.hardware import is_mixed
from shardlib.runtime.exit_codes import WRONG_REQUEST

if TYPE_CHECKING:
    from shardlib.find import FoundRules
    from shardlib.find.why_not import WhyNotRule
    from shardlib.plan.result import Plans
    from shardlib.run.config import RunConfig
    from shardlib.run.plans.comparing import FoundOrPlan
    from shardlib.run.reports.verify_plans import Verification

On = Annotated[
    str,
    typer.Option(
        metavar="CLUSTER",
        help="Cluster to plan for: v5p-128, 2xv5e-256, 64x8xh100, or GPUs of several kinds: "
        "8xh100+16xa100-80. With --objective cost or chips, or with --tokens and --days, a chip "
        "alone, such as v5p, plans for as many chips as needed.",
    ),
]
Config = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="A config, as for train; or give --model.")
]
Model = Annotated[
    str | None, typer.Option(help="A published model in place of a config: llama3-70b.")
]
GlobalBatch = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens per step: 4M is 4 x 2**20. (train.global_batch of a config counts "
        "sequences: 512 of 8192 tokens are 4M.)",
    ),
]
Length = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
Objective = Annotated[str, typer.Option(help="time, cost (chip-hours) or chips (the fewest).")]
WhyNot = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MESH|RULE",
        help="Explain why this mesh, or with --rules auto this rule (up: fsdp), was not chosen. "
        "Repeatable.",
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(help="Tokens of the whole run: 1T is 10**12. Default: the tokens of the config."),
]
Days = Annotated[float | None, typer.Option(help="Days for the whole run.")]
Price = Annotated[float | None, typer.Option(metavar="USD", help="Price per chip-hour.")]
Precision = Annotated[
    str | None,
    typer.Option(help="With --model: f32, bf16, bf16_params. Default bf16."),
]
Verify = Annotated[
    int,
    typer.Option(metavar="K", min=0, help="Compile the best K ahead of time, and rank them again."),
]
Rules = Annotated[
    str | None,
    typer.Option(
        metavar="auto",
        help="Also find rules for the config's model, with the best mesh, model.remat and "
        "train.microbatches in place of the given ones.",
    ),
]
Top = Annotated[int, typer.Option(min=1, help="Number of meshes to rank.")]


def plan(
    on: On,
    config: Config = None,
    overrides: Overrides = None,
    model: Model = None,
    global_batch: GlobalBatch = None,
    length: Length = None,
    objective: Objective = "time",
    why_not: WhyNot = None,
    tokens: Tokens = None,
    days: Days = None,
    price: Price = None,
    precision: Precision = None,
    verify: Verify = 0,
    rules: Rules = None,
    serve: Serve = None,
    context: Context = None,
    prompt: Prompt = None,
    slo: Slo = None,
    weights: Weights = None,
    cache: Cache = None,
    top: Top = 5,
    as_json: AsJson = False,
) -> None:
    """Find the best mesh and its settings for a cluster.

    The cluster need not be present: a calibrated cost model ranks meshes, rules, rematerialisation
    and microbatches. Compiles only with --verify.
    """
    of_serving = {
        "context": context, "prompt": prompt, "slo": slo, "weights": weights, "cache": cache,
    }  # fmt: skip
    if serve is not None:
        of_training = {
            "CONFIG": config, "--model": model, "--global-batch": global_batch, "--length": length,
            "--why-not": why_not, "--tokens": tokens, "--days": days, "--price": price,
            "--verify": verify, "--rules": rules,
        }  # fmt: skip
        options = {**of_serving, "precision": precision, "top": top}
        return plan_serving(serve, on, options, of_training, as_json=as_json)
    check_without_serving(of_serving, "plans", "--serve MODEL")
    _check(on, config, model, verify)
    asked = _rules_asked(why_not or ())
    _check_rules(on, config, rules, asked)
    reload = _reload(config, overrides, length)
    given = model if config is None else load_config(config, overrides)
    from shardlib.plan import plan as make_plans

    plans = make_plans(
        given, on=on, global_batch_tokens=global_batch, length=length, tokens=tokens, days=days,
        price=price, objective=objective, precision=precision,  # type: ignore[arg-type]
        why_not=[one for one in why_not or () if one not in asked], top=top,
    )  # fmt: skip
    _show_all(plans, verify, rules, asked, reload, as_json)  # type: ignore[arg-type]


def _show_all(
    plans: "Plans",
    verify: int,
    rules: str | None,
    asked: list[str],
    reload: "Callable[[list[str]], RunConfig]",
    as_json: bool,
) -> None:
    """Prints plans, and what verifies them or is found for them; mixed clusters have neither."""
    verified = _verified(plans, reload, verify) if verify else None
    if not as_json:
        _show_plans(plans, verified)
    report = _found(plans, reload, asked) if rules else None
    if as_json:
        print(json.dumps(_facts(plans, verified, report), indent=2))
    elif report:
        _show(report)
    if report and any(isinstance(answer, ShardlibError) for answer in report.answers.values()):
        raise typer.Exit(WRONG_REQUEST)


@dataclasses.dataclass(frozen=True)
class _FoundReport:
    """Found rules, what they are compared with, and the answers to questions about them."""

    rules: "FoundRules"
    comparison: "FoundOrPlan"
    answers: "dict[str, WhyNotRule | ShardlibError]"
    """By question; the error of one that cannot be answered."""


def _reload(
    config: str | None, overrides: list[str] | None, length: int | None
) -> "Callable[[list[str]], RunConfig]":
    """Returns what loads the config that is planned with changes to its keys."""
    given = [*(overrides or ()), *([f"data.sequence_length={length}"] if length else ())]
    return lambda changes: load_config(str(config), [*given, *changes])


def _facts(
    plans: "Plans", verified: "Verification | None", found: "_FoundReport | None"
) -> dict[str, Any]:
    facts = plans.to_dict()
    facts |= {"verified": verified.to_dict()} if verified else {}
    if found:
        answers = [
            {"rule": asked, "error": str(answer)}
            if isinstance(answer, ShardlibError)
            else answer.to_dict()
            for asked, answer in found.answers.items()
        ]
        more = {"why_not": answers, "comparison": found.comparison.to_dict()}
        facts["found"] = found.rules.to_dict() | more
    return facts


def _show_plans(plans: "Plans", verified: "Verification | None") -> None:
    say(plans.text(console().width))
    if verified:
        console().print(verified.table())


def _show(found: _FoundReport) -> None:
    console().print(found.rules.render())
    for asked, answer in found.answers.items():
        say(f"{asked}: {answer}" if isinstance(answer, ShardlibError) else str(answer))
    say(str(found.comparison))
    print(f"  {found.comparison.command}")  # Not folded: it is copied.


def _check(on: str, config: str | None, model: str | None, verify: int) -> None:
    """Raises `ConfigError` for arguments that exclude each other."""
    if (config is None) == (model is None):
        given = "neither is" if config is None else "both are"
        raise ConfigError(
            f"plan takes either a config or --model, but {given} given.\n"
            "  Write shardlib plan CONFIG --on CLUSTER, or "
            "shardlib plan --model llama3-70b --on CLUSTER."
        )
    _check_not_named(config)
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


def _check_not_named(config: str | None) -> None:
    """Raises `ConfigError` if the path of a config is the name of a published model."""
    if config is None or os.path.exists(config) or config.endswith((".yaml", ".yml")):
        return
    from shardlib.plan.workloads.named_models import NAMED, canonical

    if canonical(config) in NAMED:
        raise ConfigError(
            f"{config}: no such config file, but a published model has that name.\n"
            f"  Write --model {config}."
        )


def _rules_asked(why_not: Sequence[str]) -> list[str]:
    """Returns the rules among what `--why-not` names; the rest are meshes."""
    unclear = [one for one in why_not if ":" not in one and "=" not in one]
    if unclear:
        raise ConfigError(
            f"--why-not {unclear[0]!r} names neither a mesh nor a rule.\n"
            "  Write a mesh as fsdp=8, or with --rules auto a rule as 'up: fsdp'."
        )
    asked = [one for one in why_not if ":" in one]
    if not asked:
        return []
    from shardlib.mesh import STANDARD_AXES

    for one in asked:
        sizes = [_TYPED_WITH_COLON.fullmatch(part.strip()) for part in one.split(",")]
        if all(size and size[1] in STANDARD_AXES for size in sizes):
            mesh = ",".join(f"{size[1]}={size[2]}" for size in sizes if size)
            raise ConfigError(
                f"--why-not {one!r} is a mesh written like a rule.\n  Write the mesh as {mesh}."
            )
    return asked


_TYPED_WITH_COLON = re.compile(r"(\w+)\s*[:=]\s*(\d+)")


def _check_rules(on: str, config: str | None, rules: str | None, asked: list[str]) -> None:
    """Raises `ConfigError` if rules cannot be found, or are asked about and not found."""
    if rules is None and asked:
        raise ConfigError(
            f"--why-not {asked[0]!r} asks about a rule, and no rules are found.\n"
            "  Add --rules auto, or name a mesh such as fsdp=8."
        )
    if rules is None:
        return
    if rules != "auto":
        raise ConfigError(
            f"--rules {rules} is not known: a plan chooses among presets itself.\n"
            "  Write --rules auto to find rules, or set rules in the config."
        )
    if config is None:
        raise ConfigError(
            "--rules auto finds rules for the model of a config, but --model has none.\n"
            "  Write shardlib plan CONFIG --on CLUSTER --rules auto."
        )
    if is_mixed(on):
        raise ConfigError(
            f"rules are found for clusters of one kind, but {on} has several.\n"
            f"  Name one of them: --on {on.split('+')[0]}"
        )
    # Does not use the devices of this machine.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _found(
    plans: "Plans", reload: "Callable[[list[str]], RunConfig]", asked: list[str]
) -> _FoundReport:
    from shardlib.run.plans.comparing import found_or_plan
    from shardlib.run.plans.finding import rules_for_plan

    rules = rules_for_plan(reload([]), plans, warn).priced()
    answers: dict[str, WhyNotRule | ShardlibError] = {}
    for one in asked:
        try:
            answers[one] = rules.why_not(one)
        except ShardlibError as error:
            answers[one] = error
    return _FoundReport(rules, found_or_plan(rules, plans, reload, warn), answers)


def _verified(
    plans: "Plans", reload: "Callable[[list[str]], RunConfig]", count: int
) -> "Verification":
    from shardlib.run.reports.verify_plans import verify

    return verify(plans, reload, count)


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

    It times matmuls, memory and collectives, in about a minute.
    """
    import pathlib

    from shardlib.cost.machine.measured import save
    from shardlib.run.plans import calibrating

    measured = calibrating.calibrate(on)
    calibrating.check_steady(measured)
    kept = calibrating.calibration_path(calibrating.cluster_at_hand(measured))
    path = pathlib.Path(output).expanduser() if output else kept
    save(measured, path)
    if as_json:
        print(path.read_text())
    else:
        say(f"{calibrating.report(measured)}\nwritten to {path}")
