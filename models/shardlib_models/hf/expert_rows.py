"""Rows of tensors that the tables of decoders with experts share."""

import dataclasses
from collections.abc import Iterable, Iterator

from shardlib.hf import TensorRow, rows

_MLP = "model.layers.{layers}.mlp"


def expert_rows(shared: str) -> tuple[TensorRow, ...]:
    """Returns the rows of routed experts, and of the experts that all tokens pass.

    Args:
        shared: The name of the latter in their tensors.
    """
    return rows(f"""
layers/mlp/router/kernel  {_MLP}.gate.weight  expert embed
layers/mlp/experts/gate  {_MLP}.experts.{{expert}}.gate_proj.weight  mlp embed
layers/mlp/experts/up  {_MLP}.experts.{{expert}}.up_proj.weight  mlp embed
layers/mlp/experts/down  {_MLP}.experts.{{expert}}.down_proj.weight  embed mlp
layers/mlp/shared/gate/kernel  {_MLP}.{shared}.gate_proj.weight  mlp embed
layers/mlp/shared/up/kernel  {_MLP}.{shared}.up_proj.weight  mlp embed
layers/mlp/shared/down/kernel  {_MLP}.{shared}.down_proj.weight  embed mlp
""")


def dense_first(table: Iterable[TensorRow], dense: int) -> Iterator[TensorRow]:
    """Yields the rows of a decoder whose first layers have no experts.

    They are a stack of their own here, and counted with the others in the names of tensors.

    Args:
        table: The rows of both kinds of layers.
        dense: The number of layers without experts.
    """
    for row in table:
        counted = row.theirs.replace("{layers}", f"{{layers+{dense}}}")
        yield dataclasses.replace(row, theirs=counted)
        if row.ours.startswith("layers/"):
            counted = row.theirs.replace("{layers}", "{dense_layers}")
            yield dataclasses.replace(row, ours=f"dense_{row.ours}", theirs=counted)
