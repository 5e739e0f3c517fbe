"""Work for a client that may go away, and answers that it reads in pieces."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardlib.serve.http_errors import as_api_error, error_body

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection, and nobody reads an answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, which is cancelled once the client goes away.

    Args:
        receive: The channel of the client, whose body has been read.
        work: What is done for it.

    Raises:
        ClientGoneError: If the client has gone.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for one in (task, gone):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, each a JSON value, up to `[DONE]`. `close` is called in the end, also if
    the client goes away.

    Source: the OpenAI API reference, "Streaming". An error after the first event is an event too.
    """

    media_type = "text/event-stream"

    def __init__(self, values: AsyncIterator[dict[str, Any]], close: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._values, self._close = values, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGoneError:
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async for event in self._events():
            body = f"data: {event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for value in self._values:
                yield json.dumps(value)
            yield "[DONE]"
        except Exception as error:
            found = as_api_error(error)
            yield json.dumps(error_body(found.status, str(found), found.code))
