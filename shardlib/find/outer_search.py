"""The search over meshes, rematerialisation and microbatches for the rules of one model.

More microbatches hold less and are slower, and so is more recomputation. The search begins with the
least of both. It tries more of either where a step does not fit, whose seconds then bound theirs.
So does the work of a program, cut over all devices, with what the mesh makes every step send: the
least of both programs and numbers has the least of it. A program is therefore traced, and solved on
a mesh, only while it may be quicker than every step that fits.

In a pipeline more microbatches leave stages idle for less time, so that each number of them counts
as a mesh of its own.

Three exceptions are known. Where memory decides the layout of a step that fits, a program that
keeps less may have a quicker layout: more recomputation is tried as well, and more microbatches
are not. A value that is cheap to make may be computed again in less time than it takes to read:
that is not tried either.
"""

import bisect
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from shardlib.cost.layout import Layout
from shardlib.errors import DoesNotFitError, MeshError, PartitionError
from shardlib.find.experts import EXPERT
from shardlib.find.found import FoundRules
from shardlib.find.refusals import does_not_fit, state_does_not_fit
from shardlib.find.search import Search
from shardlib.humanize import duration
from shardlib.rules.resolve import STAGE

_MOST_LOWERED = 3
"""Meshes for which the program of a device is priced, the best ones by the traced program."""
_NEARLY_FULL = 0.9
"""Part of the memory from which it may decide the layout."""


def best_rules(
    programs: Sequence[Callable[[], Search]],
    meshes: Iterable[dict[str, int]] | None,
    seconds: float,
    notify: Callable[[str], None] = lambda text: None,
) -> FoundRules:
    """Returns the rules of the mesh, the rematerialisation and the number of microbatches with
    which a step fits and is quickest by the cost model.

    Args:
        programs: Functions that trace the model, each with another rematerialisation, from the
            least recomputation to the most.
        meshes: The meshes to search; None for all of the cluster.
        seconds: The time limit for the integer program of one mesh.
        notify: Called with a line after each mesh.

    Raises:
        MeshError: If no mesh divides the batch, or one does not divide the experts.
        DoesNotFitError: If nothing fits.
        PartitionError: If no answer was found in time.
    """
    return _OuterSearch(programs, seconds, notify).best(meshes)


class _Rank(NamedTuple):
    """The order of answers, and a bound of it: idle devices, then seconds of a step."""

    idle: bool = False
    seconds: float = 0.0


class _Mesh(NamedTuple):
    """A mesh that divides the batch."""

    sizes: dict[str, int]
    counts: list[int]
    """The possible numbers of microbatches, ascending."""

    def apart(self) -> list["_Mesh"]:
        """Returns the mesh, or with stages one for each number of microbatches: more of them leave
        stages idle for less time, and are not always slower."""
        if self.sizes[STAGE] == 1:
            return [self]
        return [_Mesh(self.sizes, [count]) for count in self.counts]


class _Task(NamedTuple):
    """A step to find rules for."""

    mesh: int
    """Position of its mesh."""
    program: int
    """Position of its program, from the least recomputation to the most."""
    microbatches: int

    def makes_needless(self, other: "_Task", *, is_tight: bool) -> bool:
        """Returns whether another task cannot be quicker if the step of this one fits: one on the
        same mesh with no fewer microbatches that recomputes no less. If the step is tight, more
        recomputation may be quicker."""
        no_less = other.program == self.program if is_tight else other.program >= self.program
        return other.mesh == self.mesh and no_less and other.microbatches >= self.microbatches


