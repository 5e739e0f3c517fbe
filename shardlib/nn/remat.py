"""Rematerialisation policies: the values that the forward pass keeps for the backward pass.

- `none` keeps everything, and nothing is recomputed.
- `dots` keeps results of weight matmuls, convolutions and fused attention; norms and activations
  are recomputed, and so are the scores of `xla` attention.
- `save:a,b` keeps values tagged `a` or `b` (`tag(x, "a")`); all else is recomputed. Fused attention
  tags its results `attended`.
- `offload:a,b` does the same, and keeps them in host memory; results of cuDNN stay on the device.
- `full` keeps the inputs of each layer, which is recomputed as a whole.

In a config `model.remat` may be `auto`: the search of `rules: auto` then chooses a policy.

The layers of a stack may have policies by range, with both ends included: `0-7:full,8-:dots`. Each
range is compiled as a loop of its own. Only the number of recomputed layers matters: half of the
layers under `full` cost the same compute and save the same memory wherever they are.

Results and gradients are the same under every policy, up to the rounding of recomputed values.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; `dots` keeps what costs
the most to recompute for its size, as in Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models".
"""

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardlib.errors import ConfigError, did_you_mean
from shardlib.functional.eight_bit import RESULT
from shardlib.sharding.constrain import active
from shardlib.sharding.host_memory import DEVICE, HOST, check_host_memory

SIMPLE = ("none", "dots", "full")
_SAVE, OFFLOAD = "save:", "offload:"
ATTENDED = "attended"
"""Tag of what fused attention keeps for its backward pass: its output and the sums of its
softmax."""
_CUDNN = "dot_product_attention_fwd"
"""Start of the name of JAX's primitives for cuDNN's attention, whose results have no tag."""
_RANGE = re.compile(r"(\d+)(?:(-)(\d*))?:(.+)")
_NO_END = 10**9
_WRITE_RANGES = "  Write ranges of layers as in 0-7:full,8-:dots, counted from 0."


def tag(x: jax.Array, name: str) -> jax.Array:
    """Names a value for `save:name` and `offload:name`. Other policies ignore names, except that
    `dots` keeps what is `attended`."""
    return checkpoint_name(x, name)


def apply(
    policy: str, fn: Callable[..., Any], *, tags: Iterable[str] | None = None, in_scan: bool = False
) -> Callable[..., Any]:
    """Returns `fn` under a policy of this module.

    Args:
        policy: `none`, `dots`, `full`, `save:name1,name2` or `offload:name1,name2`.
        fn: A function of pytrees of arrays.
        tags: The names that `fn` tags, to check `save:` and `offload:` against; None if unknown.
        in_scan: Whether `fn` is the body of a scan. XLA cannot undo the recomputation there by
            common-subexpression elimination, so the barriers against it are left out.

    Raises:
        ConfigError: If the policy is unknown, keeps a name without a tag, or has ranges.
        MeshError: If the policy offloads and the devices cannot reach their host's memory.
    """
    faults = check(policy, tags)
    if not faults and _has_ranges(policy):
        faults = [
            f"remat policy {policy!r} has ranges of layers, but applies to a single function.\n"
            "  Choose one policy without ranges."
        ]
    if faults:
        raise ConfigError("\n".join(faults))
    if policy == "none":
        return fn
    return jax.checkpoint(fn, policy=_saved(policy), prevent_cse=not in_scan)


def _saved(policy: str) -> Any:
    policies = jax.checkpoint_policies
    if policy == "full":
        return policies.nothing_saveable
    if policy == "dots":
        return _keeps_dots
    names = _names(policy)
    if policy.startswith(_SAVE):
        named = policies.save_only_these_names(*names)
    else:
        scope = active()
        mesh = scope.mesh if scope else None
        check_host_memory(mesh, f"remat policy {policy!r}", on_absent_gpus=True)
        named = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src=DEVICE,
            offload_dst=HOST,
        )
    return _also_cudnn(named) if ATTENDED in names else named


