"""Found rules against hand-written ones and `fsdp` alone, and what was predicted of them.

Nine models in plain Flax NNX (`plain_models.py`) name no axis. `find_rules` finds their rules on
three meshes of eight devices; the training step is compiled ahead of time, never run, for eight TPU
chips (bfloat16, needs libtpu) or eight CPU devices (float32). `hand` are paths that a Megatron
engineer would write, `rows` the same paths where `tensor` cuts what `fsdp` cuts, the rows of the
batch too; `fsdp` is the preset on the same mesh, `fsdp8` on `fsdp=8`. `parallax` is the AUTO of
google-parallax, partitioned by XLA, if it is installed and answers: it takes two axes.

    python benchmarks/find_rules.py
    python benchmarks/find_rules.py --models lstm,graph --meshes fsdp=8 --on cpu:8
    python benchmarks/find_rules.py --models moe --meshes fsdp=4,expert=2 data=2,expert=4

For each program: MB that a device sends by ring algorithms, MiB at the peak, and the milliseconds
of a step, for TPUs alone: the busy time and the network time that `explain` tells, one after the
other, because these programs are not scheduled. `predicted` is what the search said of the found
rules. Below stands the traffic by collective and mesh axes, predicted and compiled, above 1 MB.

With `--partitioners`, XLA partitions the found rules in place of other rules: `user` is the step
with `constrain="user"`, where XLA knows the placements of parameters and batch alone, and
`constrained` has the operands and results of every product constrained to the layouts that shardlib
decided. CPU seconds of tracing and of compiling are then measured as well.

    python benchmarks/find_rules.py --partitioners --on cpu:8

The last line is JSON: the rows, the largest ratios of found rules to the others and to the quickest
of `hand`, `rows` and `fsdp` on each mesh, and the largest errors of the predictions.
"""

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

from collectives import devices_of, start_platforms

