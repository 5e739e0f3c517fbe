"""Costs of a step of the engine on one device: rows that decode, and a chunk of prompts.

A step reads every weight once, of experts those that any of its rows chose, and the keys and values
that its rows see. Over `tensor` it sums the residual stream after attention and after the MLP of
each layer, over `expert` after the experts; attention is repeated over `expert`, and each router is
gathered.

Source: Pope et al. 2022, "Efficiently Scaling Transformer Inference", sections 2 and 3.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from shardlib.cost.costs import CollectiveCost, Costs, Work
from shardlib.cost.layout import Layout
from shardlib.cost.machine.kernels import Kernel, PagedAttention, Product, Stream, matmul
from shardlib.cost.workload import Matmul, Transformer

_EMBED_PASSES = 8
"""Passes over the residual stream of a layer, as forward in `cost.transformer.computation`."""
_SMALL_KERNELS = 4
"""Of a layer besides its products: two norms, rotations, the hidden units."""
_LOGIT_BYTES = 16
"""Per logit: a cast to float32, the softmax, the likeliest token, a draw."""


class Widths(NamedTuple):
    """Bytes of a number that a step reads or writes."""

    other: float = 2
    """Bytes of an activation, and of a weight of the embedding, the head, a router or an expert."""
    kernel: float = 2
    """Bytes of every other weight."""
    cached: float = 2
    """Bytes of a number of a key or a value, with its share of a scale."""


@dataclasses.dataclass(frozen=True)
class ServedStep:
    """The work of one step, on all devices of a replica."""

    slots: int
    """Rows that decode."""
    seen: float
    """Positions that such a row sees, in the mean."""
    chunk: int = 0
    """Tokens of prompts."""
    lane: int = 32
    """Tokens of a prompt that read its keys and values together."""
    before: float = 0.0
    """Positions that a token of a prompt sees, in the mean."""

    @property
    def rows(self) -> int:
        """Rows of the residual stream."""
        return self.slots + self.chunk

    @property
    def drawn(self) -> int:
        """Rows that draw a token."""
        return self.slots + self.chunk // self.lane


def kv_cut(model: Transformer, layout: Layout) -> int:
    """Returns the parts into which `tensor` cuts the projections to key-value heads: all, or they
    are whole."""
    return 1 if model.kv_heads % layout.tensor else layout.tensor


def cache_cut(model: Transformer, layout: Layout) -> int:
    """Returns the parts into which the heads of the cache are cut: a device holds and reads its own
    part, or a copy of the head that its query heads need."""
    if layout.tensor % model.kv_heads == 0:
        return model.kv_heads
    return kv_cut(model, layout)


def step_costs(
    model: Transformer, step: ServedStep, layout: Layout, widths: Widths | None = None
) -> Costs:
    """Returns the costs of a step of one device. The axes `tensor` and `expert` cut the model;
    other axes hold replicas. Numbers have 16 bits by default."""
    work: list[Work] = []
    widths = widths or Widths()
    width = widths.other
    for routed, count in ((False, model.dense_layers), (True, model.routed_layers)):
        if count:
            products = _products(model, step, layout, routed=routed, widths=widths)
            work += [Work("forward", "matmul", product, count) for product in products]
    work += _attention(model, step, layout, widths.cached)
    hidden = step.rows * (3 if model.gated else 2) * _mean_mlp(model) / layout.tensor
    passes = Stream(
        (_EMBED_PASSES * step.rows * model.embed + hidden) * width, kernels=_SMALL_KERNELS
    )
    work.append(Work("forward", "elementwise", passes, model.layers))
    work += _head(model, step, layout, width)
    return Costs(work, _collectives(model, step, layout, width), num_layers=model.layers)


def flops(model: Transformer, step: ServedStep) -> float:
    """Returns the FLOPs of the products of a step with weights, on all devices."""
    costs = step_costs(model, step, Layout())
    return sum(
        count * kernel.flops for _, _, kernel, count in costs.work if isinstance(kernel, Product)
    )


def _products(
    model: Transformer, step: ServedStep, layout: Layout, *, routed: bool, widths: Widths
) -> Iterator[Kernel]:
    for product in model.matmuls(routed=routed):
        if product.routed:
            yield _of_experts(model, product, step, layout, widths.other)
            continue
        narrow = 0.0 if product.name == "router" else widths.other - widths.kernel
        for fan_in, fan_out in _arrays(model, product, layout):
            made = matmul(step.rows, fan_in, fan_out, width=int(widths.other))
            yield made._replace(num_bytes=made.num_bytes - narrow * fan_in * fan_out)


def _arrays(model: Transformer, product: Matmul, layout: Layout) -> Iterator[tuple[float, float]]:
    """Yields the fan-in and fan-out of each weight array of a product on a device."""
    fan_in, fan_out, cut = product.fan_in, product.fan_out, layout.tensor
    if product.name == "qkv" and not model.latent:
        yield fan_in, model.heads * model.head_dim / cut
        for _ in range(2):
            yield fan_in, model.kv_heads * model.head_dim / kv_cut(model, layout)
        return
    fan_in, fan_out = (
        fan_in / (cut if product.cut == "in" else 1),
        fan_out / (cut if product.cut == "out" else 1),
    )
    arrays = model.arrays_of(product)
    for _ in range(arrays):
        yield fan_in, fan_out / arrays


def _of_experts(
    model: Transformer, product: Matmul, step: ServedStep, layout: Layout, width: float
) -> Product:
    """Returns the products of the experts of a device: it reads those that a row chose."""
    assert model.experts is not None
    fan_in, fan_out = (
        product.fan_in / (layout.tensor if product.cut == "in" else 1),
        product.fan_out / (layout.tensor if product.cut == "out" else 1),
    )
    rows = step.rows * model.experts.per_token / layout.expert
    read = active_experts(model, step.rows) / layout.expert * fan_in * fan_out
    moved = (rows * (fan_in + fan_out) + read) * width
    return Product(rows, fan_in, fan_out, 1.0, moved, int(width), uneven=True)


def active_experts(model: Transformer, rows: float) -> float:
    """Returns the expected number of experts of a layer that `rows` rows choose, each choice as
    likely as any other."""
    assert model.experts is not None
    number = model.experts.number
    return number * (1 - (1 - model.experts.per_token / number) ** rows)


def cache_elements(model: Transformer, positions: float) -> float:
    """Returns the elements of keys and values, of all layers and heads, that a row reads which sees
    `positions` positions."""
    near = min(positions, model.window or positions)
    local = model.windowed_layers
    return model.kv_width * (local * near + (model.layers - local) * positions)


def _attention(
    model: Transformer, step: ServedStep, layout: Layout, width: float
) -> Iterator[Work]:
    cut = cache_cut(model, layout)
    heads = model.heads / layout.tensor
    dims = model.score_dim + model.value_dim

    def kernel(rows: float, readers: float, positions: float) -> PagedAttention:
        # Means over the layers, of which some have a window.
        read = cache_elements(model, positions) / model.layers
        pairs = read / model.kv_width
        return PagedAttention(
            2 * rows * pairs * heads * dims, readers * read / cut * width, model.score_dim
        )

    if step.slots:
        own = kernel(step.slots, step.slots, step.seen)
        yield Work("forward", "attention", own, model.layers)
    if step.chunk:
        lanes = math.ceil(step.chunk / step.lane)
        yield Work("forward", "attention", kernel(step.chunk, lanes, step.before), model.layers)


def _mean_mlp(model: Transformer) -> float:
    """Returns the hidden units of a token in a layer, in the mean."""
    total = model.dense_layers * float(model.mlp)
    if model.experts is not None:
        each = model.experts.per_token * model.experts.mlp + model.experts.shared_mlp
        total += model.routed_layers * each
    return total / model.layers


def _head(model: Transformer, step: ServedStep, layout: Layout, width: float) -> Iterator[Work]:
    cut = layout.tensor
    logits = matmul(step.drawn, model.embed, model.vocab / cut, width=int(width))
    yield Work("forward", "head", logits)
    drawn = Stream(step.drawn * model.vocab / cut * _LOGIT_BYTES, kernels=_SMALL_KERNELS)
    yield Work("forward", "head", drawn)


def _collectives(
    model: Transformer, step: ServedStep, layout: Layout, width: float
) -> list[CollectiveCost]:
    stream = float(step.rows * model.embed * width)
    found: list[CollectiveCost] = []
    tensor = ("tensor",) if layout.tensor > 1 else ()
    experts = (("expert",) if layout.expert > 1 else ()) + tensor
    sums = [(tensor, model.layers + model.dense_layers + 1), (experts, model.routed_layers)]
    for axes, count in sums:
        if axes and count:
            found.append(CollectiveCost(axes[0], "all_reduce", axes, stream, count=count))
    if layout.expert > 1 and model.experts is not None:
        router = float(model.embed * model.experts.number * width)
        count = model.routed_layers
        found.append(CollectiveCost("expert", "all_gather", ("expert",), router, count=count))
    if tensor:
        held = step.drawn * model.vocab / layout.tensor * width
        found.append(CollectiveCost("tensor", "all_to_all", tensor, held))
        # Tokens, their log probabilities, and the likeliest ones where a row wants them.
        found.append(CollectiveCost("tensor", "all_gather", tensor, step.drawn * 8.0, count=2))
    return found
