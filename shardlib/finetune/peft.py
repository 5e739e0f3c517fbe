"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

The names and the layout of the factors follow from the table of tensors of the architecture: of a
projection `[out, in]` of theirs, `lora_A` is `[rank, in]` and `lora_B` is `[out, rank]`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from shardlib.errors import CheckpointError, ModelError
from shardlib.finetune.lora import Adapted, adapters, lora
from shardlib.functional import functional
from shardlib.functional.projections import axes_of, num_dims, projections
from shardlib.hf.architecture import Architecture, described_as
from shardlib.hf.load import parameters, placements, read_parameters
from shardlib.hf.loaded import Loaded
from shardlib.hf.new_folder import refuse_full
from shardlib.hf.safetensors import Tensors
from shardlib.hf.save import arrays_of, write_folder
from shardlib.hf.tensor_table import Dim, TensorRow, TensorTable
from shardlib.sharding.constrain import active

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

# What the format can say beyond plain LoRA, and the values that say nothing.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
    # Others change the base, too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


def save_adapter(
    source: Any, folder: str | Path, *, base: str = "", architecture: str | None = None
) -> None:
    """Saves the adapters of a model for `peft.PeftModel.from_pretrained`.

    On several processes all must call it, and the first one writes.

    Args:
        source: A training state, or a model from `lora` of a family, with its config as `config`.
        folder: A folder that does not exist or is empty.
        base: The folder or hub name of the base model, which PEFT loads by it.
        architecture: See `sl.hf.save`.

    Raises:
        CheckpointError: If the folder is not empty, or cannot be written.
        ModelError: If the model has no adapters, no architecture can express it, or the format has
            no name for an adapter.
    """
    folder, model = Path(folder).resolve(), getattr(source, "model", source)
    refuse_full(folder)
    found = adapters(model)
    if not found:
        raise ModelError(
            "the model has no adapters.\n"
            "  Make it with sl.finetune.lora, by `finetune` in a config, or save the whole model."
        )
    described = described_as(model, None, architecture)
    one = _refuse_mixed(found)
    dora, bases = one.lora_magnitude is not None, {path: a.base for path, a in found.items()}
    rows = _rows(described, model, bases, dora=dora)
    layout = TensorTable(rows, parameters(functional(model, wrt=nnx.LoRAParam)))
    rank = one.lora_a[...].shape[-1]
    causal = described.name.endswith(("ForCausalLM", "LMHeadModel"))
    first = {row.theirs for row in rows if row.ours.endswith("lora_a")}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": one.scale * rank,
        "lora_dropout": 0.0 if one.dropout is None else one.dropout.rate,
        "use_dora": one.lora_magnitude is not None,
        "bias": "none",
        "fan_in_fan_out": any(_is_transposed(described, model, path) for path in found),
        "target_modules": sorted(map(_module, first)),
        "inference_mode": True,
    }
    arrays = arrays_of(model, nnx.LoRAParam)
    write_folder(folder, layout, arrays, CONFIG, config, single=TENSORS)


def _refuse_mixed(found: Mapping[str, Adapted]) -> Adapted:
    """Returns one of the adapters; the config has one rank, one alpha and one kind for all."""
    kinds: dict[str, str] = {}
    for path, one in found.items():
        rank, dora = one.lora_a.shape[-1], one.lora_magnitude is not None
        kinds.setdefault(f"rank {rank}, alpha {one.scale * rank:g}, dora {dora}", path)
    if len(kinds) > 1:
        raise ModelError(
            "the adapters differ:\n"
            + "".join(f"  {path}: {kind}.\n" for kind, path in kinds.items())
            + "  Save the merged model, or give all projections equal adapters."
        )
    return next(iter(found.values()))


def load_adapter(model: Any, folder: str | Path, *, architecture: str | None = None) -> Any:
    """Returns a model with the adapters of a folder, which shares its arrays with `model`.

    Under `sl.use(mesh, rules)` the factors are placed as the rules say.

    Args:
        model: The base: the result of `sl.hf.load`, or a model of a family.
        folder: A folder with `adapter_config.json` and `adapter_model.safetensors`.
        architecture: See `sl.hf.save`.

    Raises:
        CheckpointError: If files are missing or malformed, the config asks for more than plain
            LoRA or DoRA, or tensors are missing, unknown or of another shape.
        ModelError: If the format has no name for an adapter.
    """
    folder = Path(folder)
    loaded = model if isinstance(model, Loaded) else None
    model = getattr(model, "model", model)
    config = _read_config(folder)
    described = described_as(model, loaded, architecture)
    tensors = Tensors(folder, {TENSORS: []})
    targets = _targets(described, model, tensors)
    rank, alpha = config["r"], float(config["lora_alpha"])
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)
    if not targets:
        raise CheckpointError(
            f"{folder / TENSORS} holds no adapter of this model.\n"
            "  Load the base model that it was trained on."
        )
    dora, dropout = bool(config.get("use_dora")), config.get("lora_dropout") or 0.0
    options: Any = {"targets": tuple(targets), "dropout": dropout, "dora": dora}
    made = lora(model, rank=rank, alpha=alpha, rngs=nnx.Rngs(0), **options)
    module = functional(made, wrt=nnx.LoRAParam)
    layout = TensorTable(_rows(described, made, targets, dora=dora), parameters(module))
    _check(layout, tensors, folder)
    names = {name: name for name, _, _ in layout.tensors()}
    params = read_parameters(layout, tensors, names, placements(module, active()))
    for path, array in params.items():
        *outer, name = path.split("/")
        adapter: Any = adapters(made)["/".join(outer)]
        variable = getattr(adapter, name)
        setattr(adapter, name, variable.replace(array))
    return made


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} cannot be read: {error!r}.\n"
            "  Give a folder that PEFT's save_pretrained wrote."
        ) from None
    faults = [
        f"{name} is {config[name]!r}; supported: {known[0]!r}."
        for name, known in _PLAIN.items()
        if config.get(name, known[0]) not in known
    ]
    if type(rank) is not int or rank < 1:
        faults.append(f"r is {rank!r}; it must be a whole number from 1.")
    dropout = config.get("lora_dropout") or 0.0
    if type(dropout) not in (int, float) or not 0.0 <= dropout < 1.0:
        faults.append(f"lora_dropout is {dropout!r}; it must be a number from 0 and below 1.")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        faults.append(f"lora_alpha is {alpha!r}; it must be a number greater than 0.")
    if faults:
        raise CheckpointError(
            f"{folder / CONFIG} asks for more than LoRA or DoRA:\n  "
            + "\n  ".join(faults)
            + "\n  Merge the adapter with PEFT, and load the merged model."
        )
    return config


