"""Mesh, microbatches and rematerialisation of a published record."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from published.model import Unusable
from shardlib.cost.layout import Layout, Software
from shardlib.cost.transformer import memory
from shardlib.cost.workload import DOTS, EVERY_SECOND, FULL, FULL_EAGER, NONE, SELECTIVE, Job, Remat
from shardlib.hardware import Cluster

_AXES = {
    "tp": "tensor",
    "ici_tensor": "tensor",
    "mp": "tensor",
    "tensor": "tensor",
    "op": "tensor",
    "pp": "stage",
    "dp": "data",
    "dcn_data": "data",
    "dp_replicate": "data",
    "replicate": "data",
    "ici_data": "data",
    "data": "data",
    "fsdp": "fsdp",
    "ici_fsdp": "fsdp",
    "dcn_fsdp": "fsdp",
    "dp_shard": "fsdp",
    "shard": "fsdp",
    "ep": "expert",
    "ici_expert": "expert",
    "expert": "expert",
    "cp": "context",
    "context": "context",
    "ici_context": "context",
    "stage": "stage",
    "vp": "chunks",
}
MINIMAL = Remat(DOTS.kept - {"attention"})
"""Keeps the results of weight matmuls alone (MaxText's `minimal`)."""
_PART = re.compile(r"(fsdp|tp|ep|cp|pp|dp|context|tensor|data|expert|stage)\s*=?\s*(\d*)")
_SAVED = {
    "query": "qkv",
    "qkv": "qkv",
    "q": "qkv",
    "context": "attention",
    "out_proj": "out",
    "mlpwi": "up",
    "mlpwo": "down",
}


def layout_of(
    row: Mapping[str, Any], job: Job, cluster: Cluster, software: Software, assumed: list[str]
) -> tuple[Layout, Job]:
    """Returns the layout of a record, and its job with the remat policy filled in.

    Raises:
        Unusable: If its mesh does not fit its number of chips.
    """
    degrees, zero = _degrees(row, cluster, assumed)
    framework = str(row.get("framework") or "").lower()
    layout = dataclasses.replace(
        Layout.of(degrees, cluster.num_slices),
        zero=zero,
        sequence_parallel=not re.search(r"megatron-lm|alpa", framework)
        or "sequence parallel" in str(row.get("remat") or ""),
        shard_optimizer=bool(
            re.search(r"megatron-?(core|bridge)|nemo|meta's trainer|hai-llm", framework)
        ),
    )
    if layout.num_devices != cluster.num_devices:
        raise Unusable(
            f"its mesh {row.get('mesh')} does not fill its {cluster.num_devices} devices"
        )
    remat = _remat(row)
    split = _with_microbatches(row, job, layout, assumed)
    if split is None or remat is None:
        return _fitting(row, job, split or layout, cluster, software, remat, assumed)
    return split, dataclasses.replace(job, remat=remat)


def _degrees(
    row: Mapping[str, Any], cluster: Cluster, assumed: list[str]
) -> tuple[dict[str, int], Any]:
    """Returns the degrees of the axes and the ZeRO stage, with the remaining devices assigned."""
    mesh = row.get("mesh")
    if isinstance(mesh, str):
        found, filler = _from_text(mesh)
    elif isinstance(mesh, Mapping):
        found, filler = _from_mapping(mesh, assumed)
    else:
        found, filler = {}, "fsdp"
        assumed.append("mesh: fsdp over all devices")
    if cluster.num_slices > 1 and "data" not in found:
        assumed.append("mesh: data over slices")
        found["data"] = cluster.num_slices
    others = math.prod(n for a, n in found.items() if a not in ("chunks", "expert"))
    rest = cluster.num_devices // others
    if found.get("expert", 1) > max(rest, 1):
        # Megatron-LM counts experts over both replicas and tensor-parallel devices.
        replicas = rest * found.pop("data", 1)
        assumed.append("mesh: experts over replicas only")
        found["expert"] = math.gcd(found["expert"], replicas)
        rest = replicas
    rest //= found.get("expert", 1)
    if rest > 1:
        if filler in found:
            assumed.append(f"mesh: {filler} over {rest} times as many devices")
        found[filler] = found.get(filler, 1) * rest
    if "chunks" not in found and found.get("stage", 1) > 1 and "Core" in str(row.get("framework")):
        assumed.append("two chunks of layers on a stage")
        found["chunks"] = 2
    return found, 2 if "GRAD_OP" in str(mesh) else 3


def _from_text(mesh: str) -> tuple[dict[str, int], str]:
    """Returns degrees as in `fsdp64 x ep4`, and the axis that takes the remaining devices."""
    text = re.split(r"[;(]", mesh.lower())[0]
    found: dict[str, int] = {}
    for name, degree in _PART.findall(text):
        if degree:
            found[_AXES[name]] = found.get(_AXES[name], 1) * int(degree)
    return found, "data" if "fsdp" not in text and found else "fsdp"


def _from_mapping(mesh: Mapping[str, Any], assumed: list[str]) -> tuple[dict[str, int], str]:
    found: dict[str, int] = {}
    for key, value in mesh.items():
        if not isinstance(value, int) or value < 1:
            continue
        if key == "model_parallel":
            found["tensor"] = found.get("tensor", 1) * min(8, value)
            found["stage"] = found.get("stage", 1) * max(1, value // 8)
        elif axis := _AXES.get(str(key)):
            found[axis] = found.get(axis, 1) * value
        elif value > 1:
            assumed.append(f"mesh: {key}={value} not understood")
    return found, "data" if found.get("fsdp", 1) == 1 and found else "fsdp"


def _with_microbatches(
    row: Mapping[str, Any], job: Job, layout: Layout, assumed: list[str]
) -> Layout | None:
    """Returns the layout with its microbatches; None if they must be chosen by what fits."""
    per_group = job.batch / layout.batch_shards
    if row.get("micro_batch"):
        count = max(1, round(per_group / row["micro_batch"]))
    elif row.get("micro_batches") or row.get("grad_accum"):
        count = int(row.get("micro_batches") or row["grad_accum"])
    elif row.get("per_chip_batch_seqs") or layout.batch_shards >= job.batch:
        count = 1
    elif layout.stage > 1:
        assumed.append("microbatches of one sequence")
        count = max(1, round(per_group))
    else:
        return None
    return dataclasses.replace(layout, microbatches=count)


def _remat(row: Mapping[str, Any]) -> Remat | None:
    """Returns the remat policy of a record; None if it gives none."""
    text = str(row.get("remat") or "").lower()
    mesh = row.get("mesh")
    if not text and isinstance(mesh, str) and "layer_input" in mesh:
        text = "custom: " + mesh.lower()
    if text.startswith("custom"):
        return _custom(text)
    whole = _whole(row)
    for word, remat in (
        ("none", NONE),
        ("full", FULL_EAGER if whole else FULL),
        ("selective", SELECTIVE if whole else EVERY_SECOND),
        ("minimal_flash", DOTS),
        ("minimal", MINIMAL),
    ):
        if text.startswith(word):
            return remat
    return None


def _whole(row: Mapping[str, Any]) -> bool:
    """Returns whether a record's software reruns a recomputed layer to its end.

    XLA drops results that nothing reads, and so does PyTorch since 2.1 (torch.utils.checkpoint,
    `early_stop`). Megatron-LM's own checkpoints do not, and neither did PyTorch when Composer still
    trained without autocast.
    """
    framework = str(row.get("framework") or "").lower()
    pure = str(row.get("fsdp_mixed") or "").upper() == "PURE"
    return pure or bool(re.search(r"megatron|deepspeed|alpa", framework))


def _custom(text: str) -> Remat:
    """Returns the policy of MaxText's custom remat: the tensors kept, on the device or in host
    memory."""
    words = set(re.findall(r"[a-z_]+", text))
    kept = frozenset(_SAVED[word] for word in words if word in _SAVED)
    if not kept and "layer_input" not in words:
        kept = frozenset({"qkv"})
    offloaded = (kept | {"input"}) if "offload" in words else frozenset()
    return Remat(kept, offloaded)


def _fitting(
    row: Mapping[str, Any],
    job: Job,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    remat: Remat | None,
    assumed: list[str],
) -> tuple[Layout, Job]:
    """Returns the least recomputation, then the largest microbatches, that fit the memory."""
    assert cluster.chip is not None
    whole = FULL_EAGER if _whole(row) else FULL
    choices = [NONE, MINIMAL, Remat(frozenset({"qkv", "attention"})), whole]
    choices = [remat] if remat is not None else choices
    known = _with_microbatches(row, job, layout, [])
    per_group = max(1, round(job.batch / layout.batch_shards))
    counts = [n for n in range(1, per_group + 1) if per_group % n == 0]
    if known is not None:
        counts = [known.microbatches]
    tried = [(count, choice) for choice in choices for count in counts]
    if not tried:
        raise Unusable("it gives neither microbatches nor a batch to split")
    for count, choice in tried:
        candidate = dataclasses.replace(layout, microbatches=count)
        chosen = dataclasses.replace(job, remat=choice)
        needed = memory.peak_memory(chosen, candidate, cluster, software)
        if needed.fits(cluster.chip.memory_bytes_per_device):
            break
    if remat is None:
        assumed.append("rematerialisation: the least that fits")
    if known is None:
        assumed.append(f"{candidate.microbatches} microbatches: the fewest that fit")
    return candidate, chosen
