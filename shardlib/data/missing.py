"""The error for data that is not there."""

from pathlib import Path

from shardlib.errors import DataError, did_you_mean


def missing(path: str) -> DataError:
    """Returns the error for a path that does not exist, with a similar sibling as a hint."""
    parent = Path(path).parent
    siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    hint = did_you_mean(Path(path).name, siblings)
    if not parent.is_dir():
        hint = f" The directory {str(parent)!r} is missing too."
    return DataError(
        f"there is nothing at {path!r}.{hint}\n"
        f"  Correct the path; it is relative to {str(Path.cwd())!r}."
    )
