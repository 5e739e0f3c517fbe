"""A run or a Hugging Face folder, opened to answer requests."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from shardlib.engine import Engine
from shardlib.errors import ConfigError
from shardlib.evaluation import TextModel
from shardlib.finetune import load_adapter
from shardlib.functional.quantized import check_bits
from shardlib.hf.pooling import TextPooling
from shardlib.registry import ModelFamily
from shardlib.run.evaluating import text_model
from shardlib.run.served_texts import ServedTexts
from shardlib.serve.bodies import Speaker
from shardlib.serve.forced_calls import form_of
from shardlib.sharding.constrain import Scope, use


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model that answers requests, as the engine takes it."""

    text_model: TextModel
    tokenizer: ServedTexts

    @property
    def model(self) -> nnx.Module:
        return self.text_model.model

    @property
    def config(self) -> Any:
        return self.text_model.model.config  # type: ignore[attr-defined]

    @property
    def family(self) -> ModelFamily:
        return self.text_model.family

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return (self.text_model.tokenizer.eot, *sorted(self.text_model.ends))

    @property
    def scope(self) -> Scope | None:
        return self.text_model.scope

    @property
    def pooling(self) -> TextPooling | None:
        return self.text_model.pooling


def open_model(
    source: str,
    *,
    mesh: str | None = None,
    step: int | None = None,
    name: str | None = None,
    notify: Callable[[str], None] | None = None,
    adapters: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[Engine, Speaker]:
    """Returns an engine for a run or a Hugging Face folder, and the model as it answers.

    Args:
        source: Directory of a run, or a folder or hub name for `hf.load`.
        mesh: The mesh; default: the run's mesh if it fits the devices, else `auto`.
        step: The checkpoint of a run; default: the newest valid one of all places.
        name: The name of the model in requests; default: that of the directory.
        notify: Called with each skipped checkpoint; by default it is logged.
        adapters: Folders of adapters in the format of PEFT, by their names in requests.
        options: Arguments of `Engine`.

    Raises:
        ConfigError: If the directory holds no run, or there are several processes.
        CheckpointError: If the checkpoint, the folder or an adapter cannot be read.
        ModelError: If the engine does not run the model or an adapter, or options do not fit.
    """
    name, folders = name or Path(source).name, adapters or {}
    _check_adapters(name, folders)
    check_bits(weights=options.get("weights"), cache=options.get("cache"))
    read = text_model(source, mesh=mesh, step=step, notify=notify, is_served=True)
    texts = ServedTexts.of(read)
    opened = Opened(read, texts)
    if jax.process_count() > 1:
        raise ConfigError(
            f"{jax.process_count()} processes would each answer the same requests.\n"
            "  Run the command as one process, or use sl.Engine in each of them."
        )
    scope = opened.scope
    with contextlib.nullcontext() if scope is None else use(scope.mesh, scope.rules):
        given = {
            one: load_adapter(read.model, folder, architecture=read.architecture)
            for one, folder in folders.items()
        }
    engine = Engine(opened, adapters=given, **options)
    speaker = Speaker(
        name,
        lambda ids: texts.decode(list(ids)),
        texts.chat,
        lambda: form_of(texts.template.source),
        tuple(folders),
    )
    return engine, speaker


def _check_adapters(name: str, folders: Mapping[str, str]) -> None:
    """Raises `ConfigError` for adapters that cannot be read or named."""
    if name in folders:
        raise ConfigError(f"the model and an adapter are called {name}.\n  Rename the adapter.")
    missing = [one for one in folders.values() if not (Path(one) / "adapter_config.json").exists()]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} has no adapter_config.json.\n"
            "  Give a folder that save_pretrained of PEFT or sl.finetune.save_adapter wrote."
        )
