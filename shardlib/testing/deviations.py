"""Quantities compared between two trainings, their allowed differences, and deviations."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from shardlib.errors import ModelError
from shardlib.humanize import plural
from shardlib.testing.rounding import widened

# A factor 2 for the two orders, each of which is off; another 2 for the sums among activations and
# cotangents, which a change of the weights does not affect.
SAFETY = 4.0

# If rounding alone may change a quantity by more than this share, a comparison proves little.
WORTH_COMPARING = 2.0**-7


class Quantity(NamedTuple):
    """A compared quantity: a number, a leaf, or one layer of a leaf."""

    kind: str
    path: str = ""
    layer: int | None = None
    step: int = 0
    is_exact: bool = False

    def __str__(self) -> str:
        if self.kind == "loss":
            return f"the loss of step {self.step}"
        layer = "" if self.layer is None else f", layer {self.layer}"
        after = f", after {plural(self.step, 'step')}" if self.step else ""
        name = f"the {self.kind} {self.path}".rstrip()
        return f"{name}{layer}{after}".replace("gradient ", "gradient of ")


Values = Mapping[Quantity, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Deviation:
    """A quantity that is further off than rounding allows.

    `error` is the largest difference of its elements, `scale` its largest magnitude on one device,
    `bound` the difference explained by rounding.
    """

    quantity: Quantity
    error: float
    scale: float
    bound: float

    def __str__(self) -> str:
        allowed = f"rounding explains {self.bound:.1e}"
        if self.quantity.is_exact:
            allowed = "it must not differ at all"
        return f"{self.quantity} is off by {self.error:.1e} (of {self.scale:.1e}); {allowed}"


@dataclasses.dataclass(frozen=True)
class Expected:
    """The values on one device, and the difference of each that rounding explains."""

    values: Values
    bounds: Mapping[Quantity, float]
    """The allowed differences: 0 for integers and initial values."""

    @classmethod
    def measured(cls, values: Values, probes: Iterable[Values], relative: float) -> "Expected":
        """Measures the bounds. Probes are trainings on one device from parameters with a `relative`
        change, which is also the possible error of the sum that makes a leaf."""
        bounds = {q: relative * _magnitude(value) for q, value in values.items()}
        changes = dict.fromkeys(values, 0.0)
        for probe in probes:
            changes = {q: max(changes[q], _difference(probe[q], values[q])) for q in values}
        exact = {q: 0.0 for q in values if q.is_exact}
        return cls(values, {q: SAFETY * (changes[q] + bounds[q]) for q in values} | exact)

    def deviations(self, values: Values) -> tuple[Deviation, ...]:
        """Returns the quantities that differ by more than allowed, in the order of the values."""
        errors = {q: _difference(values[q], expected) for q, expected in self.values.items()}
        return tuple(
            Deviation(q, error, _magnitude(self.values[q]), self.bounds[q])
            for q, error in errors.items()
            if error > self.bounds[q]
        )

    def nearest(self, values: Values) -> tuple[float, Quantity]:
        """Returns the largest difference as a share of its bound, and its quantity."""
        shares = (
            (_difference(values[q], self.values[q]) / bound, q)
            for q, bound in self.bounds.items()
            if bound > 0
        )
        return max(shares, key=lambda share: share[0])

    def blurred(self) -> list[Quantity]:
        """Returns quantities that rounding may change by more than 1 in 128: they prove little."""
        scales = {q: WORTH_COMPARING * _magnitude(value) for q, value in self.values.items()}
        return [q for q, scale in scales.items() if self.bounds[q] > scale > 0]

    def refuse_chaos(self, narrow: str = "") -> None:
        """Rejects a training whose loss, or half of its gradients, is blurred.

        Args:
            narrow: What the program rounds to less than float32, and where; empty if nothing.

        Raises:
            ModelError: If it is blurred.
        """
        unclear = [q for q in self.blurred() if q.kind in ("loss", "gradient")]
        num_gradients = sum(q.kind == "gradient" and x.any() for q, x in self.values.items())
        losses = [q for q in unclear if q.kind == "loss"]
        if losses or 2 * len(unclear) > num_gradients:
            first = (losses or unclear)[0]
            change = self.bounds[first] / SAFETY
            few = "fewer steps, a lower learning rate or more examples"
            fix = f"Take {few}"
            if narrow:
                fix = f"Compute in float32, where the step rounds {narrow}; or take {few}"
            raise ModelError(
                f"{first} cannot be compared: rounding of the parameters changes it by "
                f"{change:.1e} on one device already.\n  {fix}."
            )


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference of two arrays; infinite where only one is a number."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = widened(a), widened(b)
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    difference = np.where(np.isfinite(a) & np.isfinite(b), difference, np.inf)
    return float(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, difference).max(initial=0))


def _magnitude(value: np.ndarray) -> float:
    return float(np.abs(widened(value)).max(initial=0))
