"""Bodies of the API as schemas, made from the table of their fields."""

from collections.abc import Sequence
from typing import Any

from shardlib.serve.bodies import COMPLETIONS, EMBEDDINGS, FIELDS, FORMATS, MOST_STOPS, Url

_TYPES = {
    str: "string",
    float: "number",
    int: "integer",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_NEEDED = {COMPLETIONS: "prompt", EMBEDDINGS: "input"}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_STOPS}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": {"type": ["string", "null"]}},
    "required": ["role", "content"],
}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _TOKENS,
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}
_CHOSEN = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_FORMAT = {
    "type": ["object", "null"],
    "properties": {"type": {"enum": list(FORMATS)}},
    "required": ["type"],
}
_NARROWER: dict[str, dict[str, Any]] = {
    "prompt": _PROMPT,
    "input": _PROMPT,
    "encoding_format": {"enum": ["float", "base64", None]},
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, _TEXTS, {"type": "null"}]},
    "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer"}},
    "response_format": _FORMAT,
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required", None]}, _CHOSEN]},
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 128},
    "max_tokens": {"type": ["integer", "null"], "minimum": 1},
    "max_completion_tokens": {"type": ["integer", "null"], "minimum": 1},
    "temperature": {"type": ["number", "null"], "minimum": 0},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": 0},
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
}
"""Fields whose values are narrower than their type."""
_STATUSES = {
    400: "The body is malformed, or cannot be answered.",
    401: "The API key is missing or wrong.",
    404: "There is no such model or file.",
    413: "The body is too large.",
    415: "The body is of another type.",
    429: "Too many requests are open, or too many prompts wait.",
    500: "The engine has failed.",
    503: "The server is about to end.",
}


RESPONSES: dict[int | str, dict[str, Any]] = {
    **{status: {"description": text} for status, text in _STATUSES.items()},
    # FastAPI adds its own 422 otherwise, which a wrong parameter does not have here: it is a 400.
    "4XX": {"description": "The request is wrong in another way."},
}
"""Responses that any route may give."""


_BATCH = {
    "type": "object",
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"enum": list(FIELDS)},
        "completion_window": {"type": "string"},
        "metadata": {"type": ["object", "null"]},
    },
    "required": ["input_file_id", "endpoint"],
    "additionalProperties": False,
}
_FILE = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"enum": ["batch", "fine-tune"]},
    },
    "required": ["file", "purpose"],
}
BATCH_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _BATCH}}}
}
"""The body of a batch, for `openapi_extra` of its route."""
FILE_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FILE}}}
}
"""The same of a file."""


def described(url: Url, models: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of a route that describe its body and its responses."""
    properties = {
        name: _NARROWER.get(name) or _property(kind) for name, kind in FIELDS[url].items()
    }
    schema = {
        "type": "object",
        "properties": properties | {"model": {"enum": [*models, None]}},
        "required": [_NEEDED.get(url, "messages")],
        "additionalProperties": False,
    }
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    answer: dict[int | str, dict[str, Any]] = {}
    if "stream" in FIELDS[url]:
        # Events have no schema: OpenAPI 3.1 does not say whether it is one of them or of all.
        streamed: dict[str, Any] = {"text/event-stream": {}}
        answer[200] = {"description": "The answer, whole or in pieces.", "content": streamed}
    return {
        "openapi_extra": {"requestBody": body},
        "responses": RESPONSES | answer,
    }


def _property(kind: Any) -> dict[str, Any]:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return {"type": [*(_TYPES[one] for one in kinds), "null"]}
