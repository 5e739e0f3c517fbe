"""The parts of a run, built from its config; checks everything, allocates and writes nothing."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jaxtyping import PyTree

from shardlib.data import ArrangedSource, MapSource, Source, Tokenizer, open_data
from shardlib.functional.calls import updated
from shardlib.functional.precision import precision
from shardlib.hardware import Cluster
from shardlib.mesh import abstract_mesh, make_mesh, mesh_sizes
from shardlib.optim.build import Optimizer, build_optimizer
from shardlib.optim.ema import ema_params
from shardlib.registry import BatchKind, DataSpec, ModelFamily, family
from shardlib.run.checks import check_fit, check_rules_used, expected_spec
from shardlib.run.config import RunConfig
from shardlib.run.loss import loss_of
from shardlib.sharding.constrain import Scope, use
from shardlib.train.evaluate import EvalStep, make_eval_step
from shardlib.train.local_sgd.outer import LocalSGD, make_local_sgd
from shardlib.train.offload import offload_optimizer
from shardlib.train.pipeline.schedules import bubble_fraction
from shardlib.train.reduce.reduction import Reduction, plan_reduction
from shardlib.train.reduce.uneven import arranged_rows
from shardlib.train.state import TrainState, abstract_state
from shardlib.train.step import TrainStep, batch_shardings, make_train_step

Devices = Sequence[Any] | Cluster
"""Available devices, or a cluster that need not be present, for inspection only."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of a run. `abstract` is its state as shapes with shardings."""

    config: RunConfig
    recorded: RunConfig
    """The config for the run's directory: its mesh may be `auto`, to be decided anew by a run that
    resumes on other devices."""
    family: ModelFamily
    scope: Scope
    data: DataSpec
    optimizer: Optimizer
    abstract: TrainState
    decided: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Settings that the config left to the run, by name, with the reason."""

    @property
    def inputs(self) -> BatchKind:
        """The kind of batch that the model takes."""
        return self.family.inputs

    def loss(self, *, train: bool) -> Callable[[Any, Any, jax.Array], Any]:
        """Returns the loss function of training or of evaluation; see `loss_of`."""
        return loss_of(self.config, self.family, train=train)

    def choices(self) -> dict[str, str]:
        """Returns the settings that were chosen for the run, by name, with the reason."""
        if self.family.choices is None:
            return dict(self.decided)
        dtype = precision(self.config.precision).compute
        with use(self.scope.mesh, self.scope.rules):
            chosen = self.family.choices(self.config.model, self.data, dtype=dtype)
        return {**chosen, **self._pipeline(), **self.decided}

    def _pipeline(self) -> dict[str, str]:
        train, stages = self.config.train, mesh_sizes(self.scope.mesh).get("stage", 1)
        if stages == 1:
            return {}
        pipeline, count = train.pipeline, train.num_microbatches
        idle = bubble_fraction(
            stages=stages,
            microbatches=count,
            chunks=pipeline.chunks,
            num_layers=self.config.staged_layers,
            before=getattr(self.config.model, "num_dense_layers", 0),
        )
        text = f"{pipeline.schedule}, {count} microbatches over {stages} stages: {idle:.0%} idle"
        return {"pipeline": text}

    def best_params(self, state: TrainState) -> PyTree:
        """Returns the parameters to evaluate: their moving average, if there is one."""
        averaged = ema_params(state.opt_state)
        return state.params if averaged is None else averaged

    def units_per_step(self) -> int:
        """Returns the units of throughput, such as tokens, of one optimizer step."""
        return self.config.train.global_batch * self.inputs.units_per_example(self.data)

    def train_step(self, microbatches: int | None = None) -> TrainStep | LocalSGD:
        """Returns the training step, with another number of microbatches if one is given."""
        train = self.config.train
        step = make_train_step(
            self.loss(train=True),
            microbatches=microbatches or train.num_microbatches,
            precision=self.config.precision,
            schedule=self.optimizer.schedule,
            batch_axes=self.inputs.axes_for(self.data),
            pipeline=train.pipeline,
            reduction=self.config.reduction(),
            arranged=True,
            guards=train.guards,
            constrain=train.constrain,
            allow_wrong_numbers=train.allow_wrong_numbers,
            compiler_options=train.compiler_options,
        )
        return step if train.local_sgd is None else make_local_sgd(step, train.local_sgd)

    def eval_step(self) -> EvalStep:
        """Returns the evaluation step."""
        train = self.config.train
        return make_eval_step(
            self.loss(train=False),
            precision=self.config.precision,
            batch_axes=self.inputs.axes_for(self.data),
            params_of=self.best_params,
            pipeline=train.pipeline,
            constrain=train.constrain,
            allow_wrong_numbers=train.allow_wrong_numbers,
            compiler_options=train.compiler_options,
        )

    def saved_state(self) -> Any:
        """Returns the trained and saved state as shapes with shardings: the state of one model, or
        of the groups of local SGD."""
        step = self.train_step()
        return step.init(self.abstract) if isinstance(step, LocalSGD) else self.abstract

    def rows(self, source: MapSource) -> Source:
        """Returns training data with its rows in the order that the step expects."""
        reduction = self.reduction
        if reduction is None or reduction.even:
            return source
        per_microbatch = source.global_batch // sum(reduction.counts)
        return ArrangedSource(source, arranged_rows(reduction.counts, per_microbatch))

    def arranged(self, batch: PyTree) -> PyTree:
        """Returns the shapes of a batch with its rows in the order that the step expects."""
        reduction = self.reduction
        if reduction is None or reduction.even:
            return batch
        return jax.eval_shape(reduction.arrange, batch)

    @functools.cached_property
    def reduction(self) -> Reduction | None:
        """The configured reduction of gradients, or None.

        Raises:
            ConfigError: If the config does not fit the mesh.
            RuleError: If parameters are split over `data`.
            ModelError: If the model updates its own state.
        """
        train, definition = self.config.train, self.abstract.definition
        return plan_reduction(
            self.config.reduction(),
            self.scope.mesh,
            microbatches=train.num_microbatches,
            params=definition.params,
            model_state=updated(definition.module, self.abstract.model_state),
        )

    def shardings(self, source: Source) -> dict[str, NamedSharding]:
        """Returns the sharding of each array of a batch."""
        return batch_shardings(source.element_spec(), self.scope, self.inputs.axes_for(self.data))


def open_source(config: RunConfig, split: Literal["train", "eval"]) -> MapSource:
    """Opens the training data or the held-out data.

    Raises:
        DataError: If the data is missing, empty or malformed.
    """
    batch = config.train.global_batch
    if split == "eval":
        batch = config.eval.global_batch or batch
    return open_data(config.data, global_batch=batch, seed=config.seed, split=split)


def data_of(config: RunConfig) -> tuple[DataSpec, Tokenizer | None]:
    """Returns the data spec of the model, and the tokenizer if it is available. The data is read
    only if the config leaves to it what the model needs.

    Raises:
        DataError: If data that has to be read is missing or malformed.
    """
    spec, data = expected_spec(config), config.data
    faults = config.model_faults(spec)
    tokenizer = data.find_tokenizer() or (data.find_tokenizer(read=True) if faults else None)
    if tokenizer is not None:
        return data.with_tokenizer(spec, tokenizer), tokenizer
    return open_source(config, "train").spec if faults else spec, None


def make_scope(config: RunConfig, devices: Devices) -> Scope:
    """Returns the mesh and rules of a run.

    Raises:
        MeshError: If the mesh does not fit the devices.
        RuleError: If a rule names a mesh axis that does not exist.
    """
    rules = config.axis_rules()
    if isinstance(devices, Cluster):
        mesh = _abstract(config, devices)
    else:
        mesh = make_mesh(config.mesh, devices=devices)
    rules.check(mesh)
    return Scope(mesh, rules)  # type: ignore[arg-type]


def _abstract(config: RunConfig, cluster: Cluster) -> AbstractMesh:
    kind = cluster.chip.device_kinds[0] if cluster.chip else cluster.platform
    device = AbstractDevice(kind, num_cores=None, platform=cluster.platform)
    mesh = abstract_mesh(config.mesh, cluster.num_devices)
    return mesh.update(abstract_device=device)


def setup(config: RunConfig, data: DataSpec, scope: Scope) -> Setup:
    """Checks a config against its data and returns the parts of the run.

    Raises:
        ConfigError: If model and data do not fit each other.
        RuleError: If tensors cannot be placed (the message names them all), or the config has rules
            that match no parameter.
    """
    chosen = family(config.model.name)
    check_fit(config, chosen, data)
    optimizer = build_optimizer(
        config.optimizer, steps=config.train.steps, global_batch=config.train.global_batch
    )
    abstract = abstract_state(
        model_maker(config, chosen, data),
        optimizer.transform,
        wrt=trained(config),
        precision=config.precision,
        guards=config.train.guards,
        mesh=scope.mesh,
        rules=scope.rules,
    )
    check_rules_used(config, abstract.definition)
    if config.train.offload_optimizer:
        abstract = offload_optimizer(abstract)
    return Setup(config, config, chosen, scope, data, optimizer, abstract)


def trained(config: RunConfig) -> Any:
    """Returns the filter of the trained variables: adapters alone, or None for all parameters."""
    return None if config.finetune is None else nnx.LoRAParam


def model_maker(config: RunConfig, family: ModelFamily, data: DataSpec) -> Callable[..., Any]:
    """Returns `make(rngs)` for the model of a config, with its adapters."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = family.make(config.model, data, rngs)
        return model if config.finetune is None else config.finetune.adapted(model, rngs)

    return make
