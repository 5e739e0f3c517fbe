"""The model that found rules rest on: its parameters, and the axes that their dims belong to."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping

from shardlib.errors import RuleError
from shardlib.paths import matches

_FIX = "  Find rules for this model: sl.find_rules, or rules: auto in the config of a new run."


@dataclasses.dataclass(frozen=True)
class ActivationNames:
    """The logical axes of the activations of a model that names none.

    Operations connect the axes of activations with the axes of parameters, which `AxisRules.paths`
    names, and of inputs.

    The rules were chosen for one model. `params` and `inputs` are the fingerprint of its analysis,
    and a state or step of a model with another one is refused: paths and sizes of parameters where
    the state is placed, before anything is allocated, and axes where the loss is partitioned, whose
    program is at hand there. Both cost less than a millisecond, and no state and no partitioned
    loss is made elsewhere.
    """

    inputs: tuple[tuple[str, tuple[str | None, ...]], ...]
    """The axes of the leaves of a batch by path."""
    variants: tuple[tuple[str | None, ...], ...] = ()
    """Activations of which an axis has a rule of its own: `("batch", "length.2", "embed")` is
    placed by the rule of `length.2` in place of that of `length`."""
    params: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The dims of parameters by pattern, as they were analyzed: `embed=512`, or `embed` if any size
    will do. Not checked if empty."""

    @property
    def fingerprint(self) -> str:
        """A short text, equal for equal analyses."""
        told = sorted(self.params), sorted(self.inputs, key=str)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:12]

    def without_sizes(self) -> "ActivationNames":
        """Returns names that do not depend on the sizes of parameters."""
        params = tuple((p, tuple(name_of(dim) for dim in dims)) for p, dims in self.params)
        return dataclasses.replace(self, params=params)

    def dims_of(self, path: str) -> tuple[str, ...] | None:
        """Returns the dims of a parameter; None if it was not analyzed."""
        return next((dims for pattern, dims in self.params if matches(pattern, path)), None)

    def check_params(self, shapes: Mapping[str, tuple[int, ...]], model: str) -> None:
        """Checks the paths and shapes of the parameters of a model.

        Raises:
            RuleError: If they are not those that the rules were found for. It names all of them.
        """
        if not self.params:
            return
        faults = [*self._other_shapes(shapes), *self._gone(shapes)]
        if faults:
            raise changed(model, faults, sizes_only=all("shape" in fault for fault in faults))

    def _other_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
        for path, shape in shapes.items():
            dims = self.dims_of(path)
            if dims is None:
                yield f"{path} is new"
            elif len(dims) != len(shape):
                yield f"{path} has {len(shape)} dims, and had {len(dims)}: {', '.join(dims)}"
            elif any(size not in ("", str(n)) for size, n in zip(_sizes(dims), shape, strict=True)):
                yield f"{path} has shape {list(shape)}, and had {', '.join(dims)}"

    def _gone(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
        for pattern, _ in self.params:
            if not any(matches(pattern, path) for path in shapes):
                yield f"{pattern} is gone"


def name_of(dim: str) -> str:
    """Returns the axis of a dim such as `embed=512`."""
    return dim.partition("=")[0]


def changed(model: str, faults: Iterable[str], *, sizes_only: bool = False) -> RuleError:
    """Returns the error for a model that is not the one that rules were found for."""
    lines = list(dict.fromkeys(faults))
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    text = "\n  ".join([f"these rules were found for another {model}:", *lines[:_SHOWN], *more])
    other = " For another size of one model: rules.at_other_sizes()." if sizes_only else ""
    return RuleError(f"{text}\n{_FIX}{other}")


_SHOWN = 8
"""Faults that an error lists."""


def _sizes(dims: Iterable[str]) -> list[str]:
    return [dim.partition("=")[2] for dim in dims]