MESHES = "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"
LEAST_BYTES = 1e6
WRITTEN = "hand", "rows", "fsdp"
OTHERS = *WRITTEN, "fsdp8", "parallax", "user", "constrained"
MEASURES = "sent", "peak", "seconds", "trace", "compile"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step: bytes sent by a device, also by kind and axes, its peak in bytes, and the
    seconds of a step, None for CPUs; CPU seconds of tracing and of compiling, if measured."""

    sent: float
    by_axes: Mapping[str, float]
    peak: int
    seconds: float | None
    trace: float | None = None
    compile: float | None = None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="names, by commas")
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    parser.add_argument("--on", default="v5e-8", help="a cluster of 8 devices")
    parser.add_argument("--tiny", action="store_true", help="the size of a run on CPU devices")
    parser.add_argument(
        "--partitioners", action="store_true", help="compare with XLA's partitioner"
    )
    flags = parser.parse_args(arguments)
    start_platforms()
    cluster, devices = devices_of(flags.on)
    if isinstance(devices, str):
        print(devices)
        return
    from plain_models import CASES

    rows = []
    for name in flags.models.split(",") if flags.models else CASES:
        alone = None
        if not flags.partitioners:
            alone = compiled(name, "fsdp=8", "fsdp", flags, cluster, devices)
        for mesh in flags.meshes:
            rows.append(row(name, mesh, alone, flags, cluster, devices))
            print(text(rows[-1]), flush=True)
    print(json.dumps({"rows": rows, **worst(rows)}))


def row(
    name: str, mesh: str, alone: Compiled | None, flags: Any, cluster: Any, devices: Any
) -> dict[str, Any]:
    """Finds rules and compiles all of a row."""
    from parallax_rules import parallax_rules
    from plain_models import CASES

    found = find(name, mesh, flags, cluster)
    has_rows = "tensor" in mesh
    asked = {"hand": CASES[name].hand, "rows": CASES[name].hand and has_rows, "fsdp": True}
    others = {key: key for key in WRITTEN if asked[key]}
    if alone is None:
        others = dict.fromkeys(("user", "constrained"), found.rules)
    programs = {"found": compiled(name, mesh, found.rules, flags, cluster, devices)}
    for key, rules in others.items():
        programs[key] = compiled(name, mesh, rules, flags, cluster, devices, key)
    auto: Any = "not compared"
    if alone is not None:
        programs["fsdp8"] = alone
        case = CASES[name]
        auto = parallax_rules(case.make(tiny=flags.tiny), case.shapes(tiny=flags.tiny), mesh)
        if not isinstance(auto, str):
            programs["parallax"] = compiled(name, mesh, auto, flags, cluster, devices, "user")
    made: dict[str, Any] = {
        "model": name,
        "mesh": mesh,
        "parallax_note": auto if isinstance(auto, str) else "",
        "predicted": predicted(found),
        **{key: dataclasses.asdict(program) for key, program in programs.items()},
    }
    made["ratios"] = {
        key: ratios(programs["found"], other) for key, other in programs.items() if key != "found"
    }
    timed = [key for key in WRITTEN if key in programs and programs[key].seconds]
    if timed:
        made["quickest"] = min(timed, key=lambda key: programs[key].seconds or 0.0)
    made["sent_error"] = off(sum(found.traffic.values()), programs["found"].sent)
    made["peak_error"] = off(made["predicted"]["peak"], programs["found"].peak)
    return made


def off(told: float, true: float) -> float:
    """Returns the relative error of a prediction; small traffic counts as `LEAST_BYTES`."""
    return round((told - true) / max(true, LEAST_BYTES), 3)


def ratios(found: Compiled, other: Compiled) -> dict[str, float]:
    pairs = {key: (getattr(found, key), getattr(other, key)) for key in MEASURES}
    return {key: round(a / b, 3) for key, (a, b) in pairs.items() if a is not None and b}


def predicted(found: Any) -> dict[str, Any]:
    """Returns what the search says of a step: bytes sent and held by a device, and seconds."""
    from shardlib.cost.costs import RUNTIME_BYTES
    from shardlib.hardware import parse_cluster

    price = found.prices[0]
    by_axes = {axes_of(*key): sent for key, sent in found.traffic.items()}
    runtime = RUNTIME_BYTES[parse_cluster(found.cluster).platform]
    return {
        "sent": sum(by_axes.values()),
        "by_axes": by_axes,
        "peak": price.memory_bytes - runtime,
        "seconds": found.seconds,
        "cost_model_seconds": price.seconds,
    }


def axes_of(kind: str, axes: Any) -> str:
    from shardlib.explain.analysis.collectives import axes_text

    return f"{kind} {axes_text(axes)}"


def find(name: str, mesh: str, flags: Any, cluster: Any) -> Any:
    import optax

    import shardlib as sl
    from plain_models import CASES, loss

    case = CASES[name]
    return sl.find_rules(
        case.make(tiny=flags.tiny),
        loss=loss,
        batch=case.shapes(tiny=flags.tiny),
        optimizer=optax.adamw(1e-3),
        # Links of CPU devices are not known.
        on="v5e-8" if cluster.platform == "cpu" else cluster,
        mesh=mesh,
        precision=policy(cluster),
    )


def policy(cluster: Any) -> Any:
    return "bf16" if cluster.platform == "tpu" else "f32"


def compiled(
    name: str, mesh: str, rules: Any, flags: Any, cluster: Any, devices: Any, by: str = "shardlib"
) -> Compiled:
    """Compiles the training step of a model under rules, or under the rules of a name in `WRITTEN`.
    XLA partitions it if `by` is `user` or `constrained`."""
    import optax

    import shardlib as sl
    from constrained import constrained as by_xla
    from plain_models import CASES, loss
    from shardlib.explain.aot.compile import compile_step
    from shardlib.explain.report.report import report_on

    case = CASES[name]
    if isinstance(rules, str):
        rules = written(rules, case.hand)
    with sl.use(sl.make_mesh(mesh, devices=devices), rules):
        state = sl.abstract_state(
            case.make(tiny=flags.tiny), optax.adamw(1e-3), precision=policy(cluster)
        )
    constrain = "user" if by == "user" else "auto"
    step = sl.make_train_step(loss, precision=policy(cluster), constrain=constrain)
    arguments = state, case.shapes(tiny=flags.tiny)
    with by_xla() if by == "constrained" else contextlib.nullcontext():
        spent = cpu_seconds(step, arguments) if flags.partitioners else {}
        report = report_on(compile_step(step, arguments, keep=False, on=cluster))
    by_axes: dict[str, float] = {}
    for one in report.program.collectives:
        key = axes_of(one.kind, one.mesh_axes)
        # XLA for CPU makes no reduce-scatter, so that one is counted where it would be.
        sent = one.folded_bytes if cluster.platform == "cpu" else one.sent_bytes
        by_axes[key] = by_axes.get(key, 0.0) + sent
    roofline = report.roofline
    seconds = None
    if roofline and roofline.busy_seconds and roofline.seconds["network"] is not None:
        seconds = roofline.busy_seconds + roofline.seconds["network"]
    return Compiled(sum(by_axes.values()), by_axes, report.step.memory["peak"], seconds, **spent)


def written(name: str, paths: Any) -> Any:
    """Returns the hand-written rules of a name, for a model whose parameters have these axes."""
    import shardlib as sl

    if name == "fsdp":
        return sl.rules.FSDP
    hand = sl.rules.STANDARD.override(paths=paths)
    if name == "hand":
        return hand
    whole = dict.fromkeys(("vocab", "heads", "mlp"))
    return hand.override(
        params={**whole, "embed": "fsdp+tensor"},
        activations={**whole, "batch": "data+fsdp+tensor"},
    )


def cpu_seconds(step: Any, arguments: Any) -> dict[str, float]:
    """Returns the CPU seconds of tracing a step, the least of three, and of compiling it, the least
    of two: what is compiled first in a process takes up to a quarter longer."""
    import jax

    spent: dict[str, list[float]] = {"trace": [], "compile": []}
    for number in range(3):
        jax.clear_caches()
        fresh = dataclasses.replace(step)
        start = time.process_time()
        traced = fresh.program(*arguments).trace(*arguments)
        spent["trace"].append(time.process_time() - start)
        if number < 2:
            lowered = traced.lower()
            start = time.process_time()
            lowered.compile()
            spent["compile"].append(time.process_time() - start)
    return {key: min(seconds) for key, seconds in spent.items()}


def text(row: dict[str, Any]) -> str:
    lines = [f"{row['model']} on {row['mesh']}"]
    for key in ("predicted", "found", *OTHERS):
        if key in row:
            one = row[key]
            seconds = f"{1e3 * one['seconds']:8.2f} ms" if one["seconds"] else ""
            ratio = " ".join(f"{k} {v:.3f}" for k, v in row["ratios"].get(key, {}).items())
            numbers = f"{one['sent'] / 1e6:9.1f} MB {one['peak'] / 2**20:8.0f} MiB {seconds:11}"
            lines.append(f"  {key:9} {numbers} {ratio}")
    if row["parallax_note"]:
        lines.append(f"  parallax: {row['parallax_note']}")
    lines.append(f"  errors: sent {row['sent_error']:+.1%}, peak {row['peak_error']:+.1%}")
    told, true = row["predicted"]["by_axes"], row["found"]["by_axes"]
    for key in sorted({*told, *true}):
        pair = told.get(key, 0.0), true.get(key, 0.0)
        if max(pair) > LEAST_BYTES:
            lines.append(f"    {key:30} {pair[0] / 1e6:9.1f} {pair[1] / 1e6:9.1f}")
    return "\n".join(lines)


def worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for other in OTHERS:
        for key in MEASURES:
            of = [r["ratios"][other][key] for r in rows if key in r["ratios"].get(other, {})]
            if of:
                found[f"largest_{key}_to_{other}"] = max(of)
    for key in MEASURES:
        of = [r["ratios"][r["quickest"]].get(key) for r in rows if "quickest" in r]
        if any(of):
            found[f"largest_{key}_to_quickest"] = max(filter(None, of))
    for key in ("sent_error", "peak_error"):
        found[f"largest_{key}"] = max((r[key] for r in rows), key=abs)
    return found


if __name__ == "__main__":
    main()
