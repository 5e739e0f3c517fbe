"""Layouts from a user's `PartitionSpec`s, checked against their arrays."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib.errors import RuleError, did_you_mean
from shardlib.mesh import entry_axes
from shardlib.partitioner.layout import Layout, Sizes, from_spec
from shardlib.paths import named_leaves


def argument_layouts(
    specs: Any, arguments: Sequence[Any], sizes: Sizes, params: Sequence[int]
) -> list[Layout]:
    """Returns the layouts of the leaves of all arguments.

    Args:
        specs: A spec for each argument, or a pytree of specs that is a prefix of the argument.
        arguments: Pytrees of arrays and numbers.
        sizes: Devices along each mesh axis.
        params: Positions of arguments that hold parameters.

    Raises:
        RuleError: If specs do not fit; the message lists all of them.
    """
    is_list = isinstance(specs, tuple | list) and not isinstance(specs, PartitionSpec)
    if not is_list or len(specs) != len(arguments):
        raise RuleError(
            f"in_specs is {specs!r}, and the number of arguments is {len(arguments)}.\n"
            '  Give a tuple of one entry for each argument, such as (P("data"), None).'
        )
    layouts, faults = [], []
    for number, pair in enumerate(zip(specs, arguments, strict=True)):
        name = f"in_specs[{number}]"
        for leaf, spec, path in _pairs(*pair, name):
            faults += _faults(f"{name}{path}", spec, jnp.shape(leaf), sizes)
            if not faults:
                layouts.append(from_spec(spec, jnp.ndim(leaf), stored=number in params))
    _refuse(faults)
    return layouts


def result_layouts(specs: Any, shape: Any, sizes: Sizes) -> list[Layout | None]:
    """Returns the layouts of the leaves of a result from its shapes; None if unspecified.

    Raises:
        RuleError: If specs do not fit; the message lists all of them.
    """
    if specs is None:
        return [None] * len(jax.tree.leaves(shape))
    triples = list(_pairs(specs, shape, "out_specs"))
    _refuse([f for x, s, path in triples for f in _faults(f"out_specs{path}", s, x.shape, sizes)])
    return [from_spec(spec, len(leaf.shape)) for leaf, spec, _ in triples]


def _pairs(specs: Any, tree: Any, name: str) -> Iterator[tuple[Any, Any, str]]:
    """Yields each leaf of a tree, its spec, and its path."""
    found: list[Any] = []
    try:
        jax.tree.map(
            lambda spec, part: found.extend([spec] * len(jax.tree.leaves(part))),
            specs,
            tree,
            is_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
        )
    except (ValueError, TypeError) as error:
        raise RuleError(
            f"{name} does not fit {jax.tree.structure(tree)}: {str(error).partition(chr(10))[0]}\n"
            "  Give one PartitionSpec for all of it, or one for each of its parts."
        ) from None
    for (path, leaf), spec in zip(named_leaves(tree).items(), found, strict=True):
        yield leaf, spec, f" of {path!r}" if path else ""


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise RuleError(
            "\n".join(faults) + "\n  Name axes of the mesh, each once, on dims that they divide."
        )


def _faults(name: str, spec: Any, shape: Sequence[int], sizes: Sizes) -> Iterator[str]:
    """Yields the faults of the spec of an array."""
    if spec is None:
        return
    if not isinstance(spec, PartitionSpec):
        yield f"{name} is {spec!r}, not a PartitionSpec or None."
        return
    if len(spec) > len(shape):
        yield f"{name} is {spec} for an array of shape {tuple(shape)}, which has fewer dims."
        return
    if PartitionSpec.UNCONSTRAINED in spec:
        yield f"{name} is {spec}, which leaves a dim open."
        return
    axes = [axis for entry in spec for axis in entry_axes(entry)]
    for axis in dict.fromkeys(axes):
        if axis not in sizes:
            known = ", ".join(sizes)
            yield f"{name} names {axis!r}, the mesh has {known}.{did_you_mean(axis, sizes)}"
        elif axes.count(axis) > 1:
            yield f"{name} is {spec}, which names {axis!r} twice."
    for dim, entry in enumerate(spec):
        parts = math.prod(sizes.get(axis, 1) for axis in entry_axes(entry))
        if shape[dim] % parts:
            yield f"{name} is {spec}: {parts} devices do not divide dim {dim} of {tuple(shape)}."
