"""Every way to split a model that is held against one device: a row is a case."""

import dataclasses
from typing import Any

from shardlib.mesh import MeshConfig
from shardlib.rules import SEQUENCE, STANDARD, ZERO1, ZERO2, AxisRules
from shardlib.train.reduce.reduction import ReductionConfig
from shardlib_models.moe import MoEConfig

# Too few places for tokens that crowd.
_CAPACITY = MoEConfig(num_experts=8, mlp_dim=32, dispatch="capacity", capacity_factor=1.0)

_DENSE_FIRST = MoEConfig(num_experts=8, mlp_dim=32, dense_layers=3)

# What the words of the tables below mean: `changes` are made to the config of the model, those of
# `how` on the mesh alone, and `options` are those of `make_train_step`.
WAYS: dict[str, dict[str, Any]] = {
    "30 steps": {"steps": 30},
    # The stages of ZeRO, and the residual stream cut along length over `tensor` too.
    "zero1": {"rules": ZERO1},
    "zero2": {"rules": ZERO2},
    "sequence": {"rules": SEQUENCE},
    # Schedules; without a word it is 1F1B. Interleaved runs the layers in another order.
    "gpipe": {"options": {"pipeline": "gpipe"}},
    "interleaved": {"options": {"pipeline": "interleaved"}},
    # Stages of unequally many layers.
    "7 layers": {"changes": {"num_layers": 7}},
    "3 of 14 layers dense": {"changes": {"num_layers": 14, "moe": _DENSE_FIRST}},
    # How devices along `context` share a row: by a ring, or gathered where there are stages. The
    # row lies in zig-zag order where neither masks nor places of experts go by index.
    "no dropout": {"changes": {"dropout": 0.0}},
    "gathered": {"how": {"context": "gather"}},
    "ulysses": {"how": {"context": "ulysses"}},
    # Gradients that are summed once a step, within slices and then between them; and by groups of
    # unequal speed.
    "hops": {"options": {"reduction": ReductionConfig(dtype="f32", outer=2)}},
    "uneven": {"options": {"reduction": ReductionConfig(group_microbatches=(3, 1))}},
    "capacity": {"changes": {"moe": _CAPACITY}},
    # Devices with the same tokens and other experts.
    "apart": {"rules": STANDARD.override(expert="tensor", mlp=None)},
}

# Mesh, microbatches, words. Every axis alone, pairs, three and more, and slices ("2x4").
_TRANSFORMER = [
    ("data=8", 1, "30 steps"),
    ("fsdp=8", 1, ""),
    ("tensor=8", 1, ""),
    ("context=8", 1, ""),
    ("expert=8", 1, ""),
    ("stage=8", 4, "gpipe"),
    ("fsdp=8", 1, "zero1"),
    ("fsdp=8", 1, "zero2"),
    ("tensor=8", 1, "sequence"),
    # Pairs; those with experts are below.
    ("data=2,fsdp=4", 1, ""),
    ("data=4,tensor=2", 1, ""),
    ("data=4,context=2", 1, ""),
    ("data=2,context=4", 1, "gathered"),
    ("fsdp=4,tensor=2", 2, ""),
    ("fsdp=2,context=4", 1, ""),
    ("fsdp=2,tensor=4", 1, "sequence"),
    ("context=4,tensor=2", 1, ""),
    ("context=4,tensor=2", 1, "no dropout"),
    ("context=4,tensor=2", 1, "ulysses"),
    ("stage=2,data=4", 2, ""),
    ("stage=4,fsdp=2", 4, ""),
    ("stage=4,fsdp=2", 4, "zero2, 7 layers"),
    ("stage=2,tensor=4", 4, "interleaved"),
    ("stage=4,context=2", 4, ""),
    ("stage=2,context=4", 2, "no dropout"),
    ("stage=4,expert=2", 4, "interleaved"),
    # Three and more.
    ("data=2,fsdp=2,tensor=2", 1, "30 steps"),
    ("data=2,fsdp=2,tensor=2", 1, "no dropout, uneven"),
    ("data=2,fsdp=2,expert=2", 1, "zero2"),
    ("data=2,context=2,tensor=2", 1, ""),
    ("data=2,context=2,tensor=2", 1, "gathered"),
    ("data=2,context=2,tensor=2", 1, "sequence"),
    ("stage=2,fsdp=2,tensor=2", 4, ""),
    ("stage=2,fsdp=2,tensor=2", 4, "interleaved"),
    ("stage=2,fsdp=2,tensor=2", 4, "30 steps"),
    ("stage=2,data=2,tensor=2", 2, "gpipe"),
    ("stage=2,context=2,tensor=2", 2, ""),
    # Slices.
    ("data=2x4", 1, ""),
    ("data=2x2,tensor=2", 1, ""),
    ("data=2x2,tensor=2", 2, "no dropout, hops"),
    ("data=2x2,fsdp=2", 1, "no dropout, hops"),
    ("stage=2,data=2x2", 2, "no dropout, hops"),
    ("stage=2,data=2x2", 2, "no dropout, hops, 7 layers"),
    ("data=2x1,fsdp=4", 1, ""),
    ("stage=2x1,data=2,fsdp=2", 2, ""),
]

