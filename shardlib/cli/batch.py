"""`shardlib batch`: a file of requests, answered into a file of responses."""

import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.cli.arguments import AsJson, warn
from shardlib.cli.checkpoint import one_step
from shardlib.tables import aligned

if TYPE_CHECKING:
    from shardlib.serve import BatchCard

_REPORT_SECONDS = 5.0


def batch(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="Requests: JSON lines or Parquet, as of OpenAI.")
    ],
    model: Annotated[
        str,
        typer.Option(metavar="RUN[@STEP]", help="A run, or a folder or name of Hugging Face."),
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="Responses: JSON lines.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests; default: its directory's.")
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
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Bits do not depend on other rows (CPU, float32)."),
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option(help="Mesh; default: the run's mesh if it fits the devices, else auto."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer a file of requests; repeating the command resumes."""
    from shardlib.serve import answer_batch
    from shardlib.serve.open_model import open_model

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
