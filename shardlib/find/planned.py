"""The layouts that found rules want for the values of a program."""

from collections.abc import Mapping, Sequence

from jax.extend.core import ClosedJaxpr

from shardlib.find.axes import Kind, TracedAxes
from shardlib.jaxprs import Value
from shardlib.partitioner.layout import Dims, from_spec
from shardlib.paths import matches
from shardlib.rules import ActivationNames, AxisRules
from shardlib.rules.analysis import changed, name_of

VARIANT = "."
"""Between the name of an axis and the number of a variant, which has a rule of its own."""
_NO_NAME = "?"
_Names = tuple[str | None, ...]


def planned_layouts(
    closed: ClosedJaxpr,
    arguments: Sequence[tuple[str, Kind]],
    rules: AxisRules,
    sizes: Mapping[str, int],
) -> dict[Value, Dims]:
    """Returns the layouts of the activations of a program by `rules.names`.

    The axes of parameters and inputs are named by path; operations connect them with the axes of
    all activations. A value without rows of the batch, or that the rules cannot cut evenly, is left
    to the partitioner.

    Raises:
        RuleError: If the program connects dims that were different axes when the rules were found.
    """
    assert rules.names is not None
    program = TracedAxes(closed, [kind for _, kind in arguments], fenced=True)
    _check_axes(program, arguments, rules.names)
    inputs = dict(rules.names.inputs)
    axis_names: dict[int, str] = {}
    for tensor, (path, kind) in zip(program.inputs, arguments, strict=True):
        names = inputs.get(path) if kind == "input" else _of_param(path, rules)
        for node, name in zip(program.axes(tensor), names or (), strict=False):
            if name is not None:
                axis_names[node] = _base(name)
    batch = {_base(names[0]) for names in inputs.values() if names and names[0]}
    known = set(axis_names.values())

    def met(name: str | None) -> str | None:
        """Returns the name of an axis in the program: one within it has none."""
        return name and (_base(name) if _base(name) in known else _NO_NAME)

    variants = {_once(map(met, names)): names for names in rules.names.variants}
    planned = {}
    for value, tensor in program.at.items():
        if tensor.kind != "activation":
            continue
        row = _once(axis_names.get(node, _NO_NAME) for node in program.axes(tensor))
        row = tuple(n if size > 1 else None for n, size in zip(row, tensor.aval.shape, strict=True))
        # A variant for no name is not one for an axis without a name.
        row = variants.get(row, tuple(None if n == _NO_NAME else n for n in row))
        if not batch.intersection(row):
            continue
        found = rules.resolve(row, tensor.aval.shape, sizes, "activations")
        if not found.faults and any(found.spec):
            planned[value] = from_spec(found.spec, len(row)).dims
    return planned


def _check_axes(
    program: TracedAxes, arguments: Sequence[tuple[str, Kind]], names: ActivationNames
) -> None:
    """Raises `RuleError` if dims of one axis were of several."""
    inputs = dict(names.inputs)
    seen: dict[int, tuple[str, str]] = {}
    faults = []
    for tensor, (path, kind) in zip(program.inputs, arguments, strict=True):
        dims = names.dims_of(path) if kind == "param" else inputs.get(path)
        if not names.params or kind not in ("param", "input") or dims is None:
            continue
        what = path if kind == "param" else f"the batch's {path or 'array'}"
        if len(dims) != len(tensor.nodes):
            faults.append(f"{what} has {len(tensor.nodes)} dims, and had {len(dims)}")
            continue
        for dim, (node, name) in enumerate(zip(program.axes(tensor), dims, strict=True)):
            axis, where = name and name_of(_base(name)), f"dim {dim} of {what}"
            if axis and program.dims.sizes[node] > 1:
                other, first = seen.setdefault(node, (axis, where))
                if other != axis:
                    faults.append(f"{where} ({axis}) is now one axis with {first} ({other})")
    if faults:
        raise changed("model", faults)


def is_variant(name: str) -> bool:
    """Returns whether a name is that of a variant, such as `length.2`."""
    return _base(name) != name


def _base(name: str) -> str:
    base, dot, number = name.rpartition(VARIANT)
    return base if dot and number.isdecimal() else name


def _of_param(path: str, rules: AxisRules) -> _Names:
    return next((axes for pattern, axes in rules.paths if matches(pattern, path)), ())


def _once(names: object) -> _Names:
    """Returns names with None in place of each repetition."""
    seen: set[str] = set()
    row: list[str | None] = []
    for name in names:  # type: ignore[attr-defined]
        row.append(None if name in seen else name)
        if name != _NO_NAME:
            seen.add(name)
    return tuple(row)
