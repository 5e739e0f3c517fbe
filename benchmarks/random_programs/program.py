"""A random program: a model, a batch, a loss, a mesh and a placement, all decided by a seed."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import shardlib as sl
from random_programs.draws import Random
from random_programs.model import KINDS, draw_model
from random_programs.placements import (
    MESHES,
    STYLES,
    WITH_CONTEXT,
    Placement,
    draw_placement,
)
from shardlib.mesh import MeshConfig, abstract_mesh
from shardlib.paths import named_leaves
from shardlib.rules import DATA

OFTEN = ("dense", "images", "images", "recurrent")
"""Kinds that are drawn more often than once in all."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What a seed decides.

    `batch` holds the inputs as `x0`, `x1`, … and a target for each head as `y0`, `y1`, …; `params`
    the values of the parameters by path.
    """

    seed: int
    kind: str
    pieces: tuple[str, ...]
    mesh: str
    placement: Placement
    module: Any
    inputs: tuple[Any, ...]
    batch: Mapping[str, np.ndarray]
    params: Mapping[str, np.ndarray]
    loss: Callable[..., jax.Array]


def kind_of(seed: int) -> str:
    """Returns the kind of the program of a seed."""
    return Random(seed, 0).pick(*KINDS, *OFTEN)


def draw_program(seed: int) -> Program:
    """Returns the program of a seed.

    Each third one has its kernels over `fsdp` and `tensor` on `data=2,fsdp=2,tensor=2`.
    """
    kind, random = kind_of(seed), Random(seed, 1)
    model, inputs, pieces = draw_model(kind, random)
    shapes, outputs = _shapes(model, inputs)
    mesh, style = MESHES[0], "fsdp_tensor"
    if seed % 3:
        within = WITH_CONTEXT * 2 if kind in ("images", "tokens", "scans") else ()
        mesh = random.pick(*MESHES, *within)
        style = random.pick(*STYLES, "fsdp_tensor", "random")
    own_names = style != "auto" and random.chance(0.25)
    placement = draw_placement(style, own_names, _sizes(mesh), shapes, inputs, random)
    if own_names:
        named = _named if isinstance(model, linen.Module) else _named_nnx
        model = named(model, placement.own_names)
    batch = {f"x{i}": x for i, x in enumerate(inputs)}
    batch |= {f"y{i}": _target(y.shape, random) for i, y in enumerate(outputs)}
    params = {path: _value(path, shape, random) for path, shape in shapes.items()}
    return Program(
        seed, kind, pieces, mesh, placement, model, inputs, batch, params, loss(len(inputs))
    )


def loss(inputs: int) -> Callable[..., jax.Array]:
    """Returns the loss of models with so many inputs: squares or cross-entropies, added."""

    def loss_fn(model: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> jax.Array:
        outputs = model(*(batch[f"x{i}"] for i in range(inputs)))
        total = jnp.float32(0)
        for i, y in enumerate(outputs):
            target = batch[f"y{i}"]
            if jnp.issubdtype(target.dtype, jnp.integer):
                cross = optax.softmax_cross_entropy_with_integer_labels(y, target)
                total += cross.mean()
            else:
                total += jnp.square(y - target).mean()
        return total

    return loss_fn


def _shapes(model: Any, inputs: tuple[Any, ...]) -> tuple[dict[str, tuple[int, ...]], Any]:
    """Returns the shapes of the parameters by path, and of what the model returns."""
    mesh = abstract_mesh("data=1", 1)
    with sl.use(mesh, DATA):
        state = sl.abstract_state(model, optax.identity(), inputs=inputs)
        outputs = jax.eval_shape(lambda state, *x: state.model(*x), state, *inputs)
    return {path: x.shape for path, x in named_leaves(state.params).items()}, outputs


def _sizes(mesh: str) -> dict[str, int]:
    return MeshConfig.parse(mesh).sizes


def _target(shape: tuple[int, ...], random: Random) -> np.ndarray:
    return random.normal(*shape) if random.chance(0.5) else random.below(shape[-1], *shape[:-1])


def _value(path: str, shape: tuple[int, ...], random: Random) -> np.ndarray:
    """Keeps activations at about one, with biases that are not zero and scales that vary."""
    values = random.normal(*shape)
    if path.endswith("embedding"):
        return values
    if len(shape) < 2 or path.endswith(("scale", "bias")):
        return (path.endswith("scale") + 0.2 * values).astype(np.float32)
    fan_in = np.prod(shape[:-1]) if "Conv" in path else np.prod(shape[-3:-1])
    return (values / np.sqrt(fan_in)).astype(np.float32)


def _named(model: linen.Module, names: Mapping[str, tuple[str | None, ...]]) -> linen.Module:
    """Returns the model with logical axes as metadata of its parameters."""
    kind = type(model)

    class Named(kind):
        pass

    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        variables = kind.init(self, *args, **kwargs)
        leaves = named_leaves(variables["params"]).items()
        boxes = [linen.Partitioned(x, names[path]) for path, x in leaves]
        treedef = jax.tree.structure(variables["params"])
        return {**variables, "params": jax.tree.unflatten(treedef, boxes)}

    # Flax would wrap a method of the class body as one that runs inside of the module.
    Named.init = init
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(kind) if f.init}
    return Named(**{name: x for name, x in fields.items() if name not in ("parent", "name")})


def _named_nnx(make: Callable[[nnx.Rngs], Any], names: Mapping[str, tuple[str | None, ...]]) -> Any:
    """Returns `make` with logical axes as metadata of its parameters."""

    def make_named(rngs: nnx.Rngs) -> Any:
        module = make(rngs)
        for path, node in nnx.iter_graph(module):
            if isinstance(node, nnx.Param):
                node.set_metadata(out_sharding=names["/".join(map(str, path))])
        return module

    return make_named
