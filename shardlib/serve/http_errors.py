"""Errors of the server, as responses in the format of the OpenAI API.

Source: the OpenAI API reference, "Error codes".
"""

import json
import logging
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from shardlib.errors import DataError, MissingExtraError, ModelError, ShardlibError
from shardlib.serve.bodies import BodyError
from shardlib.serve.engine_thread import BusyError, EngineStoppedError

CLIENT_GONE = 499
"""Status of a request whose client has gone; nobody reads it. Source: nginx."""
_LOG = logging.getLogger(__name__)
_RETRY_SECONDS = 1
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(ShardlibError):
    """A request that is answered with an error.

    `status` is the status of HTTP, `code` the code in the OpenAI API, and `headers` go with it.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, retry_seconds: int | None = None
    ):
        super().__init__(message)
        self.status, self.code = status, code
        self.headers = {} if retry_seconds is None else {"Retry-After": str(retry_seconds)}


class JsonResponse(Response):
    """A JSON value as a response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        # A text may hold half of a surrogate pair, which only its escape can write.
        return json.dumps(content).encode()


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Returns the body of an error."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def as_api_error(error: Exception) -> ApiError:
    """Returns the error of the API for any error; one that is not deliberate is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BodyError):
        return ApiError(error.status, str(error), error.code)
    if isinstance(error, BusyError):
        return ApiError(429, str(error), "queue_full", _RETRY_SECONDS)
    if isinstance(error, EngineStoppedError):
        return ApiError(500, str(error), "engine_stopped")
    if isinstance(error, ModelError | DataError | MissingExtraError):
        return ApiError(400, str(error))
    if isinstance(error, ClientDisconnect):
        return ApiError(CLIENT_GONE, "the client has gone before the end of its body.")
    if isinstance(error, RequestValidationError):
        return ApiError(400, _faults(error))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if not isinstance(error, ShardlibError):
        _LOG.error("A request has failed.", exc_info=error)
    return ApiError(500, f"The server has failed: {error}")


def _faults(error: RequestValidationError) -> str:
    """Returns which parameters of a URL are wrong, and why."""
    faults = [
        f"{one['loc'][-1]} is {one['input']!r}: {one['msg'].lower()}" for one in error.errors()
    ]
    return f"{'; '.join(faults)}.\n  Change these parameters, or leave them out."


async def error_response(request: Request, error: Exception) -> JsonResponse:
    """Returns the response for an error that a request raised."""
    found = as_api_error(error)
    headers = {**(getattr(error, "headers", None) or {}), **found.headers}
    return JsonResponse(
        error_body(found.status, str(found), found.code), found.status, headers=headers
    )
