"""Bytes that each device sends in a training step, from the compiled program and by the literature.

For every strategy the step of a small Llama is compiled, never run: for eight CPU devices in
float32, and ahead of time for eight TPU chips in bfloat16, where libtpu is installed. The
collectives of each program are turned into bytes sent by ring algorithms and compared with the
closed forms of `closed_forms.py`.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --rows fsdp,tensor --on cpu:8

With `--model` the widths, the vocabulary and the tokens are those of a published model, with fewer
layers: a program has one body for all of them, and the closed form counts as many. The rows are
then every mesh of `AT_SCALE` for as many chips, with `--microbatches` of one sequence a device
(`--sequences`), and with layers that are computed again. GPUs need the CUDA plugin of JAX.

    python benchmarks/collectives.py --on v5e-16,16xh100 --model llama3-8b --microbatches 1,4
    python benchmarks/collectives.py --on v5p-128 --model llama3-70b --meshes data=8,fsdp=8

`sent` is what the program's own collectives send, in MB, with its ratio to the closed form.
`folded` counts an all-reduce of which each device reads its part as the reduce-scatter that it
would be, and a sum of all-reduces as one: XLA for CPU makes neither of the two, so there `folded`
is what tells whether the strategy is right. Where a ratio is not 1, the last columns tell which
axes differ and why. `small` are collectives of single numbers and of statistics of positions, which
no form counts: how many, and MB. A stage of a pipeline skips its idle turns on TPUs and GPUs: what
it sends within a turn counts once for each microbatch. So does what it sends to the next stage.

The last line is JSON: the rows, those whose step does not fit the devices as `too_large`, and by
platform the largest ratio of what counts there.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal

from closed_forms import Shared, Sizes, Strategy, Zero, sent_bytes

COUNTS = {"cpu": "folded_ratio", "tpu": "ratio", "gpu": "ratio"}

SMALL_BYTES = 2**18
"""A statistic of the positions on a device, such as the sum of a softmax, is no larger."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A strategy, and why it sends what no closed form counts, by platform."""

    mesh: str
    rules: str = "standard"
    zero: Zero = 3
    shared: Shared = "ring"
    microbatches: int = 1
    reduction: str | None = None
    """Dtype of gradients summed over `data` once a step; None leaves it to the compiler."""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the sizes."""
    experts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the config of experts."""
    remat: str = "none"
    attention: Literal["auto", "xla", "blockwise"] = "xla"
    why: dict[str, str] = dataclasses.field(default_factory=dict)


EXPERTS = {"experts": 8, "mlp": 1024}
HOPS = {"all": "gradients of keys and values make n hops"}
PADDED = {"cpu": "exchanges are padded to the most that two devices can send each other"}
TILES = {
    "tpu": "reduce-scatters of the MLP are padded to whole tiles, and their results moved back"
}
SCATTER = {"tpu": "of two reduce-scatters XLA makes one an all-reduce and a slice"}

ROWS = {
    "data": Row("data=8"),
    "zero1": Row("fsdp=8", "zero1", zero=1),
    "zero2": Row("fsdp=8", "zero2", zero=2),
    "fsdp": Row("fsdp=8"),
    "hybrid": Row("data=2,fsdp=4", why=TILES),
    "tensor": Row("tensor=8"),
    "tensor_sequence": Row("tensor=8", "sequence"),
    "shared_heads": Row("tensor=8", "sequence", changes={"kv_heads": 2}),
    "context_ring": Row("context=8", why=HOPS),
    "context_gather": Row("context=8", shared="gather", why=SCATTER),
    "context_ulysses": Row("context=8", shared="ulysses"),
    "expert": Row("expert=8", changes=EXPERTS, experts={"dispatch": "capacity"}),
    "expert_dropless": Row("expert=8", changes=EXPERTS, why=PADDED),
    "stage": Row("stage=8", microbatches=128, changes={"layers": 8, "batch": 128}),
    "stage_data": Row(
        "stage=4,data=2",
        microbatches=32,
        reduction="f32",
        changes={"batch": 64},
    ),
    "fsdp_tensor": Row("fsdp=2,tensor=4", "sequence"),
    "data_fsdp_tensor": Row(
        "data=2,fsdp=2,tensor=2",
        "sequence",
        why={"cpu": "the head is gathered once more for the gradient of its inputs"},
    ),
    "fsdp_context": Row("fsdp=4,context=2", why=HOPS | TILES),
    "fsdp_expert": Row("expert=4,fsdp=2", changes=EXPERTS, experts={"dispatch": "capacity"}),
}


