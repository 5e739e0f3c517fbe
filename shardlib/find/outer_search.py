"""The search over meshes, rematerialisation and microbatches for the rules of one model.

More microbatches hold less and are slower, and so is more recomputation. The search begins with the
least of both. It tries more of either where a step does not fit, whose seconds then bound theirs;
so do the products of a program at the full rate of all devices. A program is therefore traced, and
solved on a mesh, only while it may be quicker than every step that fits.

Recomputation is not always slower. Where memory decides the layout of a step that fits, a program
that keeps less may have a quicker layout: it is tried as well. And a value that is cheap to make
may be computed again in less time than it takes to read: that is not tried.
"""

import bisect
import contextlib
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from shardlib.cost.layout import Layout
from shardlib.errors import DoesNotFitError, MeshError, ModelError, PartitionError
from shardlib.find.experts import EXPERT
from shardlib.find.found import FoundRules
from shardlib.find.problem import does_not_fit, state_does_not_fit
from shardlib.find.search import Search
from shardlib.humanize import duration
from shardlib.mesh import abstract_mesh
from shardlib.paths import named_leaves

_MOST_LOWERED = 3
"""Meshes for which the program of a device is priced, the best ones by the traced program."""
_NEARLY_FULL = 0.9
"""Part of the memory from which it may decide the layout."""


class _Rank(NamedTuple):
    """The order of answers, and a bound of it: idle devices, then seconds of a step."""

    idle: bool = False
    seconds: float = 0.0


class _Task(NamedTuple):
    """A step to find rules for."""

    mesh: int
    remat: int
    """Position of its program, from the least recomputation to the most."""
    count: int
    """Position of its number of microbatches in the list of its mesh."""

    def makes_needless(self, other: "_Task", *, is_tight: bool) -> bool:
        """Returns whether another task cannot be quicker if the step of this one fits: one on the
        same mesh with no fewer microbatches that recomputes no less. If the step is tight, more
        recomputation may be quicker."""
        no_less = other.remat == self.remat if is_tight else other.remat >= self.remat
        return other.mesh == self.mesh and no_less and other.count >= self.count


