"""Bodies of the API as schemas, made from the table of their fields."""

from typing import Any

from shardlib.serve.bodies import COMPLETIONS, FIELDS, Url

_TYPES = {
    str: "string",
    float: "number",
    int: "integer",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_NEEDED = {COMPLETIONS: "prompt"}
STATUSES = {
    400: "The body is malformed, or cannot be answered.",
    401: "The API key is missing or wrong.",
    404: "There is no such model or file.",
    413: "The body is too large.",
    415: "The body is of another type.",
    429: "Too many requests are open, or too many prompts wait.",
    500: "The engine has failed.",
    503: "The server is about to end.",
}


def described(url: Url) -> dict[str, Any]:
    """Returns the arguments of a route that describe its body and its responses."""
    schema = {
        "type": "object",
        "properties": {name: _property(kind) for name, kind in FIELDS[url].items()},
        "required": [_NEEDED.get(url, "messages")],
        "additionalProperties": False,
    }
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "openapi_extra": {"requestBody": body},
        "responses": {status: {"description": text} for status, text in STATUSES.items()},
    }


def _property(kind: Any) -> dict[str, Any]:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return {"type": [*(_TYPES[one] for one in kinds), "null"]}
