"""Pages of the lists of files and batches.

Source: the OpenAI API reference, "List files" and "List batch".
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from shardlib.serve.http_errors import ApiError


class BatchQuery(BaseModel, extra="forbid"):
    """Parameters of the list of batches."""

    limit: int = Field(20, ge=1, le=100)
    """Most objects of a page."""
    after: str | None = None
    """The id of the object that comes before the page; None for the first page."""


class FileQuery(BaseModel, extra="forbid"):
    """Parameters of the list of files."""

    limit: int = Field(10_000, ge=1, le=10_000)
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"
    """Whether the oldest files come first, or the newest."""
    purpose: str | None = None
    """The purpose of the files; None for all."""


def page_of(objects: Sequence[dict[str, Any]], query: BatchQuery | FileQuery) -> dict[str, Any]:
    """Returns the body of a page.

    Args:
        objects: All objects of the list, in its order.
        query: Which of them are asked for.

    Raises:
        ApiError: If the list has no object with the id `after`.
    """
    start = 0
    if query.after is not None:
        ids = [one["id"] for one in objects]
        if query.after not in ids:
            raise ApiError(
                400,
                f"after is {query.after!r}, which the list does not have.\n"
                "  Give the id of the last object of a page, or leave it out.",
            )
        start = ids.index(query.after) + 1
    end = start + query.limit
    page = objects[start:end]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": end < len(objects),
    }