AT_SCALE = {
    16: (
        *("data=2,fsdp=8", "fsdp=16", "fsdp=8,tensor=2", "data=2,fsdp=4,tensor=2"),
        *("fsdp=8,context=2", "stage=4,fsdp=4", "stage=4,data=2,fsdp=2"),
    ),
    64: (
        *("data=8,fsdp=8", "fsdp=64", "data=4,fsdp=16", "fsdp=16,tensor=4"),
        *("data=2,fsdp=8,context=4", "stage=4,fsdp=16", "stage=4,data=2,fsdp=8"),
    ),
}
"""Meshes by the number of devices."""
LENGTH = 4096
"""Tokens of a sequence at scale."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="cpu:8,v5e-8", help="clusters, by commas")
    parser.add_argument("--rows", default=",".join(ROWS), help="names, by commas")
    parser.add_argument("--size", action="append", default=[], help="name=number, of Sizes")
    parser.add_argument("--model", help="a published one, such as llama3-8b")
    parser.add_argument("--layers", type=int, default=8, help="of that model")
    parser.add_argument("--microbatches", default="1,4", help="of that model's rows")
    parser.add_argument("--sequences", type=int, default=1, help="of a device in a microbatch")
    parser.add_argument("--meshes", nargs="+", help="of that model's rows")
    flags = parser.parse_args(arguments)
    start_platforms()
    from shardlib.errors import DoesNotFitError

    found, too_large = [], []
    for name in flags.on.split(","):
        cluster, devices = devices_of(name)
        if isinstance(devices, str):
            print(devices)
            continue
        print(HEAD)
        for row_name, row, sizes in rows_of(flags, cluster):
            try:
                measured = measure(row_name, row, sizes, cluster.platform, devices)
            except DoesNotFitError as error:
                too_large.append({"on": name, "row": row_name, "mesh": row.mesh})
                print(f"{row_name:17} {row.mesh:24} {row.rules:9} {name}: {error}", flush=True)
                continue
            found.append({"on": name, **measured})
            print(line(found[-1]), flush=True)
    worst = {
        f"largest_ratio_{name}": max(row[COUNTS[row["platform"]]] for row in of_one)
        for name in flags.on.split(",")
        if (of_one := [row for row in found if row["on"] == name])
    }
    print(json.dumps({"rows": found, "too_large": too_large, **worst}))


def start_platforms() -> None:
    """Sets what has to be set before JAX starts: no device of this machine is looked for."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Programs are read, not run, and the collectives are those of any level.
    os.environ.setdefault("JAX_OPTIMIZATION_LEVEL", "O0")


def devices_of(name: str) -> tuple[Any, Any]:
    """Returns a cluster and its devices, or why there are none."""
    from shardlib.errors import MissingExtraError
    from shardlib.explain.aot import topology
    from shardlib.hardware import parse_cluster

    cluster = parse_cluster(name)
    try:
        return cluster, topology.devices_of(cluster)
    except MissingExtraError as error:
        return cluster, str(error)


def rows_of(flags: Any, cluster: Any) -> Iterator[tuple[str, Row, Sizes]]:
    """Yields the rows for a cluster, with their names and sizes."""
    width = 4 if cluster.platform == "cpu" else 2
    if flags.model is not None:
        yield from rows_at_scale(flags, cluster, width)
        return
    numbers = (size.partition("=") for size in flags.size)
    base = Sizes(**{name: int(number) for name, _, number in numbers}, compute_bytes=width)
    for name in flags.rows.split(","):
        yield name, ROWS[name], dataclasses.replace(base, **ROWS[name].changes)