class _OuterSearch:
    """One search, from an empty queue to its answer."""

    def __init__(
        self,
        programs: Sequence[Callable[[], Search]],
        seconds: float,
        notify: Callable[[str], None],
    ):
        self._programs, self._seconds, self._notify = programs, seconds, notify
        self._traced: list[Search] = []
        self._asked: list[dict[str, int]] = []
        """The meshes that the user gave."""
        self._meshes: list[_Mesh] = []
        self._queue: list[tuple[_Rank, _Task, int, FoundRules | None]] = []
        """Tasks by a bound of their answer, and answers by their rank; of equal ones the first mesh
        comes first."""
        self._order = itertools.count()
        self._tried: set[_Task] = set()
        self._fitting: dict[_Task, FoundRules] = {}
        """The answers that fit, by the cost model of traced programs if there are many meshes."""
        self._needed_bytes: list[float] = []
        """Bytes of a device for each step that does not fit."""
        self._extra_seconds = functools.cache(self._extra_seconds_of)
        self._late: dict[int, PartitionError] = {}
        """Meshes of which a step had no answer in time."""

    def best(self, meshes: Iterable[dict[str, int]] | None) -> FoundRules:
        """Returns the rules of the quickest step; see `best_rules`."""
        first = self._program(0)
        self._asked = [] if meshes is None else list(meshes)
        checked = map(first.checked, self._asked or first.meshes())
        counted = [_Mesh(sizes, first.microbatch_counts(sizes)) for sizes in checked]
        self._meshes = [one for mesh in counted if mesh.counts for one in mesh.apart()]
        for number, (sizes, counts) in enumerate(self._meshes):
            if first.state_fits(sizes):
                self._push(_Rank(), _Task(number, 0, counts[0]))
        while self._queue:
            rank, task, _, answer = heapq.heappop(self._queue)
            if answer is None:
                self._try(rank, task)
            elif chosen := answer if self._is_one else self._refined(task, rank):
                return dataclasses.replace(chosen, late=self._without_answer())
        self._refuse()

    @property
    def _is_one(self) -> bool:
        return len(self._meshes) == 1

    def _program(self, number: int) -> Search:
        """Returns a program of the model, which it traces once."""
        while len(self._traced) <= number:
            self._traced.append(self._programs[len(self._traced)]())
        return self._traced[number]

    def _push(self, rank: _Rank, task: _Task, answer: FoundRules | None = None) -> None:
        heapq.heappush(self._queue, (rank, task, next(self._order), answer))

    def _push_recomputing(self, bound: _Rank, task: _Task) -> None:
        """Queues the step that recomputes more, if there is one."""
        if task.program + 1 < len(self._programs):
            self._push(bound, task._replace(program=task.program + 1))

    def _push_smaller(self, bound: _Rank, task: _Task) -> None:
        """Queues the steps that hold less than one that does not fit."""
        self._push_recomputing(bound, task)
        more = [n for n in self._meshes[task.mesh].counts if n > task.microbatches]
        if more:
            self._push(bound, task._replace(microbatches=more[0]))

    def _try(self, bound: _Rank, task: _Task) -> None:
        """Queues the answer of a task, or what may be tried after it."""
        if task in self._tried or self._is_needless(task):
            return
        for least_seconds in (self._least_work, self._least_seconds):
            least = _Rank(seconds=least_seconds(task))
            if bound < least:
                self._push(least, task)
                return
        self._tried.add(task)
        fewest = self._fewest_that_may_fit(task)
        if fewest != task.microbatches:
            self._push_recomputing(bound, task)
            if fewest is not None:
                self._push(bound, task._replace(microbatches=fewest))
            return
        answer = self._answer(task, alone=self._is_one)
        rank = bound if answer is None else self._rank(answer)
        if answer is None or not _fits(answer):
            self._push_smaller(rank, task)
            return
        self._fitting[task] = answer
        self._push(rank, task, answer)
        if _is_tight(answer):
            self._push_recomputing(_Rank(), task)

    def _least_work(self, task: _Task) -> float:
        """Returns a lower bound of the seconds of a step that sends nothing."""
        sizes = self._meshes[task.mesh].sizes
        return self._program(task.program).least_seconds(sizes, task.microbatches)

    def _least_seconds(self, task: _Task) -> float:
        """Returns a lower bound of the seconds of a step."""
        sizes = tuple(self._meshes[task.mesh].sizes.items())
        extra = 0.0 if self._is_one else self._extra_seconds(sizes, task.microbatches)
        return self._least_work(task) + extra

    def _extra_seconds_of(self, sizes: tuple[tuple[str, int], ...], microbatches: int) -> float:
        return self._program(0).extra_seconds(dict(sizes), microbatches)

    def _is_needless(self, task: _Task) -> bool:
        return any(
            one.makes_needless(task, is_tight=_is_tight(answer))
            for one, answer in self._fitting.items()
        )

    def _fewest_that_may_fit(self, task: _Task) -> int | None:
        """Returns the fewest microbatches, no fewer than a task has, with which its step may fit:
        more hold less. If its step fits with no number, it is None, but for the program that
        recomputes most the last number, whose error says how much is missing."""
        program, (sizes, counts) = self._program(task.program), self._meshes[task.mesh]

        def may_fit(count: int) -> bool:
            return program.least_bytes(sizes, count) <= program.capacity_bytes

        start = counts.index(task.microbatches)
        at = bisect.bisect_left(counts, True, lo=start, key=may_fit)
        if at < len(counts):
            return counts[at]
        is_last = task.program + 1 == len(self._programs)
        return counts[-1] if is_last else None

    def _answer(self, task: _Task, *, alone: bool) -> FoundRules | None:
        """Returns the rules for a step; it notes why none was found, or none that fits."""
        program, sizes = self._program(task.program), self._meshes[task.mesh].sizes
        answer = None
        try:
            answer = program.on_mesh(sizes, task.microbatches, self._seconds, alone=alone)
            if not _fits(answer):
                self._needed_bytes.append(answer.prices[0].memory_bytes)
        except DoesNotFitError as error:
            self._needed_bytes.append(error.needed_bytes)
        except PartitionError as error:
            self._late[task.mesh] = error
        self._tell(sizes, task.microbatches, program.remat, answer)
        return answer

    def _tell(
        self, sizes: Mapping[str, int], parts: int, remat: str | None, answer: FoundRules | None
    ) -> None:
        took = "no answer" if answer is None else f"{duration(answer.prices[0].seconds)} a step"
        kept = "" if remat is None else f", remat {remat}"
        self._notify(f"{Layout.of(sizes)}, {parts} microbatches{kept}: {took}")

    def _rank(self, found: FoundRules, *, hides: bool = False) -> _Rank:
        # Devices along an axis that no rule names would all compute the same.
        price = found.prices[0]
        return _Rank(bool(found.idle), price.seconds if hides else price.rank)

    def _refined(self, best: _Task, rank: _Rank) -> FoundRules | None:
        """Returns the quickest of the best meshes by the programs that a device runs, for each of
        which more answers are tried. If that of the best mesh does not fit, it queues steps that
        hold less."""
        lowered = self._refined_answer(best)
        if lowered is None or not _fits(lowered):
            del self._fitting[best]
            self._push_smaller(rank, best)
            return None
        others = [self._refined_answer(task) for task in self._near(best)]
        fitting = [lowered, *(one for one in others if one and _fits(one))]
        # The program of a pipeline is not written out, so that how much it hides is not known.
        hides = any(one.sizes[STAGE] > 1 for one in fitting)
        return min(fitting, key=functools.partial(self._rank, hides=hides))

    def _refined_answer(self, task: _Task) -> FoundRules | None:
        """Returns the best of more answers. A pipeline has no more."""
        if self._meshes[task.mesh].sizes[STAGE] > 1:
            return self._fitting[task]
        return self._answer(task, alone=True)

    def _near(self, best: _Task) -> list[_Task]:
        """Returns the best steps that fit on the next best meshes."""
        by_mesh: dict[Layout, _Task] = {}
        for task in sorted(self._fitting, key=lambda task: (self._rank(self._fitting[task]), task)):
            by_mesh.setdefault(self._layout(task.mesh), task)
        own = self._layout(best.mesh)
        near = [task for mesh, task in by_mesh.items() if mesh != own]
        # The traced program prices layouts of rows at experts too high.
        left = near[_MOST_LOWERED - 1 :]
        with_experts = [task for task in left if self._meshes[task.mesh].sizes[EXPERT] > 1]
        by_solution = sorted(with_experts, key=lambda task: self._fitting[task].seconds)
        return near[: _MOST_LOWERED - 1] + by_solution[:1]

    def _without_answer(self) -> tuple[str, ...]:
        """Returns the meshes without an answer that fits because time was over."""
        answered = {self._layout(task.mesh) for task in self._fitting}
        late = dict.fromkeys(self._layout(mesh) for mesh in self._late)
        return tuple(str(mesh) for mesh in late if mesh not in answered)

    def _layout(self, mesh: int) -> Layout:
        return Layout.of(self._meshes[mesh].sizes)

    def _refuse(self) -> NoReturn:
        """Raises the error for a search without an answer."""
        first = self._program(0)
        if self._needed_bytes:
            # A lower bound may be less than a device has.
            capacity = first.capacity_bytes
            least = min(self._needed_bytes, key=lambda needed: (needed <= capacity, needed))
            several = len(self._programs) > 1
            remats = [str(search.remat) for search in self._traced] if several else []
            counted = first.microbatches is None
            raise does_not_fit(least, capacity, remats=remats, any_microbatches=counted)
        if self._late:
            raise next(iter(self._late.values()))
        if self._meshes:
            least = min(first.state_bytes(mesh.sizes) for mesh in self._meshes)
            raise state_does_not_fit(least, first.capacity_bytes)
        raise _does_not_divide(first, self._asked)


