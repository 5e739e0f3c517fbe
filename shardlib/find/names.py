"""Names of discovered axes, and the table of rules."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

from shardlib.cost.traced.primitives import PARAMS_TABLE
from shardlib.find.attention_choices import attention_rules
from shardlib.find.context import attended_axes
from shardlib.find.equivalence import Classes, FoundAxis, Touch, pattern_of
from shardlib.find.experts import EXPERT, experts_of
from shardlib.find.opt_state import StateCuts, with_state_cut
from shardlib.find.planned import VARIANT, is_variant
from shardlib.find.problem import Solution
from shardlib.find.trace import INPUT
from shardlib.functional import AxesByPath
from shardlib.partitioner.factors import dims_of
from shardlib.paths import matches
from shardlib.rules import ActivationNames, AxisRules
from shardlib.rules.resolve import ANY

BATCH = "batch"
"""The rows of all leaves of a batch, whether or not operations connect them."""
_Names = tuple[str | None, ...]
_Rule = tuple[tuple[str, ...], bool]
"""The mesh axes of a name, and whether optimizer state may have more."""
_Tables = dict[str, dict[str, _Rule]]
_MAX_WORDS = 3
"""Parameters that a name lists."""
_HEADS_AT = {-2, -3}
"""The dims of heads, counted from the last, in kernels of attention in Flax: `[embed, heads,
head_dim]`, and `[heads, head_dim, embed]` back."""
_SIGNS = re.compile(r"[^\w-]")
"""Characters that are part of the syntax of rules and variants."""
_MANY = 4
"""Parameters that read or write the residual stream, at least."""
_WEIGHTS = ("kernel", "embedding", "weight", "w", "scale", "bias", "b")
"""Last segments of paths that say nothing about the axis."""


@dataclasses.dataclass(frozen=True)
class NamedAxes:
    """The names of the axes of each tensor class, and the rules for them."""

    rules: AxisRules
    by_class: Mapping[int, _Names]


def named_rules(
    classes: Classes,
    solution: Solution,
    paths: Sequence[str],
    given: AxesByPath,
    state_cuts: StateCuts | None = None,
    *,
    attends: bool = False,
) -> NamedAxes:
    """Returns the layouts of a solution as rules, also for optimizer state in more parts and for
    the names that `attend` asks for.

    Names by which the model places tensors have the chosen rules. Elsewhere an axis has one name.
    If two tensor classes cut it differently, the one with fewer bytes has another name for it, as
    the residual stream of a transformer has under sequence parallelism.
    """
    names = axis_names(classes, paths, given)
    state_dims = state_cuts.by_class(solution.layouts) if state_cuts else {}
    tables = _chosen(solution, state_dims, classes)
    for path, number in zip(paths, classes.arguments, strict=True):
        if path.startswith(INPUT) and number in solution.layouts and not solution.rules:
            # Rows at experts may have more bytes, and are cut otherwise.
            axis, cut = classes.tensors[number].axes[0], solution.layouts[number][0]
            tables["activation"].setdefault(names[axis], (cut, False))
    is_named = bool(solution.rules)
    asked, asked_partly = attention_rules(classes, solution.cuts)
    for name, cut in asked.items() if attends else ():
        if cut or not is_named:
            tables["activation"].setdefault(name, (cut, False))
    by_class: dict[int, _Names] = {}
    for number in sorted(solution.layouts, key=lambda n: -classes.tensors[n].weight):
        tensor = classes.tensors[number]
        if is_named and (tensor.names or not tensor.copies):
            placed = tensor.names or (None,) * len(tensor.shape)
            by_class[number] = tuple(name and _plain(name) for name in placed)
            continue
        row: list[str | None] = []
        grows = state_dims.get(number, ())
        for dim, (axis, size, cut) in enumerate(
            zip(tensor.axes, tensor.shape, solution.layouts[number], strict=True)
        ):
            rule = cut, dim in grows
            row.append(_name(tables[tensor.kind], names[axis], row, rule) if size > 1 else None)
        by_class[number] = tuple(row)
    partly = _partly_met(classes, solution)
    partly["activation"] |= asked_partly
    rules = AxisRules(
        params=_table(tables["param"], partly["param"]),
        activations=_table(tables["activation"], partly["activation"])
        | ({ANY: None} if is_named else {}),
        paths=by_pattern(_of_params(classes, paths, by_class), _named_paths(classes, paths)),
    )
    grows = {name for name, (_, one) in tables["param"].items() if one}
    if state_cuts:
        rules = with_state_cut(rules, grows, state_cuts.axes)
    if not is_named:
        told = _activation_names(classes, paths, names, by_class)
        rules = dataclasses.replace(rules, names=told)
    return NamedAxes(rules, by_class)


def _chosen(
    solution: Solution, state_dims: Mapping[int, Collection[int]], classes: Classes
) -> _Tables:
    """Returns the rules of the names that the model gives, by kind of tensor. `state_dims` are the
    dims along which optimizer state is in more parts, by tensor class."""
    grows = {
        classes.tensors[number].names[dim]
        for number, dims in state_dims.items()
        for dim in dims
        if classes.tensors[number].names
    }
    tables: _Tables = {"param": {}, "activation": {}}
    for name, cut in solution.rules.items():
        tables[_kind(name)][_plain(name)] = cut, name in grows
    return tables


def _plain(name: str) -> str:
    return name.removeprefix(PARAMS_TABLE)


def _kind(name: str) -> str:
    return "param" if name.startswith(PARAMS_TABLE) else "activation"


def _partly_met(classes: Classes, solution: Solution) -> dict[str, set[str]]:
    """Returns the names whose rule leaves a dim whole in some tensor, by kind."""
    placed = [(classes.tensors[n].names, dims) for n, dims in solution.layouts.items()]
    for operation, cut in zip(classes.operations, solution.cuts, strict=True):
        for edge in operation.operands:
            placed.append((edge.read_as, dims_of(edge.dims, cut)))
    found: dict[str, set[str]] = {"param": set(), "activation": set()}
    for names, dims in placed:
        for name, cut in zip(names, dims, strict=False):
            if name is not None and solution.rules[name] and not cut:
                found[_kind(name)].add(_plain(name))
    return found


def _named_paths(classes: Classes, paths: Sequence[str]) -> frozenset[str]:
    """Returns the paths of the parameters that the model names."""
    pairs = zip(paths, classes.arguments, strict=True)
    return frozenset(path for path, number in pairs if classes.tensors[number].names)


def _activation_names(
    classes: Classes,
    paths: Sequence[str],
    names: Sequence[str],
    by_class: Mapping[int, _Names],
) -> ActivationNames:
    """Returns the names of inputs, and of activations with an axis that has a rule of its own."""
    variants = {
        row
        for number, row in by_class.items()
        if classes.tensors[number].kind == "activation" and any(is_variant(n or "") for n in row)
    }
    inputs = {
        path.removeprefix(INPUT): by_class.get(number, (None,) * len(classes.tensors[number].shape))
        for path, number in zip(paths, classes.arguments, strict=True)
        if path.startswith(INPUT)
    }
    params = by_pattern(_of_params(classes, paths, _dims(classes, names)))
    return ActivationNames(
        tuple(inputs.items()), tuple(sorted(variants, key=str)), tuple(params.items())
    )


def _name(
    table: dict[str, _Rule],
    name: str,
    row: Sequence[str | None],
    rule: _Rule,
) -> str:
    """Returns a name for an axis in a tensor that has a rule; adds the rule."""
    number = 1
    while True:
        variant = name if number == 1 else f"{name}{VARIANT}{number}"
        if variant not in row and table.setdefault(variant, rule) == rule:
            return variant
        number += 1


def _table(rules: Mapping[str, _Rule], partly: Set[str]) -> dict[str, Any]:
    """Returns a table for `AxisRules`, with the rules that cut first; the names `partly` may also
    be whole."""
    ordered = sorted(rules.items(), key=lambda item: not item[1][0])
    return {
        name: [axes, None] if name in partly and axes else "+".join(axes) or None
        for name, (axes, _) in ordered
    }


def _dims(classes: Classes, names: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Returns the dims of each tensor class, such as `embed=512`. Layers have no size: their number
    does not change the rules."""

    def dim(axis: int, size: int) -> str:
        return names[axis] if classes.axes[axis].is_layers else f"{names[axis]}={size}"

    return {
        number: tuple(map(dim, tensor.axes, tensor.shape))
        for number, tensor in enumerate(classes.tensors)
    }


