"""One choice of the mesh axes that cut all attention of a model.

`attend` asks for the rules of `batch`, `length`, `heads` and `kv_heads`, whichever attention of the
model calls it. Heads are therefore cut by the same mesh axes in all of it, except where these do
not divide the key-value heads.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

from shardlib.find.context import CONTEXT
from shardlib.find.equivalence import Classes, OperationClass
from shardlib.find.moves import Network
from shardlib.find.program import IntegerProgram
from shardlib.partitioner.attention import HEADS, LENGTH, ROWS
from shardlib.partitioner.factors import Assignment

Cut = tuple[str, ...]
"""Mesh axes of a dim."""


class AttentionChoices:
    """The variables of the rules that `attend` asks for.

    Args:
        program: The program that gets the variables.
        classes: The classes of the traced loss.
        network: The mesh.
        batch: The mesh axes that cut the batch, in their order.
        columns: The variables of the rules of the names that the model places tensors by.
        cuts: The possible cuts of a dim.
    """

    def __init__(
        self,
        program: IntegerProgram,
        classes: Classes,
        network: Network,
        batch: Cut,
        columns: Mapping[str, Mapping[Cut, int]],
        cuts: Sequence[Cut],
    ):
        self._program, self._network, self._batch = program, network, batch
        attentions = [one.attention for one in classes.operations if one.attention]
        self._heads = [columns[name] for name in ("heads", "kv_heads") if name in columns]
        for rules, axis in itertools.product(self._heads if attentions else (), network.axes):
            # Of a mesh axis with both rules, heads would be whole, as `head_dim` may take it first.
            both = *columns.get("head_dim", {}).items(), *rules.items()
            program.row([(column, 1.0) for cut, column in both if axis in cut], 0, 1)
        if attentions and not self._heads:
            options = {cut: program.variable(0.0, "rules", whole=True) for cut in cuts}
            program.row([(column, 1.0) for column in options.values()], 1, 1)
            self._heads = [options]
        shares = CONTEXT in network.axes and any(one.shares_rows for one in attentions)
        if shares and "length" in columns:
            # `attend` refuses rows that other axes cut.
            program.row([(columns["length"][CONTEXT,], 1.0)], 1, 1)

    def runs(self, operation: OperationClass, cut: Assignment) -> bool:
        """Returns whether `attend` runs an attention when it is cut so. It shares rows wherever
        their positions are cut."""
        attention, network = operation.attention, self._network
        assert attention is not None
        rows = self._met(self._batch, operation.factors.sizes[ROWS])
        if cut.get(ROWS, ()) != rows:
            return False
        shards = network.sizes.get(CONTEXT, 1)
        if not attention.shares_rows or shards == 1:
            return LENGTH not in cut
        parts = network.degree(cut.get(HEADS, ()))
        return cut.get(LENGTH) == (CONTEXT,) and not attention.faults(shards, parts)

    def tie(self, operation: OperationClass, columns: Iterable[tuple[Assignment, int]]) -> None:
        """Allows the cuts of an attention only with the rules of heads that make them. The
        variables that choose the columns sum to 1."""
        made: dict[Cut, list[int]] = collections.defaultdict(list)
        for cut, column in columns:
            made[cut.get(HEADS, ())].append(column)
        for rules in self._heads:
            ruled: dict[Cut, list[int]] = collections.defaultdict(list)
            for cut, column in rules.items():
                ruled[self._met(cut, operation.factors.sizes[HEADS])].append(column)
            for cut in {**made, **ruled}:
                terms = [*((one, 1.0) for one in made[cut]), *((one, -1.0) for one in ruled[cut])]
                self._program.row(terms, 0, 0)

    def _met(self, cut: Cut, size: int) -> Cut:
        return () if size % self._network.degree(cut) else cut


def attention_rules(
    classes: Classes, cuts: Sequence[Assignment]
) -> tuple[dict[str, Cut], frozenset[str]]:
    """Returns the rules of activations that `attend` asks for, from the cut of each operation, and
    the names among them whose dims may also be whole."""
    attended = [
        cut for one, cut in zip(classes.operations, cuts, strict=True) if one.attention is not None
    ]
    # Of attention that is not one operation, all heads are on each device.
    rules: dict[str, Cut] = dict.fromkeys(("length", "heads", "kv_heads", "head_dim"), ())
    for cut in attended:
        rules["length"] = cut.get(LENGTH, ()) or rules["length"]
        rules["heads"] = rules["kv_heads"] = cut.get(HEADS, ()) or rules["heads"]
    partly = any(cut.get(HEADS, ()) != rules["heads"] for cut in attended)
    return rules, frozenset(("heads", "kv_heads") if partly else ())
