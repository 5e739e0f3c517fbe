"""Collectives that a program calls by name."""

EXPLICIT = frozenset(
    (
        *("ppermute", "all_to_all", "ragged_all_to_all", "all_gather", "psum", "psum_scatter"),
        *("reduce_scatter", "pmax", "pmin", "all_gather_invariant", "psum_invariant", "pbroadcast"),
        *("all_gather_reduced", "psum2", "pcast"),
    )
)
"""JAX's collectives that a program calls by name."""


def is_explicit(name: str) -> bool:
    """Whether an operation is a collective that the program calls by name."""
    return name.rpartition("/")[2] in EXPLICIT
