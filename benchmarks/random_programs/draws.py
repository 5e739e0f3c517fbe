"""Random choices that a seed decides."""

from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Random:
    """A generator that picks one of several, or says yes with a probability."""

    def __init__(self, *seed: int):
        self.generator = np.random.default_rng(seed)

    def pick(self, *options: T) -> T:
        """Returns one of the options, each equally likely."""
        return options[int(self.generator.integers(len(options)))]

    def chance(self, probability: float) -> bool:
        """Returns True with this probability."""
        return bool(self.generator.random() < probability)

    def normal(self, *shape: int) -> np.ndarray:
        """Returns standard normal numbers, float32."""
        return self.generator.standard_normal(shape).astype(np.float32)

    def below(self, limit: int, *shape: int) -> np.ndarray:
        """Returns whole numbers from 0 up to a limit, int32."""
        return self.generator.integers(0, limit, shape).astype(np.int32)