_Row = TypeVar("_Row")


def _of_params(
    classes: Classes, paths: Sequence[str], by_class: Mapping[int, _Row]
) -> dict[str, _Row]:
    """Returns what belongs to the classes of parameters, by path."""
    return {
        path: by_class[number]
        for path, number in zip(paths, classes.arguments, strict=True)
        if classes.tensors[number].kind == "param"
    }


def by_pattern(by_path: Mapping[str, _Row], skipped: Set[str] = frozenset()) -> dict[str, _Row]:
    """Returns rows by path but for `skipped` ones, and by pattern if it matches no other paths."""
    alike: dict[str, dict[str, _Row]] = collections.defaultdict(dict)
    for path, row in by_path.items():
        if path not in skipped:
            alike[pattern_of(path)][path] = row
    found: dict[str, _Row] = {}
    for pattern, members in itertools.chain.from_iterable(map(_grouped, alike.values())):
        others = (path for path in by_path if path not in members)
        alone = _is_one(members) and not any(matches(pattern, path) for path in others)
        found.update({pattern: next(iter(members.values()))} if alone else members)
    return found


def _grouped(rows: Mapping[str, _Row]) -> Iterable[tuple[str, dict[str, _Row]]]:
    """Returns the fewest patterns for paths that differ in their numbers, with the rows of each.

    A number that tells parameters of one layer apart stays, as in `layers/*/linear1/kernel`.
    """
    numbers = range(pattern_of(next(iter(rows))).count("*"))
    options: list[dict[str, dict[str, _Row]]] = []
    for count in range(len(numbers) + 1):
        for kept in itertools.combinations(numbers, count):
            groups: dict[str, dict[str, _Row]] = collections.defaultdict(dict)
            for path, row in rows.items():
                groups[pattern_of(path, kept)][path] = row
            options.append(groups)
    return min(options, key=_num_lines).items()