class OuterSearch:
    """The search for the rules of one model on one cluster.

    Args:
        programs: Functions that trace the model, each with another rematerialisation, from the
            least recomputation to the most.
        seconds: The time limit for the integer program of one mesh.
        notify: Called with a line after each mesh.
    """

    def __init__(
        self,
        programs: Sequence[Callable[[], Search]],
        seconds: float,
        notify: Callable[[str], None] = lambda text: None,
    ):
        self._programs, self._seconds, self._notify = programs, seconds, notify
        self._traced: list[Search] = []
        self._meshes: list[tuple[dict[str, int], list[int]]] = []
        """Meshes that divide the batch, and their numbers of microbatches."""
        self._met: set[_Task] = set()
        self._fitting: list[tuple[_Task, bool]] = []
        """Tasks whose steps fit, and whether memory may have decided the layout."""
        self._found: list[FoundRules] = []
        self._refused: list[DoesNotFitError] = []
        self._late: dict[str, PartitionError] = {}
        """Meshes without an answer in time."""

    def best(self, meshes: Iterable[dict[str, int]] | None = None) -> FoundRules:
        """Returns the rules of the mesh, the rematerialisation and the number of microbatches with
        which a step fits and is quickest by the cost model of traced programs. Without `meshes` it
        searches all of the cluster.

        Raises:
            MeshError: If no mesh divides the batch, or one does not divide the experts.
            ModelError: If the parameters differ between programs.
            DoesNotFitError: If nothing fits.
            PartitionError: If no answer was found in time.
        """
        first = self._program(0)
        checked = map(first.checked, first.meshes() if meshes is None else meshes)
        self._meshes = [(sizes, counts) for sizes in checked if (counts := first.divisors(sizes))]
        tasks = [_Task(n, 0, 0) for n, (sizes, _) in enumerate(self._meshes)]
        tasks = [task for task in tasks if first.state_fits(self._meshes[task.mesh][0])]
        order = itertools.count()
        queue: list[tuple[_Rank, int, FoundRules | _Task]] = []
        queue = [(_Rank(), next(order), task) for task in tasks]
        while queue:
            rank, _, task = heapq.heappop(queue)
            if isinstance(task, FoundRules):
                best = task if self._is_one else self._refined(task)
                return dataclasses.replace(best, late=tuple(self._late))
            for bound, after in self._after(rank, task):
                heapq.heappush(queue, (bound, next(order), after))
        if self._found:
            best = min(self._found, key=self._rank)
            return dataclasses.replace(best, late=tuple(self._late))
        self._refuse()

    @property
    def _is_one(self) -> bool:
        return len(self._meshes) == 1

    def _program(self, remat: int) -> Search:
        """Returns a program of the model, which it traces once.

        Raises:
            ModelError: If it has other parameters than the first one.
        """
        while len(self._traced) <= remat:
            new = self._programs[len(self._traced)]()
            _check_alike(self._traced[0] if self._traced else new, new)
            self._traced.append(new)
        return self._traced[remat]

    def _after(self, rank: _Rank, task: _Task) -> Iterator[tuple[_Rank, FoundRules | _Task]]:
        """Yields the answer of a task, or what may be tried after it, each with its bound."""
        if task in self._met or any(
            one.makes_needless(task, is_tight=is_tight) for one, is_tight in self._fitting
        ):
            return
        program = self._program(task.remat)
        if rank < (least := _Rank(seconds=program.least_seconds)):
            yield least, task
            return
        self._met.add(task)
        sizes, counts = self._meshes[task.mesh]
        more = task._replace(remat=task.remat + 1)
        is_last = more.remat == len(self._programs)
        at = _first_that_may_fit(program, sizes, counts, task.count)
        if at == len(counts) and is_last:
            at -= 1  # Its error says how much is missing.
        if at > task.count:
            if not is_last:
                yield rank, more
            if at < len(counts):
                yield rank, task._replace(count=at)
            return
        answer = self._answer(program, sizes, counts[at])
        if answer is not None:
            rank = self._rank(answer)
        if answer is not None and _fits(answer):
            yield rank, answer
            self._fitting.append((task, is_tight := _is_tight(answer)))
            if is_tight and not is_last:
                yield _Rank(), more
            return
        if not is_last:
            yield rank, more
        if at + 1 < len(counts):
            yield rank, task._replace(count=at + 1)

    def _answer(self, program: Search, sizes: dict[str, int], parts: int) -> FoundRules | None:
        """Returns and notes the rules for a step; without any it notes why."""
        answer = None
        try:
            answer = program.on_mesh(sizes, parts, self._seconds, alone=self._is_one)
            self._found.append(answer)
        except DoesNotFitError as error:
            self._refused.append(error)
        except PartitionError as error:
            self._late[str(Layout.of(sizes))] = error
        self._tell(sizes, parts, program.remat, answer)
        return answer

    def _tell(
        self, sizes: Mapping[str, int], parts: int, remat: str | None, answer: FoundRules | None
    ) -> None:
        took = "no answer" if answer is None else f"{duration(answer.prices[0].seconds)} a step"
        kept = "" if remat is None else f", remat {remat}"
        self._notify(f"{Layout.of(sizes)}, {parts} microbatches{kept}: {took}")

    def _rank(self, found: FoundRules) -> _Rank:
        # Devices along an axis that no rule names would all compute the same.
        mesh = abstract_mesh(found.mesh_text, self._program(0).cluster.num_devices)
        return _Rank(bool(found.rules.idle(mesh)), found.prices[0].rank)

    def _refined(self, best: FoundRules) -> FoundRules:
        """Returns the quickest of the best meshes, for each of which more answers are tried."""
        by_mesh: dict[str, FoundRules] = {}
        for one in sorted(filter(_fits, self._found), key=self._rank):
            by_mesh.setdefault(one.mesh_text, one)
        near = list(by_mesh.values())
        # The traced program prices layouts of rows at experts too high.
        with_experts = [one for one in near[_MOST_LOWERED:] if one.sizes[EXPERT] > 1]
        near = near[:_MOST_LOWERED] + sorted(with_experts, key=lambda one: one.seconds)[:1]
        answers = []
        for one in near:
            program = next(search for search in self._traced if search.remat == one.remat)
            with contextlib.suppress(DoesNotFitError, PartitionError):
                sizes, parts = dict(one.sizes), one.microbatches
                answers.append(program.on_mesh(sizes, parts, self._seconds, alone=True))
                self._tell(sizes, parts, one.remat, answers[-1])
        fitting = [one for one in answers if _fits(one)]
        return min(fitting, key=self._rank, default=best)

    def _refuse(self) -> NoReturn:
        """Raises the error for a search without an answer."""
        first = self._program(0)
        if self._refused:
            error = min(self._refused, key=lambda error: error.needed_bytes)
            if len(self._programs) == 1:
                raise error
            tried = [str(search.remat) for search in self._traced]
            raise does_not_fit(error.needed_bytes, first.capacity_bytes, tried) from error
        if self._late:
            raise next(iter(self._late.values()))
        if self._meshes:
            least = min(first.state_bytes(sizes) for sizes, _ in self._meshes)
            raise state_does_not_fit(least, first.capacity_bytes)
        parts = first.microbatches or 1
        raise MeshError(
            f"data x fsdp x expert of no mesh divides {first.workload.batch} rows in {parts} "
            "microbatches.\n"
            f"  Give a multiple of {first.cluster.num_devices * parts} rows."
        )


def _first_that_may_fit(
    program: Search, sizes: Mapping[str, int], counts: Sequence[int], start: int
) -> int:
    """Returns the position of the first number of microbatches, from `start` on, with which a step
    may fit: more hold less. It is the length of `counts` if none may."""

    def fits(count: int) -> bool:
        return program.least_bytes(sizes, count) <= program.capacity_bytes

    return bisect.bisect_left(counts, True, lo=start, key=fits)


def _fits(found: FoundRules) -> bool:
    return found.prices[0].memory_bytes <= found.capacity_bytes


def _is_tight(found: FoundRules) -> bool:
    """Returns whether memory may have decided the layout."""
    objective = found.questions.problem.objective
    left = objective.capacity_bytes - objective.reserved_bytes
    return found.solution.memory_bytes > _NEARLY_FULL * left or bool(objective.state_axes)


def _check_alike(first: Search, other: Search) -> None:
    """Raises `ModelError` if two programs have different parameters."""
    shapes = [
        {path: leaf.shape for path, leaf in named_leaves(one.traced.params).items()}
        for one in (first, other)
    ]
    if different := [path for path, shape in shapes[0].items() ^ shapes[1].items()]:
        raise ModelError(
            f"the parameters of remat {first.remat} and {other.remat} differ: "
            f"{', '.join(sorted(set(different)))}.\n"
            "  Let each `make` of the mapping create the same parameters."
        )
