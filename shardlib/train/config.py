"""Configs of the training loop and of evaluation."""

from typing import Literal

from shardlib.config import configclass
from shardlib.pipeline.config import PipelineConfig
from shardlib.train.checked import unknown_codes
from shardlib.train.guards import GuardsConfig
from shardlib.train.local_sgd import LocalSGDConfig
from shardlib.train.reduction import ReductionConfig


@configclass
class TrainConfig:
    """How long, on how much, and what is shown meanwhile."""

    steps: int = 1000
    """Optimizer steps in all; a resumed run may be given more."""
    global_batch: int = 32
    """Sequences or images of one optimizer step, over all devices."""
    microbatches: int | Literal["auto"] = 1
    """Parts in which the batch of a step is computed, one after the other, to save memory; those
    of a pipeline. `auto`: the fewest whose step fits into the memory of a device."""
    pipeline: PipelineConfig = PipelineConfig()
    """The schedule of the stages, where the mesh has the axis `stage`."""
    reduction: ReductionConfig = ReductionConfig()
    """How gradients are summed over the mesh axis `data`."""
    local_sgd: LocalSGDConfig | None = None
    """Groups along the mesh axis `data` that train apart and agree now and then; null for none."""
    guards: GuardsConfig = GuardsConfig()
    """Which updates are refused, and when the run goes back to a checkpoint."""
    constrain: Literal["auto", "user"] = "auto"
    """Who decides where values of the loss lie, in training and evaluation. auto: shardlib, where
    the constraints of the model leave it open; user: XLA's partitioner."""
    allow_wrong_numbers: tuple[str, ...] = ()
    """Codes of faults of the compiler, such as SL205, with which a step runs all the same."""
    offload_optimizer: bool = False
    """Whether the optimizer state stays in the memory of the hosts between updates."""
    label_smoothing: float = 0.0
    """Probability mass spread evenly over all classes or tokens (Szegedy et al. 2016)."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax normaliser (Chowdhery et al. 2022, "PaLM")."""
    log_every: int = 10
    """Steps between two lines where the output is no terminal; metrics.jsonl has every step."""
    sample_every: int | None = None
    """Steps between two texts sampled from the model. Unset: none before the end."""
    sample_prompt: str = ""
    """What sampled texts start with."""
    sample_length: int = 128
    """Tokens of a sampled text. 0: none is sampled."""
    sample_temperature: float = 0.8
    """Sampling temperature; 0 takes the most likely token."""
    tensorboard: bool = False
    """Whether TensorBoard event files are written (extra `tensorboard`)."""
    cpu_devices: int | None = None
    """Virtual CPU devices over all processes, where there is no accelerator. Unset: one for each
    process, or what JAX_NUM_CPU_DEVICES says."""
    compilation_cache: str | None = "auto"
    """Directory in which compiled programs are kept between runs. `auto`: beside what is kept of
    the data, in SHARDLIB_CACHE or ~/.cache/shardlib. Null: none is kept."""

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least 1, not {getattr(self, name)}"
            for name in ("steps", "global_batch", "microbatches", "log_every")
            if getattr(self, name) != "auto" and getattr(self, name) < 1
        ]
        faults += unknown_codes(self.allow_wrong_numbers)
        if self.sample_every is not None and self.sample_every < 1:
            faults.append(f"sample_every must be at least 1, or null, not {self.sample_every}")
        if self.microbatches != "auto" and self.global_batch % max(self.microbatches, 1):
            faults.append(
                f"microbatches={self.microbatches} does not divide global_batch={self.global_batch}"
            )
        reduction = self.reduction
        if self.local_sgd is not None and reduction != ReductionConfig():
            faults.append(
                "local_sgd sums no gradients over data, but there is a reduction for them: leave "
                "one of them out; local_sgd.dtype says in what the groups' progress is sent"
            )
        shares = reduction.group_microbatches or reduction.group_seconds
        if self.microbatches == "auto" and (self.local_sgd is not None or shares is not None):
            faults.append(
                "microbatches=auto cannot be found for groups that train apart or take unequal "
                "shares: give a number"
            )
        if not 0 <= self.label_smoothing < 1:
            faults.append(f"label_smoothing must lie in [0, 1), not {self.label_smoothing}")
        faults += [
            f"{name} must not be negative, not {getattr(self, name)}"
            for name in ("z_loss", "sample_length", "sample_temperature")
            if getattr(self, name) < 0
        ]
        if faults:
            raise ValueError("; ".join(faults))


@configclass
class EvalConfig:
    """When the held-out data is evaluated; how much of it, `data.eval_steps` says."""

    every_steps: int | None = None
    """Steps between two evaluations. Unset: only after the last step. 0: never."""
    global_batch: int | None = None
    """Sequences or images of one evaluation batch. Unset: that of training."""

    def __post_init__(self) -> None:
        faults = []
        if self.every_steps is not None and self.every_steps < 0:
            faults.append(f"every_steps must not be negative, not {self.every_steps}")
        if self.global_batch is not None and self.global_batch < 1:
            faults.append(f"global_batch must be at least 1, not {self.global_batch}")
        if faults:
            raise ValueError("; ".join(faults))