def _also_cudnn(named: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a policy that also keeps the results of cuDNN's attention."""

    def keeps(primitive: Any, *avals: Any, **params: Any) -> Any:
        return primitive.name.startswith(_CUDNN) or named(primitive, *avals, **params)

    return keeps


def _keeps_dots(primitive: Any, *avals: Any, **params: Any) -> Any:
    """Keeps what attention kernels give, and results of products and convolutions in the dtype of
    the layer: sums of 8-bit products are wider."""
    policies = jax.checkpoint_policies
    if primitive.name == "dot_general" and jnp.dtype(avals[0].dtype).itemsize == 1:
        return False
    named = _also_cudnn(policies.save_only_these_names(RESULT, ATTENDED))
    if primitive.name == "conv_general_dilated":
        return True
    is_dot = policies.dots_with_no_batch_dims_saveable
    return named(primitive, *avals, **params) or is_dot(primitive, *avals, **params)


class Run(NamedTuple):
    """Consecutive layers under one policy."""

    policy: str
    num_layers: int


def runs(
    policy: str, num_layers: int, *, length: int, tags: Iterable[str] | None = None
) -> list[Run]:
    """Returns the policies of a slice of a stack, from its first layer to its last.

    Slices that are shorter than the stack run as one program on several devices, each with its own
    layers, as the stages of a pipeline do. The ranges must therefore repeat from slice to slice.

    Args:
        policy: A policy for all layers, or ranges.
        num_layers: Layers of the whole stack.
        length: Layers of the slice.
        tags: The names that the layers tag; None if unknown.

    Raises:
        ConfigError: If `check` finds faults, or the slices have different policies.
    """
    faults = check(policy, tags, num_layers)
    if faults:
        raise ConfigError("\n".join(faults))
    if not _has_ranges(policy):
        return [Run(policy, length)]
    of_layer = [""] * num_layers
    for part in _parts(policy)[0]:
        for layer in part.layers(num_layers):
            of_layer[layer] = part.policy
    _check_repeats(policy, of_layer, length)
    groups = itertools.groupby(of_layer[:length])
    return [Run(name, len(list(members))) for name, members in groups]


def part_of(policy: str, num_layers: int, first: int, end: int) -> str:
    """Returns the policy of a stack that holds layers `first` to `end` - 1 of all `num_layers`.

    Raises:
        ConfigError: If `check` finds faults.
    """
    if not _has_ranges(policy):
        return policy
    at, ranges = 0, []
    for run in runs(policy, num_layers, length=num_layers):
        start, stop = max(at, first), min(at + run.num_layers, end)
        if start < stop:
            ranges.append(f"{start - first}-{stop - first - 1}:{run.policy}")
        at += run.num_layers
    return ",".join(ranges)


def _check_repeats(policy: str, of_layer: list[str], length: int) -> None:
    num_layers = len(of_layer)
    if num_layers % length:
        raise ConfigError(
            f"remat policy {policy!r} has ranges, but the {num_layers} layers run in slices of "
            f"{length}, which do not divide them.\n  Choose one policy for all layers."
        )
    for layer in range(length, num_layers):
        first = layer % length
        if of_layer[layer] != of_layer[first]:
            raise ConfigError(
                f"remat policy {policy!r} gives layer {first} {of_layer[first]!r} and layer "
                f"{layer} {of_layer[layer]!r}, but the layers run in slices of {length} (stages of "
                "a pipeline), which are one program.\n"
                f"  Repeat the ranges every {length} layers, or choose one policy for all layers."
            )


def check(
    policy: str, tags: Iterable[str] | None = None, num_layers: int | None = None
) -> list[str]:
    """Returns the faults of a policy as sentences; empty for a valid policy.

    Args:
        policy: A policy, or ranges of layers with a policy each.
        tags: The names that the model tags; None if unknown.
        num_layers: Layers of the model, to check ranges against; None if unknown.
    """
    if not _has_ranges(policy):
        return _check_one(policy, tags)
    parts, faults = _parts(policy)
    for one in dict.fromkeys(part.policy for part in parts):
        faults += _check_one(one, tags)
    return faults or _check_cover(policy, parts, num_layers)


def _check_one(policy: str, tags: Iterable[str] | None) -> list[str]:
    prefix = next((p for p in (_SAVE, OFFLOAD) if policy.startswith(p)), None)
    if prefix is None:
        if policy in SIMPLE:
            return []
        if policy == "auto":
            return [
                "remat policy 'auto' is only for model.remat of a config, with rules: auto.\n"
                "  Choose a policy, such as none, dots or full."
            ]
        hint = did_you_mean(policy, [*SIMPLE, _SAVE, OFFLOAD])
        return [
            f"remat policy {policy!r} is unknown.{hint}\n"
            f"  Choose none, dots, full, or save: or offload: with the names to keep"
            f"{_listed(tags)}."
        ]
    names = _names(policy)
    if not names:
        return [f"remat policy {policy!r} names nothing to keep.\n  Add names{_listed(tags)}."]
    known = None if tags is None else set(tags)
    return [
        f"remat policy {policy!r} keeps {name!r}, which the model does not tag."
        f"{did_you_mean(name, known)}\n  Choose among {', '.join(sorted(known))}."
        for name in names
        if known is not None and name not in known
    ]


def _names(policy: str) -> tuple[str, ...]:
    _, _, names = policy.partition(":")
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _listed(tags: Iterable[str] | None) -> str:
    return "" if tags is None else f" ({', '.join(sorted(tags))})"


class _Part(NamedTuple):
    """One range of a policy; `last` is None if the range is open."""

    first: int
    last: int | None
    policy: str

    def layers(self, num_layers: int) -> range:
        return range(self.first, num_layers if self.last is None else self.last + 1)

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}-{'' if self.last is None else self.last}"


