"""`shardlib serve`: a model behind the OpenAI API."""

import os
import sys
from typing import Annotated

import typer

from shardlib.cli.arguments import Mesh, warn
from shardlib.cli.engine_options import (
    SERVED_HELP,
    Adapters,
    Attention,
    Cache,
    Chunk,
    Context,
    Deterministic,
    Name,
    Pages,
    Pooling,
    Slots,
    Speculate,
    Weights,
    open_engine,
)
from shardlib.errors import require

_LOCAL = ("127.0.0.1", "::1", "localhost")

Model = Annotated[str, typer.Argument(metavar="RUN[@STEP]", help=SERVED_HELP)]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for a free one.")]
ApiKeys = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="API keys, one a line; default: SHARDLIB_API_KEYS."),
]
Queue = Annotated[int, typer.Option(min=0, help="Maximum number of prompts that wait for a slot.")]
Connections = Annotated[int, typer.Option(min=1, help="Maximum number of open requests.")]
Files = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER", help="Offer /v1/files and /v1/batches, and keep their files here."
    ),
]
BodyBytes = Annotated[int, typer.Option(min=1, help="Maximum size of a request body, in bytes.")]


def serve(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    api_keys: ApiKeys = None,
    slots: Slots = 32,
    context: Context = None,
    pages: Pages = None,
    chunk: Chunk = 256,
    queue: Queue = 256,
    connections: Connections = 1024,
    files: Files = None,
    body_bytes: BodyBytes = 2**24,
    speculate: Speculate = 0,
    deterministic: Deterministic = False,
    weights: Weights = None,
    cache: Cache = None,
    attention: Attention = "auto",
    adapters: Adapters = None,
    pooling: Pooling = None,
    mesh: Mesh = None,
) -> None:
    """Serve the OpenAI API over HTTP.

    SIGTERM ends the server once it has answered the open requests.
    """
    for module in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        require(module, "serve", "an HTTP server")
    from shardlib.serve.app import ServerLimits, Service
    from shardlib.serve.batch_jobs import BatchJobs
    from shardlib.serve.engine_thread import EngineThread
    from shardlib.serve.file_store import FileStore
    from shardlib.serve.gate import read_keys
    from shardlib.serve.server import claim, run

    keys = read_keys(api_keys)
    store = FileStore(files) if files is not None else None
    if store is not None:
        store.hold()  # Before the model is loaded.
    bound = claim(host, port)
    engine, speaker = open_engine(
        model, adapters, mesh=mesh, name=name, slots=slots, context=context, pages=pages,
        chunk=chunk, speculate=speculate, deterministic=deterministic, weights=weights,
        cache=cache, attention=attention, pooling=pooling,
    )  # fmt: skip
    if host not in _LOCAL and not keys:
        warn(f"anyone who reaches {host} may ask: there are no API keys. Give --api-keys.")

    def started(address: str) -> None:
        text = f"{speaker.name} at {address}: {slots} slots of {engine.context:,} tokens"
        print(text, file=sys.stderr, flush=True)

    thread = EngineThread(engine, most_waiting=queue)
    jobs = BatchJobs(store, thread, speaker) if store is not None else None
    service = Service(thread, speaker, ServerLimits(connections, body_bytes), keys, jobs)
    _end(run(service, bound, started), is_busy=thread.is_alive)


def _end(code: int, *, is_busy: bool) -> None:
    """Ends the process. With an engine that compiles, or runs a long step, the interpreter's own
    end would abort."""
    if is_busy:
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)
