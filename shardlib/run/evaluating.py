"""Evaluation of a checkpoint: metrics of its held-out data, and a model for tasks."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

from shardlib import hf
from shardlib.data import read_tokenizer
from shardlib.data.instruct.encode import tokenizer_folder
from shardlib.data.instruct.fields import ChatFields
from shardlib.data.instruct.template import find_template
from shardlib.data.prefetch import Prefetcher
from shardlib.data.tokenizer import JsonTokenizer
from shardlib.engine.encoder import said_of
from shardlib.errors import ConfigError, ModelError
from shardlib.evaluation import TextModel
from shardlib.mesh import make_mesh
from shardlib.registry import TEXT
from shardlib.rules import STANDARD
from shardlib.run.restore_model import restore_model
from shardlib.run.setup import open_source
from shardlib.runtime import distributed
from shardlib.sharding.constrain import use
from shardlib.train.evaluate import evaluate


def evaluate_run(
    run_dir: str,
    *,
    mesh: str | None = None,
    step: int | None = None,
    notify: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """Returns the metrics of a checkpoint over the held-out data of its run.

    They are the metrics that the run reports. For text `perplexity` is added, the exponential of
    `nll_nats`, the mean negative log-probability of a token; `bits_per_byte` is the sum of the
    negative log2-probabilities over the bytes of the text. Arguments are as in `restore_model`.

    Raises:
        ConfigError: If the directory holds no run.
        CheckpointError: If the run has no valid checkpoint, or none of `step`.
        DataError: If the data is missing, or nothing of it is held out.
    """
    restored = restore_model(run_dir, mesh=mesh, step=step, notify=notify)
    parts = restored.parts
    source = open_source(parts.config, "eval")
    with Prefetcher(source, parts.shardings(source)) as batches:
        found = evaluate(parts.eval_step(), restored.state, batches, score=source.score)
    if "nll_nats" in found:
        found["perplexity"] = math.exp(found["nll_nats"])
    return found


def text_model(
    source: str,
    *,
    mesh: str | None = None,
    step: int | None = None,
    rows: int = 32,
    notify: Callable[[str], None] | None = None,
    is_served: bool = False,
) -> TextModel:
    """Returns the language model of a run, or of a Hugging Face folder.

    Args:
        source: Directory of a run, or a folder or hub name for `hf.load`.
        mesh: The mesh; default: the run's mesh if it fits the devices, else `auto`.
        step: The checkpoint of a run; default: the newest valid one of all places.
        rows: Most rows that are computed at once; rounded up to what the mesh divides.
        notify: Called with each skipped checkpoint; by default it is logged.
        is_served: Whether models that the engine runs, but that do not continue texts, are allowed.

    Raises:
        ConfigError: If the directory holds no run.
        CheckpointError: If the checkpoint or the folder cannot be read.
        ModelError: If the model does not continue texts, has no tokenizer, or its longest text is
            unknown.
    """
    folder = Path(source)
    if (folder / "config.yaml").exists():
        model = model_of_run(source, mesh=mesh, step=step, notify=notify)
    elif not (folder / "config.json").exists() and (folder.exists() or "/" not in source):
        raise ConfigError(
            f"{source} is neither the directory of a run nor a folder with a config.json.\n"
            "  Give one of them, or the name of a model on the hub, such as org/name."
        )
    elif step is not None:
        raise ConfigError(f"{source} holds no run, so it has no step {step}.\n  Leave out @{step}.")
    else:
        model = _of_folder(source, mesh)
    if not is_served:
        model.check_continues()
    return dataclasses.replace(model, batch=rows)


def model_of_run(
    run_dir: str,
    *,
    mesh: str | None = None,
    step: int | None = None,
    notify: Callable[[str], None] | None = None,
) -> TextModel:
    """Returns the language model of a run; takes and raises what `text_model` does."""
    restored = restore_model(run_dir, mesh=mesh, step=step, notify=notify, of_text=True)
    parts, tokenizer = restored.parts, restored.tokenizer
    assert tokenizer is not None, "restore_model refuses models of other data"
    longest = getattr(parts.config.model, "max_positions", None) or parts.data.sequence_length
    assert longest is not None, "rows of text have a length"
    data = parts.config.data
    template = None
    if isinstance(data, ChatFields):
        template = functools.partial(find_template, tokenizer_folder(data), data.template)
    # A published model has read most of its texts as its tokenizer's file frames them.
    frames = getattr(parts.config.model, "init_from", None) is not None
    first = tokenizer.framed([""])[0].ids if isinstance(tokenizer, JsonTokenizer) and frames else []
    return TextModel(
        restored.model(),
        parts.family,
        tokenizer,
        parts.scope,
        longest,
        first[0] if first else tokenizer.eot,
        framing="file" if frames else "prefix",
        template=template,
        data=data if data.gives != TEXT.name else None,
    )


def _of_folder(source: str, mesh: str | None) -> TextModel:
    distributed.initialize()
    # What is missing is reported before the weights are read.
    found = hf.describe(source, weights=True)
    folder, said = found.folder, found.source
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(
            f"{folder} has no tokenizer.json, so it has no texts.\n"
            "  Save its fast tokenizer there with save_pretrained of transformers."
        )
    longest = getattr(found.config, "max_positions", None)
    longest = next((said[k] for k in _LENGTHS if isinstance(said.get(k), int)), longest)
    if longest is None and found.family.encoding is None:
        raise ModelError(
            f"{folder / 'config.json'} does not say how long a text may be.\n"
            "  Add max_position_embeddings to it."
        )
    tokenizer, first = read_tokenizer(file), said.get("bos_token_id")
    ends = frozenset(found.end_tokens)
    with use(make_mesh(mesh or "auto"), STANDARD):
        loaded = hf.load(folder)
    return TextModel(
        loaded.model,
        found.family,
        tokenizer,
        loaded.scope,
        longest or 0,
        first if isinstance(first, int) else tokenizer.eot,
        framing="file",
        ends=ends,
        architecture=next(iter(said.get("architectures") or ()), None),
        template=functools.partial(find_template, folder, None),
        pooling=said_of(loaded),
    )


_LENGTHS = ("max_position_embeddings", "n_positions")
