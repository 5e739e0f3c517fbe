"""Names of tree leaves (`layers/attention/query/kernel`) and patterns over them."""

import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from shardlib.errors import did_you_mean


def key_string(key: Any) -> str:
    """Returns one entry of a JAX key path as plain text, without brackets, dots or quotes."""
    return jax.tree_util.keystr((key,), simple=True)


def path_string(key_path: KeyPath) -> str:
    """Returns a JAX key path as `a/b/c`."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def named_leaves(tree: PyTree, is_leaf: Any = None) -> dict[str, Any]:
    """Returns the leaves of a tree by path, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {path_string(path): leaf for path, leaf in leaves}


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = []
    for token in re.split(r"(\*\*/|\*\*|\*|\?)", pattern):
        parts.append(
            {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token, re.escape(token))
        )
    return re.compile("".join(parts))


def matches(pattern: str, path: str) -> bool:
    """Whether a path matches a glob: `*` stays within one segment, `**` crosses segments."""
    return _compiled(pattern).fullmatch(path) is not None


def nearest_pattern(pattern: str, paths: Iterable[str]) -> str:
    """Returns `" Did you mean '**/kernel'?"` for a pattern that matches no path, or `""`."""
    if not pattern.startswith("**/"):
        return did_you_mean(pattern, paths)
    depth = pattern.count("/")
    ends = {"/".join(["**", *path.split("/")[-depth:]]): None for path in paths}
    return did_you_mean(pattern, ends)
