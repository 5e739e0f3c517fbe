"""`shardlib serve`: a model behind the OpenAI API."""

import sys
from typing import Annotated

import typer

from shardlib.cli.arguments import warn
from shardlib.cli.checkpoint import one_step
from shardlib.errors import require

_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="RUN[@STEP]", help="A run, or a folder or name of Hugging Face."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests; default: its directory's.")
    ] = None,
    api_keys: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="API keys, one a line; default: SHARDLIB_API_KEYS."),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 32,
    context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a prompt and its answer.")
    ] = None,
    pages: Annotated[
        int | None, typer.Option(min=1, help="Pages of 16 tokens; default: all slots are full.")
    ] = None,
    chunk: Annotated[
        int, typer.Option(min=1, help="Tokens of prompts that a step reads, a multiple of 32.")
    ] = 256,
    queue: Annotated[int, typer.Option(min=0, help="Prompts that wait for a slot at most.")] = 256,
    connections: Annotated[int, typer.Option(min=1, help="Requests that are open at most.")] = 1024,
    files: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Keep files and answer batches; default: neither."),
    ] = None,
    body_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a body at most.")] = 2**24,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Bits do not depend on others (CPU, float32)."),
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option(help="Mesh; default: the run's mesh if it fits the devices, else auto."),
    ] = None,
) -> None:
    """Answer the OpenAI API over HTTP; SIGTERM answers what is open, then ends."""
    for module in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        require(module, "serve", "an HTTP server")
    from shardlib.serve.app import ServerLimits, Service
    from shardlib.serve.batch_jobs import BatchJobs
    from shardlib.serve.engine_thread import EngineThread
    from shardlib.serve.file_store import FileStore
    from shardlib.serve.gate import read_keys
    from shardlib.serve.open_model import open_model
    from shardlib.serve.server import listen, run

    keys = read_keys(api_keys)
    store = FileStore(files) if files is not None else None
    bound = listen(host, port)
    directory, step = one_step(model, None)
    engine, speaker = open_model(
        directory,
        mesh=mesh,
        step=step,
        name=name,
        notify=warn,
        slots=slots,
        context=context,
        pages=pages,
        chunk=chunk,
        deterministic=deterministic,
    )
    if host not in _LOCAL and not keys:
        warn(f"anyone who reaches {host} may ask: there are no API keys. Give --api-keys.")

    def started(address: str) -> None:
        print(
            f"{speaker.name} at {address}: {slots} slots of {engine.context:,} tokens",
            file=sys.stderr,
            flush=True,
        )

    thread = EngineThread(engine, most_waiting=queue)
    jobs = BatchJobs(store, thread, speaker) if store is not None else None
    service = Service(thread, speaker, ServerLimits(connections, body_bytes), keys, jobs)
    raise typer.Exit(run(service, bound, started))
