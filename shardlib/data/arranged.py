"""A source that reorders the rows of another source's batches."""

import dataclasses

import jax
import numpy as np

from shardlib.data.loader import Source
from shardlib.registry import DataSpec


@dataclasses.dataclass(frozen=True, eq=False)
class ArrangedSource:
    """Batches of another source, with its row `rows[r]` as row r; rows may repeat."""

    source: Source
    rows: np.ndarray
    """int [any number of rows]."""

    @property
    def spec(self) -> DataSpec:
        return self.source.spec

    @property
    def global_batch(self) -> int:
        return len(self.rows)

    @property
    def num_steps(self) -> int | None:
        return self.source.num_steps

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct((len(self.rows), *array.shape[1:]), array.dtype)
            for name, array in self.source.element_spec().items()
        }

    def read(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns rows [start, stop) of a step; it reads each row of the other source once."""
        needed, where = np.unique(self.rows[start:stop], return_inverse=True)
        runs = np.split(needed, np.flatnonzero(np.diff(needed) > 1) + 1)
        parts = [self.source.read(step, int(run[0]), int(run[-1]) + 1) for run in runs]
        return {
            name: np.concatenate([part[name] for part in parts])[where]
            for name in self.source.element_spec()
        }
