"""The HTTP server's application: the OpenAI API on one engine.

Source: the OpenAI API reference.
"""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from shardlib.engine import Request as EngineRequest
from shardlib.errors import ShardlibError
from shardlib.serve.batch_jobs import BatchJobs
from shardlib.serve.bodies import CHAT, COMPLETIONS, EMBEDDINGS, Asked, Speaker, Url, parse
from shardlib.serve.clients import ClientGoneError, EventStream, unless_gone
from shardlib.serve.engine_thread import EngineThread, OpenAnswer
from shardlib.serve.file_routes import add_file_routes
from shardlib.serve.gate import Gate, read_json
from shardlib.serve.http_errors import CLIENT_GONE, ApiError, JsonResponse, error_response
from shardlib.serve.metrics import ServerMetrics
from shardlib.serve.openapi import RESPONSES, described
from shardlib.serve.responses import Chunks, response

_OF_PAGE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"
}


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """What the server takes."""

    most_requests: int = 1024
    """Requests that are open at once."""
    most_body_bytes: int = 16 * 2**20
    """Bytes of a body."""
    most_file_bytes: int = 512 * 2**20
    """Bytes of a file. Source: the OpenAI API reference, "Files"."""
    stalled_seconds: float = 20.0
    """Longest wait for the next piece of a body, and for a client to read what is written."""


@dataclasses.dataclass
class Service:
    """An engine that answers the OpenAI API: anyone, if there are no keys. A server that keeps
    files has `jobs`, its batches."""

    thread: EngineThread
    speaker: Speaker
    limits: ServerLimits = dataclasses.field(default_factory=ServerLimits)
    keys: tuple[str, ...] = ()
    jobs: BatchJobs | None = None

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.metrics = self.thread.observer = ServerMetrics(self.thread)
        self.gate = Gate(
            _build(self),
            self.keys,
            self.limits.most_requests,
            self.metrics.responded,
            self.limits.stalled_seconds,
        )

    def start(self) -> None:
        """Starts the engine and the batches.

        Raises:
            ConfigError: If another server uses the folder of files; then nothing runs.
        """
        if self.jobs is not None:
            self.jobs.start()
        self.thread.start()

    def drain(self) -> None:
        """Refuses new requests, and ends the batches until the next start."""
        self.gate.is_draining = True
        if self.jobs is not None:
            self.jobs.drain()

    def stop(self) -> None:
        """Ends the batches and the engine."""
        if self.jobs is not None:
            self.jobs.stop()
        self.thread.stop()

    @property
    def is_ready(self) -> bool:
        """Whether new requests are answered."""
        return self.thread.is_ready and not self.gate.is_draining

    async def answered(self, request: Request, url: Url) -> Response:
        """Returns the response to a body with prompts."""
        body = await read_json(request, self.limits.most_body_bytes)
        try:
            return await unless_gone(request.receive, self._response(url, body))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)

    async def _response(self, url: Url, body: Any) -> Response:
        asked, requests = await asyncio.to_thread(self._parsed, url, body)
        answer = await self.thread.open(requests, in_pieces=asked.streams)
        identity = f"{'chatcmpl' if url == CHAT else 'cmpl'}-{uuid.uuid4().hex}"
        created = int(time.time())
        if asked.streams:
            chunks = Chunks(asked, self.speaker, identity, created)
            return EventStream(_streamed(answer, chunks), answer.close)
        try:
            async for _ in answer.pieces():
                pass
        finally:
            answer.close()
        completions = [one.answer() for one in answer.requests]

        def whole() -> JsonResponse:
            ids = {"identity": identity, "created": created}
            return JsonResponse(response(asked, completions, self.speaker, **ids))

        # Log probabilities of a long prompt are many texts.
        return await asyncio.to_thread(whole)

    def _parsed(self, url: Url, body: Any) -> tuple[Asked, list[EngineRequest]]:
        """Returns what a body asks for, and a request for each answer."""
        most = self.thread.most_prompts
        asked = parse(url, body, self.speaker, is_live=True, most_answers=most)
        every = (self.thread.prepare(*one) for one in asked.by_prompt())
        return asked, [request for requests in every for request in requests]


async def _streamed(answer: OpenAnswer, chunks: Chunks) -> AsyncIterator[dict[str, Any]]:
    for chunk in chunks.first():
        yield chunk
    # Log probabilities of a long prompt are many texts.
    is_slow = chunks.asked.echo and chunks.asked.wants_logprobs
    async for piece in answer.pieces():
        new = chunks.piece(piece, answer.requests[piece.index])
        for chunk in await asyncio.to_thread(list, new) if is_slow else new:
            yield chunk
    for chunk in chunks.usage([one.answer() for one in answer.requests]):
        yield chunk


def _build(service: Service) -> FastAPI:
    """Returns the routes of a service."""
    app = FastAPI(title="shardlib", docs_url=None, redoc_url=None)
    page = resources.files("shardlib.serve").joinpath("status_page.html").read_bytes()
    kinds = ShardlibError, HTTPException, RequestValidationError, ClientDisconnect, Exception
    for kind in kinds:
        app.add_exception_handler(kind, error_response)

    @app.get("/health")
    async def health() -> Response:
        alive = service.thread.is_alive
        return JsonResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return JsonResponse({"ready": service.is_ready}, 200 if service.is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_class=HTMLResponse)
    async def status_page() -> Response:
        return Response(page, media_type="text/html", headers=_OF_PAGE)

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse(
            {"object": "list", "data": [_model(service, one) for one in service.speaker.names]}
        )

    @app.get("/v1/models/{name:path}", responses=RESPONSES)
    async def model(name: str) -> Response:
        names = service.speaker.names
        if name not in names:
            text = f"no model is called {name!r}.\n  Use {' or '.join(map(repr, names))}."
            raise ApiError(404, text, "model_not_found")
        return JsonResponse(_model(service, name))

    @app.post(COMPLETIONS, **described(COMPLETIONS, service.speaker.names))
    async def completions(request: Request) -> Response:
        return await service.answered(request, COMPLETIONS)

    @app.post(CHAT, **described(CHAT, service.speaker.names))
    async def chat_completions(request: Request) -> Response:
        return await service.answered(request, CHAT)

    @app.post(EMBEDDINGS, **described(EMBEDDINGS, service.speaker.names))
    async def embed(request: Request) -> Response:
        return await service.answered(request, EMBEDDINGS)

    add_file_routes(app, service.jobs, service.limits.most_file_bytes)
    return app


def _model(service: Service, name: str) -> dict[str, Any]:
    facts = {"id": name, "object": "model", "created": service.created, "owned_by": "shardlib"}
    return facts if name == service.speaker.name else facts | {"parent": service.speaker.name}
