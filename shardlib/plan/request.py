"""Questions to the planner, apart from the model, and their validation."""

import dataclasses
import functools
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from shardlib.errors import ConfigError, ShardlibError, did_you_mean
from shardlib.hardware import Cluster, MixedCluster, is_mixed, parse_mixed
from shardlib.mesh import MeshConfig, MeshSpec
from shardlib.plan.objective import Goal, Objective, clusters

TrainPrecision = Literal["f32", "bf16", "bf16_params"]
_DEFAULT_TOKENS = 2.0**22
_BINARY = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question to the planner. `shardlib.plan.plan` documents the fields; `faults` lists invalid
    ones."""

    on: str | Cluster | MixedCluster
    objective: Objective = "time"
    tokens: float | str | None = None
    days: float | None = None
    price: float | None = None
    global_batch: int | None = None
    global_batch_tokens: float | str | None = None
    length: int | None = None
    precision: TrainPrecision | None = None
    why_not: "MeshSpec | Sequence[MeshSpec]" = ()
    top: int = 5
    of_run: bool = False
    """Whether the question is about the config of a run, which gives its precision and length."""

    def faults(self) -> list[ShardlibError]:
        """Returns all faults of the question."""
        checks = (
            *(lambda: self.goal, lambda: self.batch_tokens, lambda: self.meshes),
            *(self._check_whole_numbers, self._check_batch, self._check_precision),
            *(self._check_length_of_run, self._check_cluster),
        )
        return [error for check in checks if (error := _refused(check)) is not None]

    @functools.cached_property
    def goal(self) -> Goal:
        """Criterion to choose between plans."""
        return Goal(self.objective, tokens_of(self.tokens, _DECIMAL), self.days, self.price)

    @functools.cached_property
    def batch_tokens(self) -> float | None:
        """Tokens per step, if given."""
        return tokens_of(self.global_batch_tokens, _BINARY)

    @functools.cached_property
    def meshes(self) -> tuple[MeshSpec, ...]:
        """Meshes to explain, given as one mesh or a sequence."""
        if isinstance(self.why_not, str | Mapping | MeshConfig):
            return (self.why_not,)
        if not isinstance(self.why_not, Sequence):
            raise ConfigError(
                f"why_not is {self.why_not!r}, but must be a mesh, or several.\n"
                "  Name one, as in fsdp=8,tensor=2."
            )
        return tuple(self.why_not)

    @functools.cached_property
    def mixed(self) -> MixedCluster | None:
        """The cluster if it is mixed, otherwise None."""
        if not self._is_mixed:
            return None
        return parse_mixed(self.on) if isinstance(self.on, str) else cast(MixedCluster, self.on)

    @property
    def _is_mixed(self) -> bool:
        return is_mixed(self.on) if isinstance(self.on, str) else isinstance(self.on, MixedCluster)

    @functools.cached_property
    def platform(self) -> str | None:
        """Platform of the devices, as in `Cluster`; None if the cluster cannot be used."""
        try:
            self._check_cluster()
            kinds = self.clusters() if self.mixed is None else self.mixed.kinds
        except ShardlibError:
            return None
        return kinds[0].platform

    def clusters(self) -> list[Cluster]:
        """Returns the clusters to try, smallest first; not for a mixed cluster.

        Raises:
            MeshError: If a chip is named without a size, and nothing determines the size.
        """
        assert not isinstance(self.on, MixedCluster)
        if isinstance(self.on, Cluster):
            return [self.on]
        return clusters(self.on, self.objective, deadline=self.days is not None)

    def rows(self, length: int, default: int | None = None) -> int:
        """Returns the sequences per step: as requested, or nearest to the requested tokens, or
        a power of two if nothing is.

        Args:
            length: Tokens per sequence.
            default: Value from a config, used if nothing is requested.

        Raises:
            ConfigError: If a step has fewer tokens than a sequence.
        """
        if self.global_batch is not None:
            return self.global_batch
        tokens = self.batch_tokens
        if tokens is None and default is not None:
            return default
        if tokens is not None and tokens < length:
            raise ConfigError(
                f"global_batch_tokens (--global-batch) is {self.global_batch_tokens}, less than "
                f"one sequence of {length} tokens.\n"
                f"  It counts tokens: {tokens:g} sequences are {int(tokens * length)}."
            )
        if tokens is None:
            return 2 ** round(math.log2(max(1, _DEFAULT_TOKENS / length)))
        return max(1, round(tokens / length))

    def check_without_tokens(self, name: str, unit: str) -> None:
        """Raises `ConfigError` for token counts of a model that does not train on tokens."""
        faults = [
            f"{option} counts tokens, and {name} trains on {unit}.\n  {instead}"
            for value, option, instead in (
                (
                    self.global_batch_tokens,
                    "global_batch_tokens (--global-batch)",
                    f"Leave it out: global_batch, train.global_batch in a config, counts {unit}.",
                ),
                (self.length, "length", "Leave it out."),
            )
            if value is not None
        ]
        if faults:
            raise ConfigError("\n".join(faults))

    def _check_whole_numbers(self) -> None:
        faults = [
            f"{name} is {value!r}, but must be a whole number of at least 1.\n"
            "  Give another number."
            for name in ("global_batch", "length", "top")
            if (value := getattr(self, name)) is not None
            and not (isinstance(value, numbers.Integral) and int(value) >= 1)
        ]
        if faults:
            raise ConfigError("\n".join(faults))

    def _check_batch(self) -> None:
        if self.global_batch is not None and self.global_batch_tokens is not None:
            raise ConfigError(
                "global_batch and global_batch_tokens exclude each other.\n  Give one."
            )

    def _check_precision(self) -> None:
        known = get_args(TrainPrecision)
        if self.precision is None:
            return
        if self.of_run:
            raise ConfigError(
                f"precision is {self.precision}, but a run takes its precision from its config.\n"
                "  Leave it out, and set the key precision there."
            )
        if self.precision not in known:
            hint = did_you_mean(str(self.precision), known)
            raise ConfigError(
                f"no precision is called {self.precision!r}.{hint}\n"
                f"  Choose one of: {', '.join(known)}."
            )

    def _check_length_of_run(self) -> None:
        """Raises `ConfigError` if days or a price are given without tokens. The config of a run
        gives its tokens; a question about a model must give them."""
        if self.tokens is not None or self.of_run:
            return
        faults = []
        if self.days is not None:
            faults.append(
                "days gives a deadline, but not the tokens to train on.\n  Give tokens too."
            )
        if self.price is not None and not self._is_mixed:
            faults.append(
                "price gives an hourly cost, but not the tokens to train on.\n  Give tokens too."
            )
        if faults:
            raise ConfigError("\n".join(faults))

    def _check_cluster(self) -> None:
        if not isinstance(self.on, str | Cluster | MixedCluster):
            raise ConfigError(
                f"on is {self.on!r}, but must be a cluster.\n"
                "  Name one, as in v5p-128, 8xh100 or cpu:8."
            )
        if self.mixed is not None:
            self._check_mixed(self.mixed.name)
        elif isinstance(self.on, str):
            clusters(self.on, "time")

    def _check_mixed(self, name: str) -> None:
        faults = []
        if self.objective in ("cost", "chips"):
            faults.append(
                f"an objective of {self.objective} compares clusters of one kind, and {name} has "
                "several.\n  Leave objective at time."
            )
        if self.price is not None:
            faults.append(
                f"price is the cost of a chip-hour, and {name} has chips of several kinds.\n"
                "  Leave it out: the report compares chip-hours."
            )
        if faults:
            raise ConfigError("\n".join(faults))


def tokens_of(given: float | str | None, units: Mapping[str, float]) -> float | None:
    """Returns a number of tokens; strings such as `4M` take their suffix from `units`.

    Raises:
        ConfigError: If it is not a positive number.
    """
    if given is None:
        return None
    match = re.fullmatch(r"\s*([\d_.]+(?:e\+?\d+)?)\s*([a-z]?)\s*", str(given).lower())
    try:
        number = float(match[1].replace("_", "")) * units[match[2]] if match else 0.0
    except (KeyError, ValueError):
        number = 0.0
    if number <= 0:
        raise ConfigError(
            f"{given!r} is not a number of tokens.\n"
            f"  Write it as 4M or 4194304; units are {', '.join(u.upper() for u in units if u)}."
        )
    return number


def raise_all(faults: Sequence[ShardlibError]) -> None:
    """Raises `faults`: a single one as it is, several as one `ConfigError`."""
    if len(faults) == 1:
        raise faults[0]
    if faults:
        lines = (str(fault).replace("\n", "\n  ") for fault in faults)
        raise ConfigError(f"the question has {len(faults)} faults:\n  " + "\n  ".join(lines))


def _refused(check: Callable[[], Any]) -> ShardlibError | None:
    try:
        check()
    except ShardlibError as error:
        return error
    return None