def rows_at_scale(flags: Any, cluster: Any, width: int) -> Iterator[tuple[str, Row, Sizes]]:
    """Yields the rows of a published model."""
    from shardlib.plan.workloads.named_models import named_model

    model = named_model(flags.model).model
    dims = ("embed", "heads", "kv_heads", "head_dim", "mlp", "vocab")
    sizes = Sizes(
        flags.layers, *(getattr(model, dim) for dim in dims), length=LENGTH, compute_bytes=width
    )
    # What computes attention on a GPU depends on whether cuDNN is installed.
    attention = "blockwise" if cluster.platform == "gpu" else "auto"
    for mesh in flags.meshes or AT_SCALE[cluster.num_devices]:
        axes = {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(","))}
        asked = map(int, flags.microbatches.split(","))
        least = 2 * axes["stage"] if "stage" in axes else 1
        for microbatches in dict.fromkeys(max(number, least) for number in asked):
            groups = math.prod(axes.get(name, 1) for name in ("data", "fsdp"))
            batch = groups * microbatches * flags.sequences
            for rules in ("standard", "sequence") if "tensor" in axes else ("standard",):
                row = Row(
                    mesh,
                    rules,
                    microbatches=microbatches,
                    reduction="f32" if "data" in axes and microbatches > 1 else None,
                    remat="full",
                    attention=attention,
                    why=HOPS if "context" in axes else {},
                )
                yield f"{flags.model}_x{microbatches}", row, dataclasses.replace(sizes, batch=batch)


def measure(name: str, row: Row, sizes: Sizes, platform: str, devices: Any) -> dict[str, Any]:
    """Compiles one step and returns what it sends, in bytes for each device."""
    from shardlib.explain.analysis.collectives import axes_text, read_program

    compiled = compile_row(row, sizes, devices)
    report = read_program(compiled.text, compiled.mesh)
    every = [executed(c, row, dict(compiled.mesh_sizes), platform) for c in report.collectives]
    large = [c for c in every if c.bytes > SMALL_BYTES]
    small = [c for c in every if c.bytes <= SMALL_BYTES]
    form = sent_bytes(sizes, strategy(row, dict(compiled.mesh_sizes)))
    found: dict[str, float] = {}
    for c in large:
        axes = axes_text(c.mesh_axes)
        found[axes] = found.get(axes, 0.0) + c.folded_bytes
    sent, folded = sum(c.sent_bytes for c in large), sum(found.values())
    return {
        "row": name,
        "mesh": row.mesh,
        "rules": row.rules,
        "microbatches": row.microbatches,
        "platform": platform,
        "sent": sent,
        "folded": folded,
        "closed_form": sum(form.values()),
        "ratio": round(sent / sum(form.values()), 4),
        "folded_ratio": round(folded / sum(form.values()), 4),
        "by_axis": found,
        "closed_form_by_axis": form,
        "small_count": sum(c.count for c in small),
        "small": sum(c.sent_bytes for c in small),
        "why": excess(row, platform, large),
        "trips_known": all(c.trips_known for c in report.collectives),
    }


def executed(collective: Any, row: Row, mesh: dict[str, int], platform: str) -> Any:
    """Returns a collective with its executions on a stage, which skips its idle turns and sends to
    the next stage in its own turns only."""
    if collective.senders and "stage" in (collective.mesh_axes or ()):
        senders = math.prod(mesh.values()) * (mesh["stage"] - 1) // mesh["stage"]
        count = collective.count * collective.senders / senders
        return dataclasses.replace(collective, count=count)
    turns = row.microbatches + 2 * (mesh.get("stage", 1) - 1)
    within = collective.in_loop and "stage" not in (collective.mesh_axes or ())
    if platform == "cpu" or turns == row.microbatches or not within:
        return collective
    count = collective.count * row.microbatches // turns
    return dataclasses.replace(collective, count=count)


def strategy(row: Row, mesh: dict[str, int]) -> Strategy:
    sequence = row.rules == "sequence"
    recomputed = row.remat == "full"
    return Strategy(mesh, row.zero, row.shared, row.microbatches, sequence, recomputed)