def _num_lines(groups: Mapping[str, dict[str, _Row]]) -> int:
    return sum(1 if _is_one(group) else len(group) for group in groups.values())


def _is_one(rows: Mapping[str, _Row]) -> bool:
    return len(set(rows.values())) == 1


def axis_names(classes: Classes, paths: Sequence[str], given: AxesByPath) -> list[str]:
    """Returns a name for each discovered axis: that of the model's metadata, of the batch, or of
    the parameter that makes it."""
    metadata: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path, number in zip(paths, classes.arguments, strict=True):
        axes = given.get(path) or ()
        for axis, name in zip(classes.tensors[number].axes, axes, strict=False):
            if name is not None:
                metadata[axis][name] += 1
    reach = [len({touch.pattern for touch in axis.touches}) for axis in classes.axes]
    names: dict[int, str] = {}
    used = _used(classes)
    attended = attended_axes(classes)
    of_experts = {classes.tensors[n].axes[dim] for n, dim in experts_of(classes).dims.items()}
    for number in sorted(range(len(classes.axes)), key=lambda number: number not in used):
        axis = classes.axes[number]
        common = metadata[number].most_common(1)
        is_rows = any(touch.dim == 0 and touch.pattern.startswith(INPUT) for touch in axis.touches)
        if common:
            name = common[0][0]
        elif number in of_experts:
            name = EXPERT
        elif number in attended:
            name = attended[number]
        else:
            name = _SIGNS.sub("_", _own_name(axis, _is_residual(number, reach), classes.ids))
        number_of = itertools.count(2)
        unique = name
        is_own = name == BATCH and (is_rows or bool(common))
        while not is_own and unique in {BATCH, *names.values()}:
            unique = f"{name}_{next(number_of)}"
        names[number] = unique
    return [names[number] for number in range(len(classes.axes))]


def _used(classes: Classes) -> set[int]:
    """Returns the axes that operations meet; a loss may leave out leaves of its batch."""
    edges = (edge for operation in classes.operations for edge in operation.edges)
    return {axis for edge in edges for axis in classes.tensors[edge.tensor].axes}


def _is_residual(number: int, reach: Sequence[int]) -> bool:
    """Returns whether an axis is the residual stream: most parameters read or write it."""
    return reach[number] == max(reach) >= _MANY


def _own_name(axis: FoundAxis, residual: bool, ids: Set[str]) -> str:
    inputs = [touch for touch in axis.touches if touch.pattern.startswith(INPUT)]
    if inputs:
        first = min(inputs, key=lambda touch: touch.dim)
        path = first.pattern.removeprefix(INPUT).replace("/", "_")
        if first.dim == 0:
            return BATCH
        return "length" if first.dim == 1 and first.pattern in ids else f"{path}_{first.dim}"
    if axis.is_layers:
        return "layers"
    if not axis.touches:
        return f"inner{axis.size}"
    matrices = [touch for touch in axis.touches if len(touch.shape) > 1]
    makers = [touch for touch in matrices if touch.dim == len(touch.shape) - 1]
    if not makers and {touch.dim - len(touch.shape) for touch in matrices} >= _HEADS_AT:
        return "heads"
    if residual:
        return "embed"
    if any(touch.pattern.endswith("embedding") and touch.dim == 0 for touch in axis.touches):
        return "vocab"
    words = [_word(touch) for touch in makers or matrices or axis.touches]
    return "_".join(dict.fromkeys(words[:_MAX_WORDS])) + ("" if makers else "_in")


def _word(touch: Touch) -> str:
    """Returns the part of a path that tells what a parameter is."""
    parts = [part.strip("_*").lower() for part in touch.pattern.split("/")]
    said = [part for part in parts if part and part not in _WEIGHTS]
    return said[-1] if said else parts[-1]
