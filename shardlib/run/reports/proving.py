"""`shardlib check`: proves at a reduced size that a run computes the same numbers on its mesh as on
one device."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardlib.errors import ConfigError, MeshError, ShardlibError
from shardlib.hardware import Cluster, parse_cluster
from shardlib.mesh import MeshConfig, make_mesh
from shardlib.registry import DataSpec, family
from shardlib.rules import RulesConfig
from shardlib.run.checks import expected_spec
from shardlib.run.config import AUTO, RunConfig
from shardlib.run.resolve_auto import resolve
from shardlib.run.setup import make_scope, model_maker, open_source, setup, trained
from shardlib.tables import aligned
from shardlib.testing.equivalent import Comparison, Reference

DEVICES = 8
"""Number of virtual devices of a check, and the largest size of its mesh."""
_SMALLEST = 16
"""Lower bound of a reduced width per device of the largest mesh axis."""
_KEPT = ("head_dim", "window", "loss_chunks", "depth", "experts_per_token")
"""Sizes that stay fixed, since they are neither widths nor counts of the model."""

_SHOWN = 10
"""Most differing leaves that a table lists."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """The comparison on a mesh, and the model sizes that it used."""

    comparison: Comparison
    sizes: str

    @property
    def is_right(self) -> bool:
        """Whether all differences are within rounding."""
        return not self.comparison.deviations

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the differing leaves, worst relative to its bound first: quantity, error, scale,
        bound."""
        worst = sorted(self.comparison.deviations, key=lambda d: -d.error / max(d.bound, 1e-30))
        return [
            (str(d.quantity), f"{d.error:.1e}", f"{d.scale:.1e}", f"{d.bound:.1e}") for d in worst
        ]


def prove(config: RunConfig, mesh: str | None = None, *, steps: int = 3) -> Proof:
    """Trains a reduced model on virtual devices and on one device, and compares every leaf.

    Args:
        config: The config of a run. Its widths, layers and lengths are halved as long as the model
            and the mesh allow it; rules, optimizer, schedule of the stages and losses stay. It
            computes in float32 at any configured precision.
        mesh: A mesh in place of the config's.
        steps: Number of steps to train.

    Raises:
        ConfigError: If the run uses local SGD, whose numbers differ from one device's.
        MeshError: If there are fewer devices than the mesh needs.
    """
    if config.train.local_sgd is not None:
        raise ConfigError(
            "check compares a run with one device, but train.local_sgd trains groups separately.\n"
            "  Set train.local_sgd=null to check the rest."
        )
    on_mesh = config if mesh is None else config.with_mesh(mesh)
    config = resolve(on_mesh, _cluster_of(on_mesh)).config
    spec = small_mesh(config.mesh)
    needed = math.prod(MeshConfig.parse(spec).sizes.values())
    if needed > jax.device_count():
        raise MeshError(
            f"mesh {spec} needs {needed} devices, but JAX has started with {jax.device_count()}.\n"
            "  Call sl.local_cpu_devices(8) before JAX is first used."
        )
    small = reduced(config, spec)
    devices = jax.devices()[:needed]
    data, batches = _batches(small, steps)
    parts = setup(small, data, make_scope(small, devices))
    step = parts.train_step()
    reference = Reference(
        model_maker(small, parts.family, parts.data),
        parts.loss(train=True),
        batches,
        optimizer=parts.optimizer.transform,
        microbatches=small.train.num_microbatches,
        batch_axes=parts.inputs.axes_for(parts.data),
        wrt=trained(small),
        seed=small.seed,
        device=devices[0],
    )
    comparison = reference.compare(
        make_mesh(spec, devices=devices),
        rules=small.axis_rules(),
        steps=steps,
        pipeline=step.pipeline,  # type: ignore[union-attr]
        reduction=small.reduction(),
        constrain=small.train.constrain,
    )
    return Proof(comparison, _sizes(small))


def _cluster_of(config: RunConfig) -> Cluster:
    """Returns CPU devices for the mesh of a config, as many as it needs."""
    sizes = {} if config.mesh == AUTO else MeshConfig.parse(config.mesh).sizes
    is_given = sizes and all(size > 0 for size in sizes.values())
    return parse_cluster(f"cpu:{math.prod(sizes.values()) if is_given else DEVICES}")