def compile_row(row: Row, sizes: Sizes, devices: Any) -> Any:
    """Returns the compiled step of a row, a `CompiledStep`."""
    import jax
    import optax

    import shardlib as sl
    from shardlib.explain.aot.compile import compile_step
    from shardlib.registry import DataSpec
    from shardlib.train.reduce.reduction import ReductionConfig
    from shardlib_models.transformer import loss, make

    mesh = sl.make_mesh(row.mesh, devices=devices)
    policy = "bf16" if sizes.compute_bytes == 2 else "f32"
    config, data = model_config(row, sizes), DataSpec(sizes.vocab, sizes.length)
    with sl.use(mesh, sl.rules.preset(row.rules)):
        optimizer = optax.sgd(1e-3, momentum=0.9)
        state = sl.abstract_state(
            lambda rngs: make(config, data, rngs), optimizer, precision=policy
        )
    step = sl.make_train_step(
        lambda model, batch, rng: loss(model, batch, rng, train=True),
        microbatches=row.microbatches,
        reduction=ReductionConfig(dtype=row.reduction) if row.reduction else None,  # type: ignore[arg-type]
        precision=policy,
        batch_axes=dict.fromkeys(("tokens", "targets"), ("batch", "length")),
    )
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.length), "int32")
    return compile_step(step, (state, {"tokens": tokens, "targets": tokens}), keep=False)


def model_config(row: Row, sizes: Sizes) -> Any:
    from shardlib_models.moe import MoEConfig
    from shardlib_models.transformer_config import TransformerConfig

    experts = None
    if sizes.experts:
        experts = MoEConfig(
            num_experts=sizes.experts,
            experts_per_token=sizes.experts_per_token,
            mlp_dim=sizes.mlp,
            capacity_factor=1.0,
            **row.experts,
        )
    return TransformerConfig(
        num_layers=sizes.layers,
        embed_dim=sizes.embed,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        mlp_dim=sizes.mlp,
        moe=experts,
        # The back end decides nothing that travels, except that a ring and a gather have their own.
        attention="auto" if "context" in row.mesh and row.shared != "ulysses" else row.attention,
        remat=row.remat,
        context=row.shared,
    )


def excess(row: Row, platform: str, collectives: list[Any]) -> str:
    """Returns why a program sends more than the closed form."""
    said = [row.why.get(platform, ""), row.why.get("all", "")]
    saved = {"sliced": 0.0, "added": 0.0}
    for c in collectives:
        for shape, fate in zip(c.shapes, c.fates, strict=False):
            if fate in saved:
                share = c.count * bytes_of(shape) * (c.group_size - 1) / c.group_size
                saved[fate] += share * (1 if fate == "sliced" else 2)
    if saved["sliced"]:
        said.append(f"{saved['sliced'] / 1e6:.0f} MB sent are all-reduces of which a part is read")
    if saved["added"]:
        said.append(f"{saved['added'] / 1e6:.0f} MB are all-reduces that are only added up")
    return "; ".join(filter(None, said))


def bytes_of(shape: str) -> int:
    from shardlib.explain.hlo.text import array_bytes

    return array_bytes(shape)


COLUMNS = "{:17} {:24} {:9} {:8} {:>11} {:>9} {:>6} {:>9} {:>6} {:>10}  {}"
HEAD = COLUMNS.format(
    *("row", "mesh", "rules", "on", "closed form", "sent", "ratio", "folded", "ratio", "small"),
    "by axis, and why",
)


def line(row: dict[str, Any]) -> str:
    """Returns a row as text, in megabytes."""
    form, sent, folded = (f"{row[key] / 1e6:.1f}" for key in ("closed_form", "sent", "folded"))
    ratio, folded_ratio = (f"{row[key]:.3f}" for key in ("ratio", "folded_ratio"))
    small = f"{row['small_count']}: {row['small'] / 1e6:.2f}"
    strategy = (row["row"], row["mesh"], row["rules"], row["on"])
    notes = [] if row["folded_ratio"] == 1.0 else [by_axis(row)]
    notes += [row["why"], "" if row["trips_known"] else "some loops count once"]
    figures = (form, sent, ratio, folded, folded_ratio, small)
    return COLUMNS.format(*strategy, *figures, "; ".join(filter(None, notes)))


def by_axis(row: dict[str, Any]) -> str:
    """Returns the folded bytes of each axis, and those of the closed form."""
    found, form = row["by_axis"], row["closed_form_by_axis"]
    return ", ".join(
        f"{axis} {found.get(axis, 0.0) / 1e6:.1f} for {form.get(axis, 0.0) / 1e6:.1f}"
        for axis in dict.fromkeys([*found, *form])
    )


if __name__ == "__main__":
    main(sys.argv[1:])
