"""Every way to split a model that is held against one device: a row is a case."""

import dataclasses
from typing import Any

from shardlib.mesh import MeshConfig
from shardlib.train.reduction import ReductionConfig
from shardlib_models.moe import MoEConfig


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh.

    `changes` are made to the config of the model. On the mesh alone those of `how` are made too,
    and `options` are those of `make_train_step`.
    """

    model: str
    mesh: str
    steps: int = 4
    microbatches: int = 1
    rules: str = "standard"
    changes: tuple[tuple[str, Any], ...] = ()
    how: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    note: str = ""
    """What these come to, for the name of the case."""

    def __str__(self) -> str:
        parts = [self.model, self.mesh]
        parts += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        parts += [self.rules] if self.rules != "standard" else []
        parts += [self.note] if self.note else []
        return " ".join(parts)

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh axes."""
        return MeshConfig.parse(self.mesh).sizes


def _case(model: str, mesh: str, *, rules: str = "standard", **given: Any) -> Case:
    for key in ("changes", "how", "options"):
        given[key] = tuple(given.get(key, {}).items())
    return Case(model, mesh, rules=rules, **given)


# Too few places for tokens that crowd.
_CAPACITY = MoEConfig(num_experts=8, mlp_dim=32, dispatch="capacity", capacity_factor=1.0)
_HOPS = {"reduction": ReductionConfig(dtype="f32", outer=2), "microbatches": 2}
_GROUPS = {"reduction": ReductionConfig(group_microbatches=(1, 1, 1, 1))}

_DENSE = [
    # Every axis alone. Some train for 30 steps: one of each kind.
    _case("transformer", "data=8", steps=30),
    _case("transformer", "fsdp=8"),
    _case("transformer", "tensor=8"),
    _case("transformer", "context=8"),
    _case("transformer", "expert=8"),
    _case("transformer", "data=2,fsdp=2,tensor=2", steps=30),
    # Pairs; those with experts are below.
    _case("transformer", "data=2,fsdp=4"),
    _case("transformer", "data=4,tensor=2"),
    _case("transformer", "data=4,context=2"),
    _case("transformer", "fsdp=4,tensor=2", microbatches=2),
    _case("transformer", "fsdp=2,context=4"),
    _case("transformer", "context=4,tensor=2"),
    # Three and more, and several slices.
    _case("transformer", "data=2,context=2,tensor=2"),
    _case("transformer", "data=2x4"),
    _case("transformer", "data=2x2,tensor=2"),
    _case("transformer", "data=2x1,fsdp=4"),
    # Stages of a pipeline; the interleaved schedule runs the layers in another order.
    _case("transformer", "stage=8", microbatches=4, options={"pipeline": "gpipe"}, note="gpipe"),
    _case("transformer", "stage=2,data=4", microbatches=2),
    _case("transformer", "stage=4,fsdp=2", microbatches=4),
    _case(
        "transformer",
        "stage=2,tensor=4",
        microbatches=4,
        options={"pipeline": "interleaved"},
        note="interleaved",
    ),
    _case("transformer", "stage=4,context=2", microbatches=4),
    _case(
        "transformer",
        "stage=4,expert=2",
        microbatches=4,
        options={"pipeline": "interleaved"},
        note="interleaved",
    ),
    _case("transformer", "stage=2,fsdp=2,tensor=2", microbatches=4, steps=30),
    _case(
        "transformer",
        "stage=2,data=2,tensor=2",
        microbatches=2,
        options={"pipeline": "gpipe"},
        note="gpipe",
    ),
    _case("transformer", "stage=2,context=2,tensor=2", microbatches=2),
    _case("transformer", "stage=2x1,data=2,fsdp=2", microbatches=2),
    # How devices along `context` share a row: without dropout in zig-zag order.
    _case("transformer", "context=4,tensor=2", changes={"dropout": 0.0}, note="zig-zag"),
    _case("transformer", "data=2,context=4", how={"context": "gather"}, note="gathered"),
    _case("transformer", "context=4,tensor=2", how={"context": "ulysses"}, note="ulysses"),
    # Gradients summed once a step, first within slices and then between them.
    _case("transformer", "data=2x2,tensor=2", changes={"dropout": 0.0}, options=_HOPS, note="hops"),
    _case("transformer", "data=4,fsdp=2", changes={"dropout": 0.0}, options=_GROUPS, note="groups"),
    # Stages of ZeRO, and the residual stream cut along length.
    _case("transformer", "fsdp=8", rules="zero1"),
    _case("transformer", "data=2,fsdp=2,expert=2", rules="zero2"),
    _case("transformer", "tensor=8", rules="sequence"),
    _case("transformer", "fsdp=2,tensor=4", rules="sequence"),
    _case("transformer", "data=2,context=2,tensor=2", rules="sequence"),
]

_CONVOLUTIONAL = [
    _case("resnet", "data=8"),
    _case("resnet", "fsdp=8"),
    _case("resnet", "data=2x2,fsdp=2"),
    _case("resnet", "data=2,fsdp=4", rules="zero2"),
]

_EXPERTS = [
    _case("moe", "expert=8"),
    _case("moe", "expert=4,fsdp=2"),
    _case("moe", "data=2,expert=4"),
    _case("moe", "expert=4,context=2"),
    _case("moe", "expert=4,tensor=2"),
    _case("moe", "stage=2,expert=4", microbatches=2),
    _case("moe", "fsdp=2,expert=2,tensor=2"),
    _case(
        "moe",
        "stage=2,expert=2,tensor=2",
        microbatches=2,
        options={"pipeline": "interleaved"},
        note="interleaved",
    ),
    _case("moe", "data=2x2,expert=2"),
    _case("moe", "expert=2,tensor=4", rules="sequence"),
    _case("moe", "expert=4,fsdp=2", changes={"moe": _CAPACITY}, note="capacity"),
]

CASES = [*_DENSE, *_EXPERTS, *_CONVOLUTIONAL]
