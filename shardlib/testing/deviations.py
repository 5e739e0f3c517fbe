"""Quantities compared between two trainings, their allowed differences, and deviations."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardlib.humanize import plural
from shardlib.testing.order import LAST, Use
from shardlib.testing.training import Leaves, Snapshot, Training

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
        return f"the {self.kind} {self.path}{layer}{after}".replace("gradient ", "gradient of ")


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
        if self.quantity.is_exact:
            allowed = "; it must not differ at all"
        else:
            allowed = f"; rounding explains {self.bound:.1e}"
        return f"{self.quantity} is off by {self.error:.1e} (of {self.scale:.1e}){allowed}"


class Order:
    """The order in which the parameters of a model are used, and which are stacks of layers."""

    def __init__(self, uses: Mapping[int, Use], positions: Mapping[int, str]):
        """Args: the first uses of a program's arguments, and the paths of the parameters."""
        self._uses = {path: uses.get(at, LAST) for at, path in positions.items()}

    def use(self, path: str) -> Use:
        """Returns the use of a parameter, or of the parameter of an optimizer leaf."""
        parts = path.split("/")
        suffixes = ("/".join(parts[start:]) for start in range(len(parts)))
        return next((self._uses[suffix] for suffix in suffixes if suffix in self._uses), LAST)


def quantities(training: Training, order: Order) -> dict[Quantity, np.ndarray]:
    """Returns all compared quantities of a training, in the order in which they are computed.

    First the initial state, then the loss of the first step, its gradients from the last layer to
    the first, the losses of later steps, and the state after them.
    """
    steps = len(training.losses)
    losses = {Quantity("loss", step=i + 1): value for i, value in enumerate(training.losses)}
    gradients = _split(training.gradients, "gradient", order)
    found = {
        **_snapshot(training.initial, order, step=0),
        **dict(list(losses.items())[:1]),
        **dict(reversed(list(gradients.items()))),
        **dict(list(losses.items())[1:]),
        **_snapshot(training.final, order, step=steps),
    }
    return found


def _snapshot(snapshot: Snapshot, order: Order, step: int) -> dict[Quantity, np.ndarray]:
    prefix = "" if step else "initial "
    return {
        **_split(snapshot.params, f"{prefix}parameter", order, step),
        **_split(snapshot.opt_state, f"{prefix}optimizer state", order, step),
        **_split(snapshot.model_state, f"{prefix}model state", order, step),
    }


def _split(leaves: Leaves, kind: str, order: Order, step: int = 0) -> dict[Quantity, np.ndarray]:
    """Returns leaves in the order in which they are used, with stacks split into layers."""
    keyed = []
    for path, leaf in leaves.items():
        use = order.use(path)
        is_exact = kind.startswith("initial") or not jnp.issubdtype(leaf.dtype, jnp.floating)
        is_stack = use.layers is not None and leaf.shape[:1] == (use.layers,)
        for layer in range(leaf.shape[0]) if is_stack else (None,):
            value = leaf if layer is None else leaf[layer]
            keyed.append((use.key(layer), Quantity(kind, path, layer, step, is_exact), value))
    keyed.sort(key=lambda entry: entry[0])
    return {quantity: np.asarray(value) for _, quantity, value in keyed}


def bounds(
    expected: Mapping[Quantity, np.ndarray],
    probes: Sequence[Mapping[Quantity, np.ndarray]],
    relative: float,
) -> dict[Quantity, float]:
    """Returns the allowed difference of each quantity: 0 for integers and initial values.

    Args:
        expected: The training on one device.
        probes: Trainings on one device from changed parameters.
        relative: The relative change of the parameters, which is also the possible error of the sum
            that makes a leaf.
    """
    return {
        quantity: 0.0
        if quantity.is_exact
        else SAFETY
        * (
            max(_difference(probe[quantity], value) for probe in probes)
            + relative * _magnitude(value)
        )
        for quantity, value in expected.items()
    }


def deviations(
    found: Mapping[Quantity, np.ndarray],
    expected: Mapping[Quantity, np.ndarray],
    allowed: Mapping[Quantity, float],
) -> Iterator[Deviation]:
    """Yields the quantities that differ by more than allowed."""
    for quantity, value in expected.items():
        error = _difference(found[quantity], value)
        if error > allowed[quantity]:
            yield Deviation(quantity, error, _magnitude(value), allowed[quantity])


def nearest(
    found: Mapping[Quantity, np.ndarray],
    expected: Mapping[Quantity, np.ndarray],
    allowed: Mapping[Quantity, float],
) -> tuple[float, Quantity]:
    """Returns the largest difference as a share of its bound, and its quantity."""
    shares = (
        (_difference(found[quantity], value) / allowed[quantity], quantity)
        for quantity, value in expected.items()
        if allowed[quantity] > 0
    )
    return max(shares, key=lambda share: share[0])


def blurred(
    expected: Mapping[Quantity, np.ndarray], allowed: Mapping[Quantity, float]
) -> list[Quantity]:
    """Returns quantities that rounding may change by more than 1 in 128: they prove little."""
    return [
        quantity
        for quantity, value in expected.items()
        if allowed[quantity] > WORTH_COMPARING * _magnitude(value) > 0
    ]


def counted(others: Sequence[Any]) -> str:
    """Returns deviations by kind: `3 gradients, 2 losses`."""
    counts = collections.Counter(d.quantity.kind for d in others)
    return ", ".join(plural(n, kind) for kind, n in counts.items())


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference of two arrays; infinite where only one is a number."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    difference = np.where(np.isfinite(a) & np.isfinite(b), difference, np.inf)
    return float(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, difference).max(initial=0))


def _magnitude(value: np.ndarray) -> float:
    return float(np.abs(np.asarray(value, np.float64)).max(initial=0))
