"""The gate of the server: who may ask, how many at once, and how much."""

import asyncio
import dataclasses
import hashlib
import hmac
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardlib.errors import ConfigError
from shardlib.serve.http_errors import ApiError, error_response

KEYS_VARIABLE = "SHARDLIB_API_KEYS"
_DRAIN_SECONDS = 10
_LARGE_BODY = 2**16
"""Bytes of JSON beyond which other requests do not wait for its reading."""
_COMMENT = re.compile(r"(^|\s)#.*")


def read_keys(file: str | None) -> tuple[str, ...]:
    """Returns API keys: the lines of a file, where `#` begins a comment at the start of a line or
    after a space, or, without one, what `SHARDLIB_API_KEYS` has between commas: no keys if that
    is not set.

    Raises:
        ConfigError: If the file cannot be read, or if it or the variable has no key.
    """
    if file is None:
        return _keys_of_environment()
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"API keys cannot be read from {file}: {why}.\n  Name a file with one key a line."
        ) from None
    keys = tuple(filter(None, (_COMMENT.sub("", line).strip() for line in lines)))
    if not keys:
        raise ConfigError(f"{file} has no API key.\n  Write one in each line.")
    return keys


def _keys_of_environment() -> tuple[str, ...]:
    given = os.environ.get(KEYS_VARIABLE)
    if given is None:
        return ()
    keys = tuple(filter(None, map(str.strip, given.split(","))))
    if not keys:  # Its secret may have failed to load: the server must not be open to all.
        raise ConfigError(
            f"{KEYS_VARIABLE} is set and has no API key.\n"
            "  Write keys with commas between them, or unset it for a server without keys."
        )
    return keys


@dataclasses.dataclass
class Gate:
    """What the requests below `/v1` have to pass, as middleware of ASGI. A request needs one of the
    keys, if there are any; `most_requests` may be open at once. The next piece of a body, or of a
    response, may take `stalled_seconds`. `responded` is called with the status of each response."""

    app: ASGIApp
    keys: Iterable[str] = ()
    most_requests: int = 1024
    responded: Callable[[int], None] = lambda status: None
    stalled_seconds: float = 20.0
    num_open: int = 0
    stalled: set[Any] = dataclasses.field(default_factory=set)
    """Addresses of clients that do not read, whose connections the server ends."""
    is_draining: bool = False
    """Whether new requests are refused, because the server is about to end."""

    def __post_init__(self) -> None:
        self._digests = [_digest(key.encode()) for key in self.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)

        is_stalled = False

        async def counted(message: Message) -> None:
            nonlocal is_stalled
            if is_stalled:  # Nothing follows a piece that was lost.
                return
            if message["type"] == "http.response.start":
                self.responded(message["status"])
            try:
                async with asyncio.timeout(self.stalled_seconds):
                    await send(message)
            except TimeoutError:
                is_stalled = True
                self.stalled.add(scope["client"])

        if (refusal := self._refusal(request)) is not None:
            response = await error_response(request, refusal)
            await response(scope, receive, counted)
            return
        self.num_open += 1
        try:
            await self.app(scope, _in_time(receive, self.stalled_seconds), counted)
        finally:
            self.num_open -= 1

    def _refusal(self, request: Request) -> ApiError | None:
        if self._digests and not self._knows(request.headers.get("authorization", "")):
            return ApiError(
                401,
                "the API key is missing or wrong.\n  Send the header Authorization: Bearer KEY.",
                "invalid_api_key",
            )
        if self.is_draining:
            message = "the server is about to end.\n  Try again later."
            return ApiError(503, message, "draining", _DRAIN_SECONDS)
        if self.num_open >= self.most_requests:
            return ApiError(
                429,
                f"{self.num_open} requests are open, the most there may be.\n  Try again later.",
                "too_many_requests",
                1,
            )
        return None

    def _knows(self, header: str) -> bool:
        kind, _, key = header.partition(" ")
        # All keys are compared, each in constant time.
        digest = _digest(key.strip().encode("latin-1", "replace"))
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        return kind.lower() == "bearer" and any(matches)


def _in_time(receive: Receive, seconds: float) -> Receive:
    """Returns the channel of a client, which raises an `ApiError` of status 408 if the next piece
    of a body does not come in time."""
    is_read = False

    async def received() -> Message:
        nonlocal is_read
        try:
            async with asyncio.timeout(None if is_read else seconds):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the next piece of the body did not come in {seconds:g} seconds.\n"
                "  Send the body again.",
                "stalled",
            ) from None
        is_read = not message.get("more_body", False)
        return message

    return received


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Returns the body of a request.

    Raises:
        ApiError: With status 413 if it has more than `most_bytes`.
    """
    pieces, size = [], 0
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most_bytes:
        raise too_large(most_bytes)
    async for piece in request.stream():
        size += len(piece)
        if size > most_bytes:
            raise too_large(most_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def too_large(most_bytes: int) -> ApiError:
    """Returns the error of a body with more than `most_bytes`."""
    return ApiError(
        413,
        f"the body has more than {most_bytes:,} bytes.\n  Send a shorter prompt, or fewer.",
        "body_too_large",
    )


async def read_json(request: Request, most_bytes: int) -> Any:
    """Returns the JSON value that a request carries.

    Raises:
        ApiError: If it is too long (413), of another type (415) or malformed (400).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body is {kind or 'of no type'}.\n  Send application/json.")
    data = await read_body(request, most_bytes)
    try:
        if len(data) > _LARGE_BODY:
            return await asyncio.to_thread(_value, data, parse_int=_integer)
        return _value(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}.\n  Repair it.") from None


def _value(data: bytes, **options: Any) -> Any:
    return json.loads(data, parse_constant=_refuse, **options)


def _integer(text: str) -> int:
    # The scanner is one call of C, which lets other threads run only where it calls Python. So a
    # list of millions of token ids holds nobody up.
    return int(text)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
