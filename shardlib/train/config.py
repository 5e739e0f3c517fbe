"""Configs of the training loop and of evaluation."""

import dataclasses
from typing import Annotated, Literal

from shardlib.config import ImportPath, configclass
from shardlib.log.loggers import unknown_loggers
from shardlib.log.step_profile import ProfileConfig
from shardlib.train.guards import GuardsConfig
from shardlib.train.local_sgd.outer import LocalSGDConfig
from shardlib.train.pipeline.config import PipelineConfig
from shardlib.train.program import unknown_codes
from shardlib.train.reduce.reduction import ReductionConfig

OWN_LOSS = ImportPath("a loss function")
"""Marks the import path of a loss, called as `shardlib.registry.ModelFamily.loss`."""


@configclass
class TrainConfig:
    """Length of the training run, batch sizes, parallelism options and logging."""

    steps: int = 1000
    """Total optimizer steps. A resumed run may be given more."""
    global_batch: int = 32
    """Sequences or images per optimizer step, over all devices."""
    microbatches: int | Literal["auto"] = 1
    """Microbatches per step, computed one after the other to save memory, or run by the stages of
    a pipeline. `auto`: the smallest number for which the step fits into device memory."""
    pipeline: PipelineConfig = PipelineConfig()
    """The pipeline schedule, used if the mesh has the axis `stage`."""
    reduction: ReductionConfig = ReductionConfig()
    """Reduction of gradients over the mesh axis `data`."""
    local_sgd: LocalSGDConfig | None = None
    """Groups along the mesh axis `data` that train separately and synchronize periodically. Null:
    disabled."""
    guards: GuardsConfig = GuardsConfig()
    """Conditions under which updates are skipped and the run rewinds to a checkpoint."""
    constrain: Literal["auto", "user"] = "auto"
    """The partitioner of the loss, in training and evaluation. auto: shardlib shards the values
    that the constraints of the model leave open. user: XLA's partitioner does."""
    allow_wrong_numbers: tuple[str, ...] = ()
    """Codes of compiler faults, such as SL205, that do not stop a step from running."""
    compiler_options: dict[str, bool | int | float | str | None] = dataclasses.field(
        default_factory=dict
    )
    """Options of XLA by name, for the programs of training and evaluation. They replace or complete
    the defaults of the platform, which `shardlib explain` lists. Null removes a default."""
    loss: Annotated[str, OWN_LOSS] | None = None
    """A loss of your own in place of the model's, `mypackage.mine:loss`, called as
    `loss(model, batch, rng, train=...)`, and with label_smoothing and z_loss if they are set."""
    offload_optimizer: bool = False
    """Whether the optimizer state stays in host memory between updates."""
    label_smoothing: float = 0.0
    """Probability mass spread evenly over all classes or tokens (Szegedy et al. 2016)."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax normaliser (Chowdhery et al. 2022, "PaLM")."""
    log_every: int = 10
    """Steps between log lines if the output is not a terminal. metrics.jsonl has every step."""
    sample_every: int | None = None
    """Steps between texts sampled from the model. Unset: only at the end."""
    sample_prompt: str = ""
    """Prompt of sampled texts."""
    sample_length: int = 128
    """Tokens of a sampled text. 0: no sampling."""
    sample_temperature: float = 0.8
    """Sampling temperature; 0 takes the most likely token."""
    tensorboard: bool = False
    """Whether TensorBoard event files are written: short for `tensorboard` in `loggers`."""
    loggers: tuple[str, ...] = ()
    """Receivers of the metrics, in addition to metrics.jsonl: tensorboard, wandb, mlflow (extras of
    these names), or a class of your own, as package.module:Name."""
    profile: ProfileConfig | None = None
    """Steps that are profiled into `profile` in the run's directory. Null: none."""
    cpu_devices: int | None = None
    """Virtual CPU devices over all processes, without an accelerator. Unset: the value of
    JAX_NUM_CPU_DEVICES, or one per process."""
    compilation_cache: str | None = "auto"
    """Directory of the compilation cache, kept between runs. `auto`: in SHARDLIB_CACHE or
    ~/.cache/shardlib, next to cached data. Null: no cache."""

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least 1, not {getattr(self, name)}"
            for name in ("steps", "global_batch", "microbatches", "log_every")
            if getattr(self, name) != "auto" and getattr(self, name) < 1
        ]
        if self.steps >= 2**31:
            faults.append(f"steps must be below 2**31, the limit of the counter, not {self.steps}")
        faults += unknown_codes(self.allow_wrong_numbers)
        faults += unknown_loggers(self.loggers)
        faults += [
            f"{name} must be at least 1, or null, not {value}"
            for name in ("sample_every", "cpu_devices")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.microbatches != "auto" and self.global_batch % max(self.microbatches, 1):
            faults.append(
                f"microbatches={self.microbatches} does not divide "
                f"global_batch={self.global_batch}: choose a number that does"
            )
        reduction = self.reduction
        if self.local_sgd is not None and reduction != ReductionConfig():
            faults.append(
                "local_sgd does not sum gradients over data, but reduction is set: leave one of "
                "them out; local_sgd.dtype sets the dtype in which groups send their progress"
            )
        shares = reduction.group_microbatches or reduction.group_seconds
        if self.microbatches == "auto" and (self.local_sgd is not None or shares is not None):
            faults.append(
                "microbatches=auto does not support local_sgd or groups with unequal shares: "
                "give a number"
            )
        if not 0 <= self.label_smoothing < 1:
            faults.append(f"label_smoothing must lie in [0, 1), not {self.label_smoothing}")
        faults += [
            f"{name} must be at least 0, not {getattr(self, name)}"
            for name in ("z_loss", "sample_length", "sample_temperature")
            if getattr(self, name) < 0
        ]
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def logger_names(self) -> tuple[str, ...]:
        """The loggers of `tensorboard` and `loggers`, each once."""
        return tuple(dict.fromkeys(("tensorboard",) * self.tensorboard + self.loggers))

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a resolved config; see `shardlib.run.resolve_auto`."""
        assert self.microbatches != "auto"
        return self.microbatches


@configclass
class EvalConfig:
    """Frequency and batch size of evaluation. `data.eval_steps` sets the number of batches."""

    every_steps: int | None = None
    """Steps between evaluations. Unset: only after the last step. 0: never."""
    global_batch: int | None = None
    """Sequences or images per evaluation batch. Unset: the training batch size."""

    def __post_init__(self) -> None:
        faults = []
        if self.every_steps is not None and self.every_steps < 0:
            faults.append(f"every_steps must be at least 0, not {self.every_steps}")
        if self.global_batch is not None and self.global_batch < 1:
            faults.append(f"global_batch must be at least 1, not {self.global_batch}")
        if faults:
            raise ValueError("; ".join(faults))
