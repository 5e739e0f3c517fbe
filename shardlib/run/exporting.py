"""Export of a run's model as a folder in the format of Hugging Face."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from shardlib import hf
from shardlib.batch_kinds import DataSpec
from shardlib.data.images.fields import ImageFields
from shardlib.data.instruct.encode import tokenizer_folder
from shardlib.data.instruct.fields import ChatFields
from shardlib.data.instruct.template import TEMPLATE, ChatTemplate, find_template
from shardlib.data.tokenizer import SETTINGS, JsonTokenizer, Tokenizer, read_tokenizer
from shardlib.errors import CheckpointError, ConfigError, DataError, MissingExtraError, ModelError
from shardlib.finetune import merge, save_adapter
from shardlib.hf import pixels
from shardlib.hf.save import COPIED
from shardlib.run.config import RunConfig
from shardlib.run.published import TOKENIZER, check_agrees
from shardlib.run.restore_model import Notify, RestoredModel, restore_model
from shardlib.train.offload import fetch

_LOG = logging.getLogger(__name__)
_DTYPES = ("float32", "bfloat16", "float16")


def export(
    run_dir: str,
    folder: str,
    *,
    architecture: str | None = None,
    adapter: bool = False,
    dtype: str | None = None,
    mesh: str | None = None,
    step: int | None = None,
    notify: Notify | None = None,
) -> int:
    """Exports the model of a run, its tokenizer if it is a `tokenizer.json`, and the scale of
    pixels if it was trained on images.

    A tokenizer brings the files of its folder on chats and generation, if `model.init_from` is that
    folder, or else the token that ends a text. A run of chats brings its chat template.

    The exported parameters are those that the run evaluates: their moving average, if there is one.

    Args:
        run_dir: Directory of the run, which stays unchanged.
        folder: A folder that does not exist or is empty.
        architecture: See `shardlib.hf.save`; None for that of the folder `model.init_from`, whose
            other keys of config.json are then kept.
        adapter: Whether the adapters of a run with `finetune` are saved alone, in the format of
            PEFT; otherwise they are merged into the model.
        dtype: What the tensors are written in, such as bfloat16; None for that of the folder
            `model.init_from`, or else that of the run's parameters.
        mesh: The mesh; default: the run's mesh if it fits the devices, else `auto`.
        step: The checkpoint; default: the newest valid one of all places.
        notify: Called with each skipped checkpoint; by default it is logged.

    Returns:
        The exported step.

    Raises:
        ConfigError: If the directory holds no run.
        CheckpointError: If the run has no valid checkpoint, or none of `step`, or the folder is not
            empty.
        ModelError: If no architecture can express the model, adapters are asked for and the run
            trained none, or `dtype` is not a dtype of models or is given for adapters.
    """
    hf.refuse_full(Path(folder))
    if dtype is not None and (adapter or dtype not in _DTYPES):
        got = "given for adapters" if adapter else "not a dtype of models"
        raise ModelError(
            f"dtype={dtype!r} is {got}.\n"
            f"  Choose {', '.join(_DTYPES)} for a whole model, or leave it out."
        )
    restored = restore_model(run_dir, mesh=mesh, step=step, notify=notify)
    parts, state = restored.parts, restored.state
    params = fetch(parts.best_params(state))
    model = state.definition.module.merge(params, state.model_state, state.rng)
    if adapter:
        base = getattr(parts.config.model, "init_from", None) or ""
        save_adapter(model, folder, base=base, architecture=architecture)
        return int(state.step)
    _save(restored, merge(model), Path(folder), architecture, dtype)
    return int(state.step)


def _save(
    restored: RestoredModel,
    model: nnx.Module,
    folder: Path,
    architecture: str | None,
    dtype: str | None,
) -> None:
    """Saves a model without adapters, with what the folder that the run started from says of it."""
    parts, tokenizer, kept = restored.parts, restored.tokenizer, None
    found = _origin(parts.config)
    if found is not None and architecture in (None, found.architecture.name):
        architecture = found.architecture.name
        # What the folder says of classes and tokens holds for the same head and tokenizer alone.
        is_same = found.held is None and _has_tokenizer(found.folder, tokenizer)
        kept = _without_old_classes(found, model) if is_same else None
    if restored.state.step > 0:
        kept = {**(kept or {}), **_named_classes(parts.config.data.class_names(), model)}
    if found is not None and dtype is None:
        held = found.source.get("torch_dtype") or found.source.get("dtype")
        dtype = held if held in _DTYPES else None
    hf.save(model, folder, architecture=architecture, kept=kept, dtype=dtype)
    if jax.process_index() > 0:
        return
    origin = None if found is None else found.folder
    if isinstance(tokenizer, JsonTokenizer):
        template = _template_of(parts.config.data)
        _add_tokenizer(tokenizer, folder, origin, parts.family.generate is not None, template)
    _add_pixels(parts.config, parts.data, folder, origin)


def _without_old_classes(found: hf.Description, model: Any) -> dict[str, Any]:
    """Returns the contents of config.json, without the names of classes of a replaced head."""
    same = getattr(found.config, "num_classes", None) == getattr(model.config, "num_classes", None)
    names = () if same else ("id2label", "label2id")
    return {name: value for name, value in found.source.items() if name not in names}


def _named_classes(names: tuple[str, ...], model: Any) -> dict[str, Any]:
    """Returns the fields of config.json with the names of the classes that a run was trained on;
    a head may have more classes."""
    size = getattr(model.config, "num_classes", None) or 0
    if not names or len(names) > size:
        return {}
    named = [*names, *(f"LABEL_{number}" for number in range(len(names), size))]
    return {
        "id2label": {str(number): name for number, name in enumerate(named)},
        "label2id": {name: number for number, name in enumerate(named)},
    }


def _origin(config: RunConfig) -> hf.Description | None:
    """Returns the folder that a run started from; None without one, or if it is gone or another."""
    name = getattr(config.model, "init_from", None)
    if name is None:
        return None
    try:
        found = hf.describe(name, family=config.model.name)
        check_agrees(found, config.model)
    except (CheckpointError, ConfigError, ModelError) as error:
        _LOG.warning("the export has weights and sizes alone, nothing else of %s: %s", name, error)
        return None
    return found


def _add_pixels(config: RunConfig, data: DataSpec, folder: Path, origin: Path | None) -> None:
    """Writes how the data scale pixels, with the resizing of the folder that the model is from."""
    if not isinstance(config.data, ImageFields) or data.image_shape is None:
        return
    for name in (pixels.SHARED, pixels.OWN):
        if origin is not None and (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
    _, size, channels = data.image_shape
    pixels.write_pixels(
        folder,
        mean=config.data.mean,
        std=config.data.std,
        size=size,
        channels=channels,
        crop=config.data.center_crop,
    )


def _template_of(data: Any) -> ChatTemplate | None:
    """Returns the chat template that a run was trained with; None without one, or if it is gone."""
    if not isinstance(data, ChatFields):
        return None
    try:
        return find_template(tokenizer_folder(data), data.template)
    except (DataError, MissingExtraError) as error:
        _LOG.warning("the export lacks the chat template of the run: %s", error)
        return None


def _add_tokenizer(
    tokenizer: JsonTokenizer,
    folder: Path,
    origin: Path | None,
    generates: bool,
    template: ChatTemplate | None,
) -> None:
    """Writes a tokenizer, with what its own folder says of chats and generation, or else with the
    token that ends a text, and with the chat template of the run."""
    tokenizer.save(folder / TOKENIZER)
    if origin is not None and _has_tokenizer(origin, tokenizer):
        first = origin / TOKENIZER
        for file in map(first.with_name, COPIED):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    else:
        said = dict(template.special_tokens) if template else {}
        said |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_of_text}
        (folder / SETTINGS).write_text(json.dumps(said, indent=2) + "\n")
        if generates:
            ends = {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
            (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    if template is not None:
        (folder / TEMPLATE).write_text(template.source, encoding="utf-8")


def _has_tokenizer(folder: Path, tokenizer: Tokenizer | None) -> bool:
    """Returns whether a folder has a tokenizer, with the same end of a text."""
    file = folder / TOKENIZER
    if not isinstance(tokenizer, JsonTokenizer) or not file.is_file():
        return tokenizer is None
    try:
        return read_tokenizer(file).fingerprint == tokenizer.fingerprint
    except DataError:  # The run has a token that its folder does not name, or another file.
        return False
