"""The root config of a run, assembled from the configs of its components."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from shardlib.checkpoint import CheckpointConfig
from shardlib.config import Variants, configclass
from shardlib.data import (
    CaptionedImageData,
    ChatData,
    DataConfig,
    ImageData,
    InstructionData,
    LabeledTextData,
    LatentData,
    PairData,
    QuestionData,
    SpanData,
    TextData,
)
from shardlib.errors import ConfigError, MeshError, did_you_mean
from shardlib.finetune.lora import LoraConfig
from shardlib.import_paths import imported
from shardlib.mesh import MeshConfig
from shardlib.optim.build import OptimizerConfig
from shardlib.registry import families, family
from shardlib.rules import PRESETS, AxisRules, RulesConfig, preset
from shardlib.runtime.watchdog import WatchdogConfig
from shardlib.train.config import EvalConfig, TrainConfig
from shardlib.train.reduce.reduction import ReductionConfig

if TYPE_CHECKING:
    from shardlib.plan.mixed_result import MixedPlans
    from shardlib.plan.request import Question
    from shardlib.plan.result import Plans
    from shardlib.registry import DataSpec

AUTO = "auto"

DATA_CONFIGS: Mapping[str, type[DataConfig]] = {
    "text": TextData,
    "images": ImageData,
    "captioned_images": CaptionedImageData,
    "latents": LatentData,
    "instructions": InstructionData,
    "chat": ChatData,
    "labeled_text": LabeledTextData,
    "questions": QuestionData,
    "pairs": PairData,
    "span_corruption": SpanData,
}
"""The built-in data sources."""


def _model_configs() -> Mapping[str, type]:
    return {name: family.config for name, family in families().items()}


def _model_config(path: str) -> type:
    return family(path).config


def _data_config(path: str) -> type:
    cls = imported(path, "a configclass that inherits shardlib.data.DataConfig", _is_data_config)
    if missing := ", ".join(sorted(cls.__abstractmethods__)):
        raise ConfigError(f"{path} lacks what a run calls: {missing}.\n  Define it in the class.")
    return cls


def _is_data_config(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, DataConfig)


@configclass
class RunConfig:
    """One run: everything that determines its result, and the place it is stored."""

    named: ClassVar[Mapping[str, str]] = {"model": "size"}
    """Sections for which a text may stand, with the key that it is the value of."""

    run_dir: str = "runs/default"
    """Directory of the run: resolved config, metrics, checkpoints. Repeating the command resumes
    the run in it."""
    seed: int = 0
    """Seed of the parameters, dropout and data order, from 0 to 2**32 - 1, with the same result on
    every mesh."""
    model: Annotated[Any, Variants(_model_configs, default="transformer", by_path=_model_config)]
    """The model: a family by name or import path, and its sizes. A published size such as
    `llama3-8b`, as text or as the key `size`, gives the keys that are left out."""
    data: Annotated[
        Any, Variants(lambda: DATA_CONFIGS, key="kind", default="text", by_path=_data_config)
    ] = TextData()
    """The training data."""
    finetune: LoraConfig | None = None
    """Low-rank adapters (LoRA), trained in place of the parameters, which are frozen; null to train
    all."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its schedule."""
    train: TrainConfig = TrainConfig()
    """The training loop."""
    mesh: str | dict[str, int | str] = AUTO
    """Mesh axes and their sizes, such as `data=2,fsdp=-1`, or a mapping. -1 takes the remaining
    devices; `data=4x8` is 4 over the slow network times 8 over the fast one. `auto` chooses."""
    rules: str | RulesConfig = "standard"
    """Mapping of logical axes to mesh axes: a preset (data, fsdp, standard, sequence, zero1,
    zero2 or serve), changes to one, or `auto`, which finds rules for the model."""
    precision: Literal["f32", "bf16", "bf16_params", "fp8", "int8"] = "f32"
    """f32; bf16: computes in bfloat16 with parameters in float32; bf16_params: all in bfloat16
    except the routers of experts; fp8 (GPUs) and int8 (TPUs): bf16, but linear layers multiply in
    8 bits, except embeddings, heads and experts."""
    deterministic: bool = False
    """Whether repeated runs give identical bits on GPUs too, where this costs speed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """Time that each phase may take without progress before the process is ended."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out data."""

    @staticmethod
    def implied(given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values of keys that others imply: the model's by its size or its folder, and what
        the folder says of data.

        Raises:
            ConfigError: If the size is unknown, or keys of the model contradict its folder.
            CheckpointError: If the folder or a file of it cannot be read.
        """
        model, data = given.get("model"), given.get("data") or {}
        if not isinstance(model, Mapping) or not {"size", "init_from"} & model.keys():
            return {}
        from shardlib.run import published

        values: dict[str, Any] = {"model": published.implied(model)}
        if model.get("init_from") is not None and isinstance(data, Mapping):
            values["data"] = published.implied_data(
                {**values["model"], **model}, data, DATA_CONFIGS
            )
        return values

    @staticmethod
    def faults_of_fields(values: Mapping[str, Any]) -> list[str]:
        """Returns the faults of the directory, the seed, the mesh, the name of the rules and the
        rematerialisation."""
        faults = [] if values.get("run_dir", "unread") else ["run_dir must name a directory"]
        if not 0 <= (seed := values.get("seed", 0)) < 2**32:
            faults.append(f"seed must lie in [0, 2**32), not {seed}")
        if (mesh := values.get("mesh", AUTO)) != AUTO:
            try:
                MeshConfig.parse(mesh)
            except MeshError as error:
                faults.append(f"mesh: {error}")
        rules = values.get("rules")
        if isinstance(rules, str) and rules != AUTO and rules.lower() not in PRESETS:
            near = did_you_mean(rules.lower(), [*PRESETS, AUTO])
            known = f"Presets: {', '.join(PRESETS)}; {AUTO} finds rules for the model."
            faults.append(f"rules: no rules are called {rules!r}.{near}\n  {known}")
        if getattr(values.get("model"), "remat", None) == AUTO and rules != AUTO:
            faults.append(
                "model.remat: auto is chosen together with rules.\n"
                "  Set rules: auto, or choose a policy such as none, dots or full."
            )
        return faults

    def reduction(self) -> ReductionConfig:
        """Returns the reduction of gradients, with the outer degree of `data` from the mesh."""
        reduction = self.train.reduction
        if reduction == ReductionConfig() or reduction.outer is not None or self.mesh == AUTO:
            return reduction
        outer = [axis.outer for axis in MeshConfig.parse(self.mesh).axes if axis.name == "data"]
        return dataclasses.replace(reduction, outer=outer[0] if outer and outer[0] > 1 else None)

    @property
    def remat(self) -> str:
        """The rematerialisation of the model; `none` for a model without."""
        return getattr(self.model, "remat", "none")

    def with_remat(self, policy: str) -> "RunConfig":
        """Returns the config with another rematerialisation of its model.

        Raises:
            ConfigError: If the config of the model refuses it.
        """
        try:
            model = dataclasses.replace(self.model, remat=policy)
        except ValueError as error:
            raise ConfigError(f"model: {error}") from None
        return dataclasses.replace(self, model=model)

    def model_faults(self, data: "DataSpec") -> list[str]:
        """Returns the faults of the model with its data, if `none` stands for `model.remat: auto`.

        Raises:
            ConfigError: If the config of the model refuses `none`.
        """
        model = (self.with_remat("none") if self.remat == AUTO else self).model
        return family(model.name).faults(model, data)

    @property
    def staged_layers(self) -> int | None:
        """Layers that pipeline stages divide; None if the model's config does not say. Every stage
        holds the first, dense layers of a model with experts."""
        num_layers = getattr(self.model, "num_layers", None)
        dense = getattr(self.model, "num_dense_layers", 0)
        return None if num_layers is None else num_layers - dense

    def with_mesh(self, mesh: str) -> "RunConfig":
        """Returns the config with another mesh.

        Raises:
            MeshError: If the mesh is malformed.
        """
        if mesh != AUTO:
            MeshConfig.parse(mesh)
        return dataclasses.replace(self, mesh=mesh)

    def planned(self, question: "Question") -> "Plans | MixedPlans":
        """Returns the best plans of the run; see `shardlib.run.plans.planning.plan_run`."""
        from shardlib import run

        return run.plan_run(self, question)

    def served(self) -> "tuple[str, Any, DataSpec]":
        """Returns the name of the model, its config and its data, to plan how it is served."""
        from shardlib import run

        return run.served(self)

    @property
    def found_for(self) -> str | None:
        """The mesh that the rules were found for; None for other rules."""
        found = self.rules.found_for if isinstance(self.rules, RulesConfig) else None
        return found or None

    def with_open_rules(self) -> "RunConfig":
        """Returns the config with `rules: auto` in place of rules that a search has found."""
        return self if self.found_for is None else dataclasses.replace(self, rules=AUTO)

    def with_kept_rules(self) -> "RunConfig":
        """Returns the config with rules that a search has found as its own, and with their mesh if
        its mesh is `auto`."""
        if self.found_for is None:
            return self
        config = self.with_mesh(self.found_for) if self.mesh == AUTO else self
        rules = dataclasses.replace(cast(RulesConfig, self.rules), found_for=None)
        return dataclasses.replace(config, rules=rules)

    def axis_rules(self) -> AxisRules:
        """Returns the rules that `rules` describes, which a run that starts has resolved."""
        assert self.rules != AUTO
        return preset(self.rules) if isinstance(self.rules, str) else self.rules.build()


# Keys that a resumed run may change: its length, where and how it computes, what it writes and
# shows. All other keys decide the numbers. More microbatches draw other dropout masks and normalise
# fewer examples at a time, but a run that moves to fewer devices may need them.
_MAY_CHANGE = (
    "run_dir",
    "model.remat",
    "model.attention",
    "model.context",
    "model.loss_chunks",
    "model.moe.exchange",
    "model.moe.exchange_chunks",
    "train.steps",
    "train.global_batch",
    "train.microbatches",
    "train.pipeline",
    "train.reduction",
    "train.guards",
    "train.constrain",
    "train.allow_wrong_numbers",
    "train.compiler_options",
    "train.offload_optimizer",
    "train.log_every",
    "train.sample_every",
    "train.sample_prompt",
    "train.sample_length",
    "train.sample_temperature",
    "train.tensorboard",
    "train.loggers",
    "train.profile",
    "train.cpu_devices",
    "train.compilation_cache",
    "mesh",
    "rules",
    "checkpoint",
    "watchdog",
    "deterministic",
    "eval",
    "data.eval_steps",
    "data.threads",
)

# The state holds the window of values that these keys describe.
_MUST_STAY = ("train.guards.spike.metric", "train.guards.spike.window")


def check_resumable(saved: RunConfig, now: RunConfig, *, by_command: bool = False) -> None:
    """Raises `ConfigError`, naming each key, when `now` does not continue `saved`. `by_command`
    says that `shardlib train` with the run directory alone would continue it."""
    from shardlib.config import ABSENT, diff

    changes = [
        change
        for change in diff(saved, now)
        if change.path in _MUST_STAY
        or not any(change.path == key or change.path.startswith(f"{key}.") for key in _MAY_CHANGE)
    ]
    if changes:
        # Another model or kind of data has other keys, which follow from its name.
        shared = [c for c in changes if c.old is not ABSENT and c.new is not ABSENT]
        lines = [f"{c.path}: {c.old!r} in the run, {c.new!r} now" for c in shared or changes]
        raise ConfigError(
            f"{now.run_dir} holds a run with a different config:\n  "
            + "\n  ".join(lines)
            + "\n  Set run_dir to another directory, or give these keys their old values"
            + (f", as `shardlib train {now.run_dir}` does." if by_command else ".")
        )