def _targets(described: Architecture, model: Any, tensors: Tensors) -> dict[str, Any]:
    """Returns the projections of which the tensors hold factors, by path."""
    found = {}
    modules = {_module(name) for name in tensors}
    for path, base in projections(model).items():
        row = _row(described, model, path)
        if row is not None and _module(_PREFIX + row.theirs.removesuffix("weight")) in modules:
            found[path] = base
    return found


def _row(described: Architecture, model: Any, path: str) -> TensorRow | None:
    rows = [row for row in described.table(model.config) if row.ours == f"{path}/kernel"]
    return rows[-1] if rows else None


def _rows(
    described: Architecture, model: Any, found: Mapping[str, Any], *, dora: bool
) -> list[TensorRow]:
    """Returns the rows of the factors of each adapter, and of the magnitudes of DoRA."""
    rows, faults = [], []
    for path, base in found.items():
        row = _row(described, model, path)
        inputs, outputs = _dims(row, base)
        if row is None or not inputs or not outputs:
            faults.append(f"{path}: PEFT has no name for its factors.")
            continue
        name = _PREFIX + row.theirs.removesuffix("weight")
        rank = Dim(("lora_rank",))
        rows.append(TensorRow(f"{path}/lora_a", f"{name}lora_A.weight", (rank, *inputs)))
        rows.append(TensorRow(f"{path}/lora_b", f"{name}lora_B.weight", (*outputs, rank)))
        if dora:
            magnitude = f"{name}lora_magnitude_vector"
            rows.append(TensorRow(f"{path}/lora_magnitude", magnitude, tuple(outputs)))
    if faults:
        raise ModelError(
            f"adapters of {described.name} that PEFT's format cannot express:\n  "
            + "\n  ".join(faults)
            + "\n  Leave out projections that the checkpoint joins in one tensor, or save the "
            "merged model."
        )
    return rows


def _dims(row: TensorRow | None, base: Any) -> tuple[list[Dim], list[Dim]]:
    """Returns the dims of inputs and of outputs of a tensor; none if it joins several kernels."""
    if row is None or any(dim.inner is not None for dim in row.dims):
        return [], []
    outputs = set(axes_of(base.kernel)[-num_dims(base)[1] :])
    of_outputs = [dim for dim in row.dims if outputs.issuperset(dim.outer)]
    return [dim for dim in row.dims if dim not in of_outputs], of_outputs


def _is_transposed(described: Architecture, model: Any, path: str) -> bool:
    """Whether a tensor has its inputs first, as in GPT-2."""
    row = _row(described, model, path)
    inputs, _ = _dims(row, adapters(model)[path].base)
    return row is not None and row.dims[0] in inputs


def _module(name: str) -> str:
    """Returns the last parts of the name of a module that tell it from others of its layer."""
    parts = name.removeprefix(_PREFIX).split(".lora_")[0].rstrip(".").split(".")
    last = [part for part in parts[-2:] if not part.isdecimal() and "{" not in part]
    return ".".join(last)


def _check(layout: TensorTable, tensors: Tensors, folder: Path) -> None:
    expected = {name: shape for name, shape, _ in layout.tensors()}
    faults = [f"{name} is missing." for name in expected if name not in tensors]
    faults += [f"{name} is not a factor of this model." for name in _absent(tensors, expected)]
    faults += [
        f"{name} has shape {tensors.entries[name].shape}, expected {shape}."
        for name, shape in expected.items()
        if name in tensors and tensors.entries[name].shape != shape
    ]
    if faults:
        raise CheckpointError(
            f"the tensors of {folder} do not fit the model:\n  "
            + "\n  ".join(sorted(faults))
            + "\n  Load the base model that the adapter was trained on. Merge adapters of some "
            "layers alone or of embeddings with PEFT.\n  Save adapters of lm_head with "
            "save_embedding_layers=False."
        )


def _absent(names: Iterable[str], known: Mapping[str, Any]) -> list[str]:
    return [name for name in names if name not in known]