def small_mesh(spec: str | Mapping[str, int | str]) -> str:
    """Returns a mesh of at most `DEVICES` devices with the same axes, the largest ones halved."""
    sizes = MeshConfig.parse(spec).sizes
    fixed = math.prod(size for size in sizes.values() if size > 0)
    if any(size < 0 for size in sizes.values()):
        rest = max(DEVICES // fixed, 1)
        sizes = {name: rest if size < 0 else size for name, size in sizes.items()}
    while math.prod(sizes.values()) > DEVICES:
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] % 2:
            raise MeshError(
                f"mesh {spec} cannot be halved to {DEVICES} devices: {largest}={sizes[largest]} is "
                "odd.\n  Name a smaller mesh: --mesh data=2,fsdp=2,tensor=2."
            )
        sizes[largest] //= 2
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def reduced(config: RunConfig, mesh: str) -> RunConfig:
    """Returns a config whose model sizes are each halved as long as the config stays valid. Sizes
    stay if the family does not say what is valid.

    A count of layers or heads shrinks to what the mesh divides, a width to 16 times as much. A size
    that the mesh divides stays divisible: 128,256 halves to 4,008 on eight devices, not to 501.
    """
    sizes = MeshConfig.parse(mesh).sizes
    widest, devices = max(sizes.values()), math.prod(sizes.values())
    stages = sizes.get("stage", 1) * config.train.pipeline.chunks
    model = config.model
    for field in dataclasses.fields(model):
        size = getattr(model, field.name)
        if not isinstance(size, int) or isinstance(size, bool) or field.name in _KEPT:
            continue
        if field.name == "num_layers":
            least, divisor = 2 * stages, stages
        elif field.name.startswith("num_"):
            least, divisor = widest, widest
        else:
            least, divisor = widest * _SMALLEST, devices
        while size % 2 == 0 and size // 2 >= least:
            if size % divisor == 0 and size // 2 % divisor:
                break
            size //= 2
            smaller = dataclasses.replace(model, **{field.name: size})
            if not _is_valid(config, smaller):
                break
            model = smaller
    rows = DEVICES * config.train.num_microbatches
    train = dataclasses.replace(config.train, global_batch=rows)
    rules = config.rules
    if isinstance(rules, RulesConfig) and rules.names is not None:
        rules = RulesConfig.of(config.axis_rules().at_other_sizes())
    changes = {"model": model, "train": train, "precision": "f32", "mesh": mesh, "rules": rules}
    return dataclasses.replace(config, **changes)


def _is_valid(config: RunConfig, model: Any) -> bool:
    validate = family(model.name).validate
    try:
        small = dataclasses.replace(config, model=model)
        return validate is not None and not validate(model, _data(small))
    except (ValueError, ShardlibError):
        return False


def _data(config: RunConfig) -> DataSpec:
    spec, reduced = expected_spec(config), family(config.model.name).inputs.reduced
    return spec if reduced is None else reduced(spec, config.model)


def _batches(config: RunConfig, count: int) -> tuple[DataSpec, list[dict[str, np.ndarray]]]:
    """Returns batches, random ones if the model family can draw them, and their spec."""
    rows, draw = config.train.global_batch, family(config.model.name).inputs.example
    if draw is None:
        source = open_source(config, "train")
        return source.spec, [source.read(step, 0, rows) for step in range(count)]
    random, data = np.random.default_rng(0), _data(config)
    return data, [draw(random, rows, data) for _ in range(count)]


def _sizes(config: RunConfig) -> str:
    """Returns the sizes of a model as text."""
    model = config.model
    sizes = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    named = {n: s for n, s in sizes.items() if isinstance(s, int) and not isinstance(s, bool) and s}
    return ", ".join(f"{name}={size}" for name, size in named.items())


def tables(proofs: Sequence[Proof]) -> str:
    """Returns the results as text, mesh by mesh, with the worst leaves of a failed mesh."""
    lines = []
    for proof in proofs:
        lines += [str(proof.comparison).split("\n")[0], f"  at {proof.sizes}"]
        unequal = proof.rows()
        rows = [("quantity", "error", "magnitude", "rounding"), *unequal[:_SHOWN]]
        if len(rows) > 1:
            lines += [f"  {line}" for line in aligned(rows)]
        if len(unequal) > _SHOWN:
            lines.append(f"  and {len(unequal) - _SHOWN} more; --json lists all")
    return "\n".join(lines)