def _has_ranges(policy: str) -> bool:
    return policy[:1].isdecimal()


def _parts(policy: str) -> tuple[list[_Part], list[str]]:
    """Returns the ranges of a policy sorted by first layer, and the faults of malformed ranges."""
    parts, faults = [], []
    # A name to save never starts with a digit, so a comma before a digit ends a range.
    for text in re.split(r",(?=\s*\d)", policy):
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            faults.append(
                f"remat policy {policy!r}: {text.strip()!r} is not a range of layers with a "
                f"policy.\n{_WRITE_RANGES}"
            )
            continue
        first, dash, last, one = match.groups()
        end = int(first) if dash is None else int(last) if last else None
        parts.append(_Part(int(first), end, one.strip()))
    return sorted(parts, key=lambda part: part.first), faults


def _check_cover(policy: str, parts: list[_Part], num_layers: int | None) -> list[str]:
    """Returns the reasons why ranges do not cover every layer exactly once."""
    faults, expected = [], 0
    for part in parts:
        last = _NO_END if part.last is None else part.last
        if last < part.first:
            faults.append(f"the range {part} holds no layer")
            continue
        if part.first > expected:
            faults.append(f"{_have(expected, part.first - 1)} no policy")
        elif part.first < expected:
            faults.append(f"{_have(part.first, min(expected - 1, last))} two policies")
        expected = max(expected, last + 1)
        if num_layers is not None and max(part.first, part.last or 0) >= num_layers:
            faults.append(f"the range {part} goes beyond the last layer, {num_layers - 1}")
    if num_layers is not None and expected < num_layers:
        faults.append(f"{_have(expected, num_layers - 1)} no policy")
    if not faults:
        return []
    return [f"remat policy {policy!r}: {'; '.join(faults)}.\n{_WRITE_RANGES}"]


def _have(first: int, last: int) -> str:
    if first == last:
        return f"layer {first} has"
    return f"layers {first}-{'' if last >= _NO_END else last} have"