def _does_not_divide(search: Search, asked: Sequence[dict[str, int]]) -> MeshError:
    """Returns the error for a batch that no mesh divides, or not the one that is asked for."""
    layout = Layout.of(asked[0]) if asked else Layout(fsdp=search.cluster.num_devices)
    parts = max(search.microbatches or 1, layout.stage)
    within = f" in {parts} microbatches" if parts > 1 else ""
    held = search.batch_rows
    if len(set(held.values())) == 1:
        have = f"the {next(iter(held.values()))} rows of the batch"
    else:
        have = "the rows of the batch, " + ", ".join(f"{path}: {n}" for path, n in held.items())
    what = f"the mesh {layout}" if asked else f"no mesh of {search.cluster.name}"
    cuts = "does not divide" if asked else "divides"
    return MeshError(
        f"{what} {cuts} {have}{within}.\n"
        f"  Give a multiple of {layout.batch_shards * parts} rows, or another mesh."
    )


def _fits(found: FoundRules) -> bool:
    return found.prices[0].memory_bytes <= found.capacity_bytes


def _is_tight(found: FoundRules) -> bool:
    """Returns whether memory may have decided the layout: of the integer program, or among its
    answers and others."""
    objective = found.questions.problem.objective
    left = objective.capacity_bytes - objective.reserved_bytes
    chosen, *others = found.prices
    return (
        found.solution.memory_bytes > _NEARLY_FULL * left
        or bool(objective.state_axes)
        or any(p.rank < chosen.rank and p.memory_bytes > found.capacity_bytes for p in others)
    )
