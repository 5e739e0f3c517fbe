"""Found rules that are compiled for their cluster, and whose numbers are proven, before a run."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from shardlib.cost.costs import RUNTIME_BYTES
from shardlib.errors import (
    ConfigError,
    DataError,
    DoesNotFitError,
    MeshError,
    MissingExtraError,
    ModelError,
    PartitionError,
    RuleError,
    ShardlibError,
)
from shardlib.explain.aot.compile import compile_step
from shardlib.explain.aot.topology import devices_of
from shardlib.explain.report.report import StepReport, report_on
from shardlib.explain.wrong_numbers import FAULTS
from shardlib.find import FoundRules, find_rules
from shardlib.find.api import by_remat
from shardlib.find.traffic import Traffic
from shardlib.hardware import Cluster, of_one_kind
from shardlib.humanize import duration, size
from shardlib.losses.signature import LossFn
from shardlib.mesh import make_mesh
from shardlib.plan.search import capacity_bytes
from shardlib.rules.resolve import STAGE
from shardlib.tables import Report, Table
from shardlib.testing.equivalent import Reference
from shardlib.testing.training import MakeModel
from shardlib.train.state import abstract_state
from shardlib.train.step import make_train_step

_SHOWN_BYTES = 1e6
_MARGIN = 0.98
"""Part of the memory that is allowed after a program has turned out larger than predicted."""


@dataclasses.dataclass(frozen=True)
class Small:
    """The same model at a size that the devices at hand can train.

    Attributes:
        make: Module factory, whose parameters have the same paths; where `verified_rules` has one
            for each rematerialisation, a mapping with the same names.
        batch: A batch of host arrays for it; on a mesh with `stage` it is cut into as many
            microbatches as there are stages.
        inputs: Example arguments of the module; for linen.
    """

    make: MakeModel | Mapping[str, MakeModel]
    batch: PyTree
    inputs: PyTree = ()


@dataclasses.dataclass(frozen=True)
class Check:
    """The compiled program of found rules, and the proof of their numbers.

    Attributes:
        found: The rules.
        peak_bytes: Bytes that a device holds at the peak of the compiled step, with what the
            runtime takes.
        traffic: Bytes that a device sends in a step, by kind and mesh axes.
        seconds: Seconds of a step that hides no communication; None if the devices are unknown.
        numbers: The comparison with one device as text; empty if none was asked for.
        refused: Why the rules are refused; empty if they are not.
    """

    found: FoundRules
    peak_bytes: int
    traffic: Traffic
    seconds: float | None
    numbers: str = ""
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class VerifiedRules(Report):
    """Rules that hold in their compiled program. `str()` shows what was predicted of it.

    Attributes:
        check: The check of the rules.
        others: The checks of rules that were refused or slower, in order.
        uncompared: Why a searched answer was not compared with `fsdp` alone; empty if it was, or
            if nothing was searched.
    """

    check: Check
    others: tuple[Check, ...] = ()
    uncompared: str = ""

    @property
    def found(self) -> FoundRules:
        """The rules, on their mesh."""
        return self.check.found

    def parts(self) -> Iterator[Any]:
        """Yields the lines and tables of the report."""
        check, price = self.check, self.found.prices[0]
        yield from self.found.parts()
        rows = [("peak memory", size(price.memory_bytes), size(check.peak_bytes))]
        told, true = self.found.traffic, check.traffic
        rows += [
            (f"{kind} {'+'.join(axes)}", size(told.get(key, 0)), size(true.get(key, 0)))
            for key in sorted({*told, *true})
            for kind, axes in [key]
            if max(told.get(key, 0), true.get(key, 0)) >= _SHOWN_BYTES
        ]
        rows.append(("sent in all", size(sum(told.values())), size(sum(true.values()))))
        yield Table("the compiled step", ("of one device", "predicted>", "compiled>"), rows)
        yield check.numbers or "the numbers are not proven: give `small`"
        rows = [
            (one.found.step_text, one.refused, duration(one.seconds) if one.seconds else "")
            for one in self.others
        ]
        if rows:
            yield Table("rules that were tried before", ("rules for", "refused", "step>"), rows)
        if self.uncompared:
            yield f"not compared with fsdp alone: {self.uncompared}"


def verified_rules(
    make: MakeModel | Mapping[str, MakeModel],
    *,
    loss: LossFn,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    on: str | Cluster,
    small: Small | None = None,
    tries: int = 4,
    **options: Any,
) -> VerifiedRules:
    """Finds rules, compiles their training step for the cluster and proves their numbers.

    A step that holds more than a device has is solved again with less memory, by as much as the
    prediction was off. Rules whose program cannot be compiled, holds a fault that changes numbers,
    or trains `small` otherwise than one device are forbidden, and others are found. If the mesh is
    searched, the rules of `fsdp` alone are compiled as well, and the quicker ones are returned.

    Args:
        make: Module factory, or several by rematerialisation, as in `find_rules`.
        loss: Loss, as in `find_rules`.
        batch: Shapes of a batch, as in `find_rules`.
        optimizer: Any optax transformation.
        on: The cluster, which need not be attached.
        small: The same model at a small size. Its training on virtual devices, of a mesh with the
            same axes, is compared with one device, as `assert_equivalent` does. If `make` is a
            mapping, the small model with the rematerialisation of the rules is trained.
        tries: The most answers to compile.
        options: More arguments of `find_rules`.

    Raises:
        PartitionError: If all answers are refused; it says why.
        MissingExtraError: If the compiler of the cluster's platform is not installed.
        DoesNotFitError: If no layout fits into the devices.
        ConfigError: If `small` lacks a rematerialisation of `make`, or has others.
        ModelError: If the training of `small` cannot be compared, which one device shows before any
            search, or if `small` cannot be trained on the mesh.
    """
    _check_small(make, small)
    cluster = of_one_kind(on)
    asked = {"loss": loss, "batch": batch, "optimizer": optimizer, "on": cluster, **options}
    verifier = _Verifier(make, asked, cluster, _references(small, asked))
    refused: list[Check] = []
    for _ in range(tries):
        found = find_rules(make, **asked | verifier.lessons(refused))
        check = verifier.check(found)
        if not check.refused:
            return verifier.against_fsdp(check, refused)
        refused.append(check)
    raise PartitionError(
        "no rules could be verified:\n    "
        + "\n    ".join(f"{check.found.step_text}: {check.refused}" for check in refused)
        + "\n  Allow more tries, or write rules for this model."
    )


def _check_small(make: MakeModel | Mapping[str, MakeModel], small: Small | None) -> None:
    """Raises `ConfigError` if small models have other rematerialisations than the models."""
    wanted = list(by_remat(make))
    given = wanted if small is None else list(by_remat(small.make))
    if set(given) != set(wanted):
        names = ", ".join(map(str, wanted))
        raise ConfigError(
            f"make of small has {', '.join(map(str, given))}, and make has {names}.\n"
            f"  Give a small model for each rematerialisation of make: {names}."
        )


def _references(small: Small | None, asked: Mapping[str, Any]) -> Mapping[str | None, Reference]:
    """Returns the trainings of small models on one device, by rematerialisation. One has run: all
    of them compute the same numbers."""
    if small is None:
        return {}
    references = {
        remat: Reference(
            make,
            asked["loss"],
            small.batch,
            optimizer=asked["optimizer"],
            inputs=small.inputs,
            wrt=asked.get("wrt"),
        )
        for remat, make in by_remat(small.make).items()
    }
    next(iter(references.values())).check_comparable()
    return references


@dataclasses.dataclass(frozen=True)
class _Verifier:
    """Checks found rules of one model on one cluster."""

    make: MakeModel | Mapping[str, MakeModel]
    asked: Mapping[str, Any]
    cluster: Cluster
    references: Mapping[str | None, Reference]
    """The trainings of small models by rematerialisation; none if no numbers are to be proven."""

    @property
    def capacity_bytes(self) -> float:
        """Memory of a device."""
        return self.asked.get("memory_bytes") or capacity_bytes(self.cluster)

    def lessons(self, refused: list[Check]) -> dict[str, Any]:
        """Returns the arguments of `find_rules` that keep it from answers like the refused ones."""
        capacity = self.capacity_bytes
        over = [check.peak_bytes / capacity for check in refused if check.peak_bytes > capacity]
        memory = _MARGIN * capacity / math.prod(over) if over else capacity
        forbidden = [check.found for check in refused if check.peak_bytes <= capacity]
        return {
            "memory_bytes": memory,
            "forbidden": [*self.asked.get("forbidden", ()), *forbidden],
        }

    def against_fsdp(self, check: Check, refused: list[Check]) -> VerifiedRules:
        """Returns verified rules, or those for `fsdp` alone if they are quicker."""
        devices = self.cluster.num_devices
        alone = f"fsdp={devices}"
        rows = jax.tree.leaves(self.asked["batch"])[0].shape[0]
        parts = devices * check.found.microbatches
        if self.asked.get("mesh") is not None or check.found.mesh_text == alone:
            return VerifiedRules(check, tuple(refused))
        if rows % parts:
            why = f"{parts} parts do not divide {rows} rows"
            return VerifiedRules(check, tuple(refused), why)
        try:
            other = self.check(find_rules(self.make, **{**self.asked, "mesh": alone}))
        except (DoesNotFitError, ModelError, PartitionError) as error:
            return VerifiedRules(check, tuple(refused), str(error).splitlines()[0])
        pair = [check, other]
        if not other.refused and other.seconds and check.seconds:
            pair.sort(key=lambda one: one.seconds or math.inf)
        return VerifiedRules(pair[0], (*refused, pair[1]))

    def check(self, found: FoundRules) -> Check:
        """Returns the check of rules."""
        try:
            report = self._compiled(found)
        except MissingExtraError:
            raise
        except DoesNotFitError as error:
            refused = str(error).splitlines()[0]
            return Check(found, error.needed_bytes, {}, None, refused=refused)
        except (ShardlibError, jax.errors.JaxRuntimeError) as error:
            return Check(found, 0, {}, None, refused=str(error).splitlines()[0])
        peak = report.memory.peak_bytes + int(RUNTIME_BYTES[self.cluster.platform])
        check = Check(found, peak, _traffic(report), _seconds(report))
        if check.peak_bytes > (capacity := self.capacity_bytes):
            refused = f"a device holds {size(check.peak_bytes)} of {size(capacity)}"
            return dataclasses.replace(check, refused=refused)
        faults = sorted({f.code for f in report.findings if f.code in FAULTS})
        if faults:
            refused = f"the program computes wrong numbers ({', '.join(faults)})"
            return dataclasses.replace(check, refused=refused)
        return self._proven(check) if self.references else check

    def _compiled(self, found: FoundRules) -> StepReport:
        """Returns the report on the training step under rules, for the cluster."""
        inputs = self.asked.get("inputs", ())
        precision = self.asked.get("precision", "bf16")
        state = abstract_state(
            by_remat(self.make)[found.remat],
            self.asked["optimizer"],
            inputs=inputs,
            wrt=self.asked.get("wrt"),
            precision=precision,
            mesh=make_mesh(found.mesh_text, devices=devices_of(self.cluster)),
            rules=found.rules,
        )
        step = make_train_step(
            self.asked["loss"],
            precision=precision,
            microbatches=found.microbatches,
            allow_wrong_numbers=tuple(FAULTS),
        )
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.asked["batch"])
        return report_on(compile_step(step, (state, batch), on=self.cluster))

    def _proven(self, check: Check) -> Check:
        """Returns the check with the comparison of the small model with one device."""
        devices = len(jax.devices())
        sizes = {axis: n for axis, n in check.found.sizes.items() if n > 1}
        while math.prod(sizes.values()) > devices:
            largest = max(sizes, key=lambda axis: sizes[axis])
            sizes[largest] //= 2
        rules = check.found.rules.at_other_sizes()
        # The fewest microbatches with which every stage has one.
        parts = sizes.get(STAGE, 1)
        reference = self.references[check.found.remat]
        try:
            compared = reference.compare(sizes or {"data": 1}, rules=rules, microbatches=parts)
        except (DataError, MeshError, ModelError, RuleError) as error:
            told = f"small cannot be trained under the rules for {check.found.step_text}"
            raise ModelError(f"{told}: {error}") from error
        refused = "its numbers differ from one device" if compared.deviations else ""
        return dataclasses.replace(check, numbers=str(compared), refused=refused)


def _traffic(report: StepReport) -> Traffic:
    sent: dict[tuple[str, tuple[str, ...]], float] = {}
    for one in report.program.collectives:
        key = one.kind, one.mesh_axes or ("?",)
        sent[key] = sent.get(key, 0.0) + one.sent_bytes
    return sent


def _seconds(report: StepReport) -> float | None:
    roofline = report.roofline
    if roofline is None or roofline.busy_seconds is None:
        return None
    network = roofline.seconds["network"]
    return None if network is None else roofline.busy_seconds + network
