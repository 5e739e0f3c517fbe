"""Stacks of equal layers, built and run by one loop.

A stack is an ordinary layer whose variables have a leading dim of length `num_layers`, named
`layers`. Its program size does not grow with the depth, and neither does the compile time.

    self.layers = stack_layers(lambda rngs: Block(config, rngs), num_layers, rngs)
    ...
    x, _ = scan_layers(lambda layer, x, _: (layer(x), None), self.layers, x, remat="dots")

Any NNX layer works. Variables that a layer updates when it is called (batch statistics, counters of
random streams) are written back into the stack for each layer. Random keys are per layer too, so
no two layers drop the same units.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.functional.boundary import carried
from shardlib.nn import remat as remat_policies

L = TypeVar("L", bound=nnx.Module)
C = TypeVar("C")


def stack_layers(
    make: Callable[[nnx.Rngs], L], num_layers: int, rngs: nnx.Rngs, *, axis_name: str = "layers"
) -> L:
    """Returns `num_layers` layers as one module whose variables have a leading dim.

    Each layer is made from its own streams, split from `rngs`. Its values depend on them alone, not
    on the mesh. Variables with logical axes (`out_sharding` metadata) get `axis_name` in front;
    variables without logical axes stay without.

    Args:
        make: Makes one layer; called once, under tracing.
        num_layers: Number of layers; at least 1.
        rngs: Random streams; each is advanced by one.
        axis_name: Logical axis of the leading dim.

    Raises:
        ModelError: If `num_layers` is less than 1, or a variable has a `NamedSharding` in place of
            logical axes.
    """
    if num_layers < 1:
        raise ModelError(f"a stack of {num_layers} layers is empty.\n  Ask for 1 or more.")
    rng_def, rng_state = nnx.split(rngs.split(num_layers))

    def build(rng_state: Any) -> Any:
        return nnx.split(make(nnx.merge(rng_def, rng_state)))

    # A loop rather than a vmap: drawing from many keys at once takes XLA twice as long to compile.
    graphdef, state = jax.lax.map(build, rng_state)
    return nnx.merge(graphdef, _map_axes(state, lambda names: (axis_name, *names)))


def scan_layers(
    call: Callable[[L, C, Any], tuple[C, Any]],
    layers: L,
    carry: C,
    per_layer: PyTree = None,
    *,
    remat: str = "none",
    tags: tuple[str, ...] | None = None,
    staged: bool = True,
) -> tuple[C, Any]:
    """Runs the layers of a stack one after the other: `jax.lax.scan` with a layer at each step.

    Args:
        call: `call(layer, carry, inputs) -> (carry, outputs)` for one layer. It may close over
            arrays that all layers share.
        layers: The result of `stack_layers`.
        carry: The value passed from layer to layer, with constant structure, shapes and dtypes.
        per_layer: A pytree with a leading layer dim in each leaf (a key-value cache, for example);
            each layer gets its slice as `inputs`.
        remat: A policy of `shardlib.nn.remat` for all layers, or ranges of layers with a policy
            each. Each range is its own loop, so the program grows with their number.
        tags: The names that `call` tags for `save:` and `offload:`; None if unknown.
        staged: Whether a pipeline divides these layers over its stages, as it does with one stack
            of a model; otherwise they are run together, by the stages that need their result.

    Returns:
        The carry after the last layer, and the outputs of all layers with a leading dim.

    Raises:
        ConfigError: If the remat policy is unknown, or its ranges do not fit the layers.
        MeshError: If the remat policy offloads and the devices cannot reach their host's memory.
        ModelError: If a layer makes new variables when it is called.
    """
    graphdef, state = nnx.split(layers)
    # The layers of a pipeline run later, after the loss function that called them has returned.
    stack = LayerStack(carried(call), graphdef, state, carry, per_layer, remat, tags)
    run = _interceptor.get() if staged else None
    carry, outputs, changed = stack.run(state, carry, per_layer) if run is None else run(stack)
    if changed:
        variables = dict(nnx.to_flat_state(state))
        update = [(path, _replaced(variables[path], value)) for path, value in changed.items()]
        nnx.update(layers, nnx.from_flat_state(update))
    return carry, outputs


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """The arguments of a `scan_layers` call."""

    call: Callable[[Any, Any, Any], tuple[Any, Any]]
    graphdef: Any
    state: PyTree
    """The variables of all layers: each leaf has a leading layer dim."""
    carry: PyTree
    per_layer: PyTree
    remat: str
    tags: tuple[str, ...] | None

    @property
    def num_layers(self) -> int:
        """Length of the leading dim."""
        return _length((self.state, self.per_layer))

    def run(
        self, state: PyTree, carry: PyTree, per_layer: PyTree
    ) -> tuple[Any, Any, dict[Any, Any]]:
        """Runs the layers in `state`, all of them or a slice along the layer dim.

        Returns:
            The carry, the outputs of the layers, and the changed variables by path.

        Raises:
            ConfigError: If the remat policy is unknown, or its ranges differ between slices of this
                length.
        """

        def body(carry: PyTree, step: tuple[Any, Any]) -> tuple[Any, Any]:
            layer_state, inputs = step
            layer = nnx.merge(self.graphdef, _map_axes(layer_state, lambda names: names[1:]))
            before = _values(nnx.state(layer))
            carry, outputs = _pair(self.call(layer, carry, inputs))
            after = _values(nnx.state(layer))
            return carry, (outputs, _changed(before, after, type(layer).__name__))

        layers, results = (state, per_layer), []
        runs = remat_policies.runs(
            self.remat, self.num_layers, length=_length(layers), tags=self.tags
        )
        for run, part in zip(runs, _cut(layers, [run.num_layers for run in runs]), strict=True):
            wrapped = remat_policies.apply(run.policy, body, tags=self.tags, in_scan=True)
            carry, result = jax.lax.scan(wrapped, carry, part)
            results.append(result)
        return carry, *_joined(results)


_Run = Callable[[LayerStack], tuple[Any, Any, dict[Any, Any]]]
_interceptor: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("layers", default=None)


@contextlib.contextmanager
def intercept(run: _Run) -> Iterator[None]:
    """Makes `run` replace the loop of every `scan_layers` called in this context.

    `run` returns the same values as `LayerStack.run`. A pipeline uses it to cut a model at its
    layers.
    """
    token = _interceptor.set(run)
    try:
        yield
    finally:
        _interceptor.reset(token)


def _pair(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise ModelError(
        f"scan_layers expects (carry, outputs) of a layer, but `call` returned "
        f"{type(result).__name__}.\n  Return (carry, None) for a layer without outputs."
    )


def _length(layers: PyTree) -> int:
    return jax.tree.leaves(layers)[0].shape[0]


def _cut(layers: PyTree, counts: list[int]) -> list[Any]:
    """Cuts a tree along the layer dim; one copy joins the gradients of the parts."""
    if len(counts) == 1:
        return [layers]
    leaves, treedef = jax.tree.flatten(layers)
    return [
        jax.tree.unflatten(treedef, part)
        for part in zip(*(jax.lax.split(leaf, counts) for leaf in leaves), strict=True)
    ]


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: jax.lax.concatenate(leaves, 0), *parts)


def _is_variable(node: object) -> TypeGuard[nnx.Variable]:
    return isinstance(node, nnx.Variable)


def _map_axes(state: PyTree, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> PyTree:
    def on_variable(variable: nnx.Variable) -> nnx.Variable:
        names = variable.get_metadata().get("out_sharding") if _is_variable(variable) else None
        if names is None:
            return variable
        if isinstance(names, NamedSharding):
            raise ModelError(
                f"a variable of a stacked layer is annotated with {names}.\n"
                "  Annotate it with one logical name for each dim: out_sharding=('embed', 'mlp')."
            )
        return variable.replace(variable.get_value(), out_sharding=change(tuple(names)))

    return jax.tree.map(on_variable, state, is_leaf=_is_variable)


def _values(state: PyTree) -> dict[tuple[Any, ...], Any]:
    return {
        path: leaf.get_value() if _is_variable(leaf) else leaf
        for path, leaf in nnx.to_flat_state(state)
    }


def _replaced(variable: nnx.Variable, value: jax.Array) -> nnx.Variable | jax.Array:
    return variable.replace(value) if _is_variable(variable) else value


def _changed(
    before: dict[tuple[Any, ...], Any], after: dict[tuple[Any, ...], Any], layer: str
) -> dict[tuple[Any, ...], Any]:
    """Returns the values that a layer assigned; values that it only read are not scan outputs."""
    made = ["/".join(map(str, path)) for path in after if path not in before]
    if made:
        raise ModelError(
            f"{layer} creates variables when it is called, which a stack cannot hold: "
            f"{', '.join(made)}.\n"
            "  Create them in its constructor, or return their values as outputs of `call`."
        )
    return {path: value for path, value in after.items() if value is not before[path]}
