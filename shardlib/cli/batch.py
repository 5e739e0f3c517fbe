"""`shardlib batch`: a file of requests, answered into a file of responses."""

import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.cli.arguments import AsJson, Mesh
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
from shardlib.errors import ConfigError
from shardlib.tables import aligned

if TYPE_CHECKING:
    from shardlib.serve import BatchCard

_REPORT_SECONDS = 5.0


def batch(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT", help="Requests in OpenAI's batch format: JSON lines or Parquet."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(metavar="RUN[@STEP]", help=SERVED_HELP),
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="Responses: JSON lines.")],
    name: Name = None,
    slots: Slots = 32,
    context: Context = None,
    pages: Pages = None,
    chunk: Chunk = 256,
    speculate: Speculate = 0,
    deterministic: Deterministic = False,
    weights: Weights = None,
    cache: Cache = None,
    attention: Attention = "auto",
    adapters: Adapters = None,
    pooling: Pooling = None,
    mesh: Mesh = None,
    as_json: AsJson = False,
) -> None:
    """Answer a file of requests; repeating the command resumes."""
    from shardlib.serve.batch import answer_batch, fault_of_source

    if (fault := fault_of_source(source)) is not None:  # Before the model is loaded.
        raise ConfigError(fault)
    engine, speaker = open_engine(
        model, adapters, mesh=mesh, name=name, slots=slots, context=context, pages=pages,
        chunk=chunk, speculate=speculate, deterministic=deterministic, weights=weights,
        cache=cache, attention=attention, pooling=pooling,
    )  # fmt: skip
    card = answer_batch(source, out, engine, speaker, progress=_Reporter())
    if as_json:
        facts = dataclasses.asdict(card) | {"tokens_per_second": card.tokens_per_second}
        print(json.dumps(facts, indent=2))
        return
    print(_card(out, card))


def _card(out: str, card: "BatchCard") -> str:
    share = card.cached_tokens / max(card.prompt_tokens, 1)
    rows = [
        ("rows", f"{card.rows:,}"),
        ("answered now", f"{card.answered:,}"),
        ("refused", f"{card.refused:,}"),
        ("prompt tokens", f"{card.prompt_tokens:,}, {share:.0%} from the cache"),
        ("answer tokens", f"{card.answer_tokens:,}, {card.tokens_per_second:,.1f} a second"),
    ]
    return "\n".join(aligned([("batch", out), *rows]))


class _Reporter:
    """Reports the rows that have a response, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _REPORT_SECONDS

    def __call__(self, done: int, every: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_SECONDS
            print(f"{done:,} of {every:,} rows have a response", file=sys.stderr)
