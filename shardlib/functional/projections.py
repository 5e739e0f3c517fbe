"""The projections of a model: modules whose `kernel` maps dims of inputs to dims of outputs.

A projection is an `nnx.Linear`, an `nnx.LinearGeneral` over the last dims of its input (as in
`nnx.MultiHeadAttention`), or a module whose kernel has the dims of its inputs, as many as
`num_inputs`, before the dims of its outputs, named in `outputs`. In a stack of layers the kernel
has leading dims.
"""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from shardlib.errors import ModelError
from shardlib.paths import matches, nearest_pattern

# Layers of Flax with a matrix that no adapter knows: they are refused, not left out.
_OTHERS = (nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)


def modules(model: nnx.Module) -> dict[str, Any]:
    """Returns all modules of a model by path."""
    return {
        "/".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
    }


def projections(model: nnx.Module) -> dict[str, Any]:
    """Returns the projections of a model without adapters, by path."""
    found = modules(model)
    adapted = tuple(f"{path}/" for path, module in found.items() if hasattr(module, "lora_a"))
    return {
        path: module
        for path, module in found.items()
        if path and _is_projection(module) and not path.startswith(adapted)
    }


def matched(
    model: nnx.Module, targets: Sequence[str], *, for_adapters: bool = False
) -> dict[str, Any]:
    """Returns the projections whose path matches a pattern.

    Raises:
        ModelError: If the model is not an NNX module, or a pattern matches no projection, or, for
            adapters, a layer of Flax of another kind or a projection with two paths; the message
            lists all of them.
    """
    if not isinstance(model, nnx.Module):
        raise ModelError(
            f"expected an nnx.Module, not {type(model).__name__}.\n"
            "  Give an NNX model, such as `sl.hf.load(...).model`."
        )
    if isinstance(targets, str):
        raise ModelError(f"targets is the text {targets!r}.\n  Give a list: [{targets!r}].")
    found = projections(model)
    faults = [
        f"targets: {pattern!r} matches no projection.{nearest_pattern(pattern, found)}"
        for pattern in targets
        if not any(matches(pattern, path) for path in found)
    ]
    chosen = {path: one for path, one in found.items() if _matches_any(targets, path)}
    faults += [
        f"targets: {path} is an nnx.{type(module).__name__}, which gets no adapter."
        for path, module in modules(model).items()
        if for_adapters
        and isinstance(module, _OTHERS)
        and not _is_projection(module)
        and _matches_any(targets, path)
    ]
    faults += [
        f"targets: {path} is also at {other}, which an adapter would leave out."
        for path, other in _second_paths(model).items()
        if for_adapters and path in chosen
    ]
    if faults or not targets:
        shown = ", ".join([*found][:8]) + (", ..." if len(found) > 8 else "")
        raise ModelError(
            "".join(f"{fault}\n" for fault in faults)
            + f"  Give patterns that match only these projections: {shown or 'none'}."
        )
    return chosen


def _matches_any(patterns: Sequence[str], path: str) -> bool:
    return any(matches(pattern, path) for pattern in patterns)


def num_dims(module: Any) -> tuple[int, int]:
    """Returns the numbers of dims of inputs and of outputs of a projection's kernel."""
    if isinstance(module, nnx.LinearGeneral):
        return len(module.in_features), len(module.out_features)
    return getattr(module, "num_inputs", 1), len(getattr(module, "outputs", (None,)))


def axes_of(kernel: Any) -> tuple[Any, ...]:
    """Returns the logical axes of a kernel, None for each dim without."""
    names = kernel.get_metadata().get("out_sharding")
    return tuple(names) if names is not None else (None,) * len(kernel.shape)


def variable(kind: type[nnx.Variable], value: Any, names: Sequence[Any]) -> nnx.Variable:
    """Returns a variable with logical axes, if any dim has one."""
    if not any(names):
        return kind(value)
    # Logical names are not mesh axes, so Flax must not place the new value by them.
    return kind(value, out_sharding=tuple(names), eager_sharding=False)


def replace_module(model: nnx.Module, path: str, module: Any) -> None:
    """Puts a module into the place of another."""
    *outer, name = path.split("/")
    parent: Any = model
    for part in outer:
        parent = parent[int(part)] if part.isdecimal() else getattr(parent, part)
    if name.isdecimal():
        parent[int(name)] = module
    else:
        setattr(parent, name, module)


def _is_projection(module: Any) -> bool:
    kernel: Any = getattr(module, "kernel", None)
    if not hasattr(kernel, "get_metadata") or not callable(module):
        return False
    # A kernel that must stay in float32 is a router, which is read past its module.
    is_kept = kernel.get_metadata().get("float32", False)
    if isinstance(module, nnx.LinearGeneral):
        last = tuple(range(-len(module.axis), 0))
        return tuple(module.axis) == last and not module.batch_axis
    return not is_kept and (isinstance(module, nnx.Linear) or hasattr(module, "num_inputs"))


def _second_paths(model: nnx.Module) -> dict[str, str]:
    """Returns another path of each projection that the model holds twice, by its first path."""
    first = {id(module): path for path, module in projections(model).items()}
    found = {}
    for outer, parent in modules(model).items():
        for name, child in vars(parent).items():
            path = f"{outer}/{name}".lstrip("/")
            if first.get(id(child), path) != path:
                found[first[id(child)]] = path
    return found
