"""Splits that cannot work: what is asked for."""

import dataclasses
from typing import Any

import numpy as np
import optax
from problems import PROBLEMS

import shardlib as sl
from shardlib.registry import DataSpec, family
from shardlib.rules import AxisRules, preset


@dataclasses.dataclass(frozen=True)
class Asked:
    """A step that is lowered and nothing more: no array is made, nothing is compiled."""

    mesh: str
    model: str = "transformer"
    rows: int = 8
    length: int = 16
    rules: str | AxisRules = "standard"
    changes: Any = dataclasses.field(default_factory=dict)
    options: Any = dataclasses.field(default_factory=dict)

    def lower(self) -> None:
        """Raises what is wrong with it."""
        problem = PROBLEMS[self.model]
        data = problem.data
        if self.model != "resnet":
            data = DataSpec(data.vocab_size, self.length)
        config = dataclasses.replace(problem.config, **self.changes)
        chosen = family(config.name)
        assert chosen.validate(config, data) == []
        rules = preset(self.rules) if isinstance(self.rules, str) else self.rules
        with sl.use(sl.make_mesh(self.mesh), rules):
            state = sl.abstract_state(lambda rngs: chosen.make(config, data, rngs), optax.sgd(0.1))
        step = sl.make_train_step(
            lambda model, batch, rng: chosen.loss(model, batch, rng, train=True),
            batch_axes=problem.batch_axes,
            **self.options,
        )
        step.lower(state, self._batch(problem.batches()[0]))

    def _batch(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        def resized(x: np.ndarray) -> np.ndarray:
            sizes = (self.rows, self.length)[: x.ndim] if x.ndim <= 2 else (self.rows,)
            return np.resize(x, (*sizes, *x.shape[len(sizes) :]))

        return {name: resized(x) for name, x in batch.items()}