_MOE = [
    ("expert=8", 1, ""),
    ("expert=4,fsdp=2", 1, ""),
    ("expert=4,fsdp=2", 1, "no dropout, capacity"),
    ("data=2,expert=4", 1, ""),
    ("expert=4,context=2", 1, ""),
    ("expert=4,context=2", 1, "no dropout"),
    ("expert=4,context=2", 1, "no dropout, capacity"),
    ("expert=4,tensor=2", 1, ""),
    ("expert=2,tensor=4", 1, "sequence"),
    ("data=2,tensor=4", 1, "apart"),
    ("stage=2,expert=4", 2, ""),
    ("fsdp=2,expert=2,tensor=2", 1, ""),
    ("stage=2,expert=2,tensor=2", 2, "interleaved"),
    ("stage=4,expert=2", 4, "3 of 14 layers dense"),
    ("data=2x2,expert=2", 1, ""),
]

_RESNET = [
    ("data=8", 1, ""),
    ("fsdp=8", 1, ""),
    ("data=2,fsdp=4", 1, "zero2"),
    ("data=2x2,fsdp=2", 1, ""),
]

# Noise is drawn by the loss. `context` cuts positions, but not the tokens of a text.
_UNET = [
    ("data=8", 1, ""),
    ("fsdp=8", 1, ""),
    ("tensor=8", 1, ""),
    ("fsdp=4,tensor=2", 2, ""),
    ("data=2,context=2,tensor=2", 1, "sequence"),
    ("data=2x2,fsdp=2", 1, "zero2"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of a table: a model on a mesh, and how."""

    model: str
    mesh: str
    microbatches: int
    words: str

    def __str__(self) -> str:
        parts = f"{self.microbatches} microbatches" if self.microbatches > 1 else ""
        return " ".join(filter(None, (self.model, self.mesh, parts, self.words)))

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh axes."""
        return MeshConfig.parse(self.mesh).sizes

    @property
    def steps(self) -> int:
        return self._the("steps", 4)

    @property
    def rules(self) -> AxisRules:
        return self._the("rules", STANDARD)

    @property
    def changes(self) -> tuple[tuple[str, Any], ...]:
        """To the config of the model, on one device too."""
        return tuple(self._all("changes").items())

    @property
    def how(self) -> tuple[tuple[str, Any], ...]:
        """Changes to the config of the model on the mesh."""
        return tuple(self._all("how").items())

    @property
    def options(self) -> dict[str, Any]:
        """Of the step on the mesh."""
        return {"microbatches": self.microbatches, **self._all("options")}

    @property
    def reference_microbatches(self) -> int:
        """Into how many parts one device splits a batch: into none when masks do not ask for it."""
        is_exact = self.model == "transformer" and ("dropout", 0.0) in self.changes
        return 1 if is_exact else self.microbatches

    def _the(self, key: str, default: Any) -> Any:
        return next((way[key] for way in self._ways if key in way), default)

    def _all(self, key: str) -> dict[str, Any]:
        return {name: value for way in self._ways for name, value in way.get(key, {}).items()}

    @property
    def _ways(self) -> list[dict[str, Any]]:
        return [WAYS[word] for word in self.words.split(", ")] if self.words else []


CASES = [
    Case(model, *row)
    for model, rows in {
        "transformer": _TRANSFORMER,
        "moe": _MOE,
        "resnet": _RESNET,
        "unet": _UNET,
    }.items()
    for row in rows
]
