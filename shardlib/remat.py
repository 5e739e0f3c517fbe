"""Rematerialisation by name: what the forward pass keeps for the backward pass.

| policy     | kept of each layer                               | recomputed                    |
|------------|--------------------------------------------------|-------------------------------|
| `none`     | everything                                       | nothing                       |
| `dots`     | results of weight matmuls                        | norms, activations, attention |
| `save:a,b` | what the model tagged `a` or `b` (`tag(x, "a")`) | all else                      |
| `full`     | the layer's inputs                               | the whole layer               |

Results and gradients are the same under every policy, up to the rounding of what is recomputed.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; `dots` keeps what costs
the most to recompute for its size, as in Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models".
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardlib.errors import ConfigError, did_you_mean

SIMPLE = ("none", "dots", "full")
_SAVE = "save:"


def tag(x: jax.Array, name: str) -> jax.Array:
    """Names a value for `save:name`; it changes nothing under other policies."""
    return checkpoint_name(x, name)


def apply(
    policy: str, fn: Callable[..., Any], *, tags: Iterable[str] | None = None, in_scan: bool = False
) -> Callable[..., Any]:
    """Returns `fn` under a policy of this module.

    Args:
        policy: `none`, `dots`, `full` or `save:name1,name2`.
        fn: A function of pytrees of arrays.
        tags: The names that `fn` tags, to check `save:` against; None when not known.
        in_scan: Whether `fn` is the body of a scan. There XLA cannot undo the recomputation by
            common-subexpression elimination, so the barriers against that are left out.

    Raises:
        ConfigError: If the policy is unknown or names something that is not tagged.
    """
    faults = check(policy, tags)
    if faults:
        raise ConfigError("\n".join(faults))
    if policy == "none":
        return fn
    policies = jax.checkpoint_policies
    if policy == "full":
        saved = policies.nothing_saveable
    elif policy == "dots":
        saved = policies.dots_with_no_batch_dims_saveable
    else:
        saved = policies.save_only_these_names(*_names(policy))
    return jax.checkpoint(fn, policy=saved, prevent_cse=not in_scan)


def check(policy: str, tags: Iterable[str] | None = None) -> list[str]:
    """Returns what is wrong with a policy, as sentences; empty when nothing is."""
    if not policy.startswith(_SAVE):
        if policy in SIMPLE:
            return []
        hint = did_you_mean(policy, [*SIMPLE, _SAVE])
        return [
            f"remat policy {policy!r} is unknown.{hint}\n"
            f"  Choose none, dots, full, or save: with the names to keep{_listed(tags)}."
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
    return tuple(name.strip() for name in policy[len(_SAVE) :].split(",") if name.strip())


def _listed(tags: Iterable[str] | None) -> str:
    return "" if tags is None else f" ({', '.join(sorted(tags))})"
