"""The outer search gives the quickest step that fits. The seconds and bytes of steps are given."""

import dataclasses
from types import SimpleNamespace

import pytest

from shardlib.cost.layout import Layout
from shardlib.errors import DoesNotFitError, PartitionError
from shardlib.find.found import FoundRules, Price
from shardlib.find.outer_search import best_rules
from shardlib.mesh import MeshConfig
from shardlib.rules import AxisRules

CAPACITY = 10.0


@dataclasses.dataclass
class Step:
    """Prices of a step: of the traced program, and of that of a device if it differs."""

    seconds: float
    held: float
    lowered: "Step | None" = None
    layout_bytes: float = 0.0
    """Bytes that the integer program counts."""
    is_late: bool = False
    unhidden: float | None = None
    """Seconds of the program of a device that hides no communication."""
    others: tuple[Price, ...] = ()


class Program:
    """Stands for the search on a mesh with one traced program: its steps are by mesh and number of
    microbatches."""

    traced = SimpleNamespace(params={})
    cluster = SimpleNamespace(num_devices=8)
    workload = SimpleNamespace(batch=8)
    capacity_bytes = CAPACITY
    least = 0.0

    def __init__(self, remat, steps, *, microbatches=None, state=0.0, extra=None):
        self.remat, self.microbatches, self.state = remat, microbatches, state
        self.steps = {mesh: step if isinstance(step, dict) else {1: step} for mesh, step in steps}
        self.extra = extra or {}
        self.solved = []

    def meshes(self):
        for text in self.steps:
            sizes = MeshConfig.parse(text).sizes
            yield {
                axis: sizes.get(axis, 1) for axis in ("stage", "data", "fsdp", "expert", "tensor")
            }

    def checked(self, sizes):
        return sizes

    def microbatch_counts(self, sizes):
        return list(self.steps[str(Layout.of(sizes))])

    def state_bytes(self, sizes):
        return self.state

    def state_fits(self, sizes):
        return self.state <= CAPACITY

    def least_seconds(self, sizes, microbatches):
        return self.least

    def extra_seconds(self, sizes, microbatches):
        return self.extra.get(str(Layout.of(sizes)), 0.0)

    def least_bytes(self, sizes, microbatches):
        return 0.0

    def on_mesh(self, sizes, microbatches, seconds, *, alone):
        mesh = str(Layout.of(sizes))
        step = self.steps[mesh][microbatches]
        self.solved.append((mesh, self.remat, microbatches, alone))
        step = step.lowered if alone and step.lowered else step
        unhidden = step.unhidden if alone else None
        if step.is_late:
            raise PartitionError("no layout was found in time.")
        if step.layout_bytes > CAPACITY:
            raise DoesNotFitError("no layout fits", int(step.layout_bytes))
        objective = SimpleNamespace(
            capacity_bytes=CAPACITY, reserved_bytes=0.0, state_axes=(), microbatches=microbatches
        )
        return FoundRules(
            sizes,
            "8xh100",
            AxisRules({"layers": "stage"}, {"batch": "data+fsdp+tensor"}),
            classes=None,
            names={},
            solution=SimpleNamespace(memory_bytes=step.layout_bytes, seconds=step.seconds),
            prices=(Price("found", step.seconds, step.held, unhidden), *step.others),
            capacity_bytes=CAPACITY,
            traffic={},
            questions=SimpleNamespace(problem=SimpleNamespace(objective=objective)),
            compare=None,
            remat=self.remat,
        )


def search(*programs):
    makes = [lambda program=program: program for program in programs]
    return best_rules(makes, meshes=None, seconds=1.0)


def of(found):
    return found.mesh_text, found.remat, found.microbatches


def test_an_answer_that_does_not_fit_is_not_given():
    """The integer program counts less than the cost model."""
    steps = {"fsdp=8": {1: Step(2, 13), 2: Step(3, 12)}, "tensor=8": {1: Step(1, 14)}}
    with pytest.raises(DoesNotFitError, match=r"no layout fits: .* at least") as caught:
        search(Program(None, steps.items()))
    assert caught.value.needed_bytes == 12


def test_the_error_names_the_least_that_does_not_fit():
    steps = {"fsdp=8": Step(2, 13), "tensor=8": Step(1, 1, layout_bytes=11)}
    with pytest.raises(DoesNotFitError) as caught:
        search(Program(None, steps.items()))
    assert caught.value.needed_bytes == 11


def test_more_recomputation_is_tried_where_the_program_of_a_device_does_not_fit():
    none = {"fsdp=8": Step(1, 9, lowered=Step(1, 11)), "tensor=8": Step(5, 9)}
    full = {"fsdp=8": Step(2, 5), "tensor=8": Step(6, 5)}
    found = search(Program("none", none.items()), Program("full", full.items()))
    assert of(found) == ("fsdp=8", "full", 1)


def test_more_microbatches_are_tried_where_the_program_of_a_device_does_not_fit():
    steps = {"fsdp=8": {1: Step(1, 9, lowered=Step(1, 11)), 2: Step(2, 5)}, "tensor=8": Step(5, 9)}
    assert of(search(Program(None, steps.items()))) == ("fsdp=8", None, 2)


def test_another_mesh_is_taken_where_the_program_of_a_device_does_not_fit():
    steps = {"fsdp=8": Step(1, 9, lowered=Step(1, 11)), "tensor=8": Step(5, 9)}
    assert search(Program(None, steps.items())).mesh_text == "tensor=8"


def test_nothing_is_given_where_no_program_of_a_device_fits():
    steps = {mesh: Step(1, 9, lowered=Step(1, 11)) for mesh in ("fsdp=8", "tensor=8")}
    with pytest.raises(DoesNotFitError) as caught:
        search(Program(None, steps.items()))
    assert caught.value.needed_bytes == 11


def test_the_best_programs_of_devices_are_compared():
    near = {"fsdp=8": Step(1, 9, lowered=Step(3, 9)), "tensor=8": Step(2, 9, lowered=Step(2, 9))}
    assert search(Program(None, near.items())).mesh_text == "tensor=8"


def test_a_mesh_with_an_answer_is_not_late():
    none = {"fsdp=8": Step(1, 9, is_late=True), "tensor=8": Step(1, 9, is_late=True)}
    full = {"fsdp=8": Step(2, 5), "tensor=8": Step(1, 9, is_late=True)}
    found = search(Program("none", none.items()), Program("full", full.items()))
    assert (found.mesh_text, found.late) == ("fsdp=8", ("tensor=8",))


def test_a_search_without_an_answer_in_time_says_so():
    with pytest.raises(PartitionError, match="in time"):
        search(Program(None, {"fsdp=8": Step(1, 9, is_late=True)}.items()))


def test_more_recomputation_may_be_quicker_where_a_step_is_tight():
    """Memory decided the layout of the step that keeps everything."""
    full = Program("full", {"fsdp=8": Step(1, 5)}.items())
    tight = Program("none", {"fsdp=8": Step(2, 9, layout_bytes=9.5)}.items())
    assert search(tight, full).remat == "full"
    loose = Program("none", {"fsdp=8": Step(2, 9, layout_bytes=5)}.items())
    assert search(loose, full).remat == "none"


def test_a_step_is_tight_where_a_quicker_answer_of_its_mesh_does_not_fit():
    quicker = Price("whole sequences", 1.5, 11)
    none = Program("none", {"fsdp=8": Step(2, 9, others=(quicker,))}.items())
    full = Program("full", {"fsdp=8": Step(1, 5)}.items())
    assert search(none, full).remat == "full"


def test_more_microbatches_leave_stages_idle_for_less_time():
    """A step with more microbatches is slower elsewhere."""
    staged = {"stage=8": {8: Step(4, 5), 16: Step(2, 5)}, "fsdp=8": {1: Step(3, 5), 2: Step(1, 5)}}
    found = search(Program(None, staged.items()))
    assert of(found) == ("stage=8", None, 16)


def test_a_pipeline_with_other_microbatches_is_no_other_mesh():
    """Another mesh is written out, and turns out quicker."""
    staged = {n: Step(1 + n / 100, 5) for n in (8, 16, 32, 64)}
    quick = {"stage=8": staged, "fsdp=8": Step(2, 5, lowered=Step(0.5, 5))}
    assert search(Program(None, quick.items())).mesh_text == "fsdp=8"


def test_what_is_hidden_decides_beside_stages():
    """Only the program of a device shows it, and that of a pipeline is not written out."""
    steps = {"fsdp=8": Step(1, 9, unhidden=3), "stage=8": {8: Step(2, 9)}}
    assert search(Program(None, steps.items())).mesh_text == "fsdp=8"
    steps = {"fsdp=8": Step(1, 9, unhidden=3), "tensor=8": Step(1.5, 9, unhidden=2)}
    assert search(Program(None, steps.items())).mesh_text == "tensor=8"


def test_the_state_alone_may_not_fit():
    with pytest.raises(
        DoesNotFitError, match=r"the state fits in no layout: .* at least"
    ) as caught:
        search(Program(None, {"fsdp=8": Step(1, 9)}.items(), state=11.0))
    assert caught.value.needed_bytes == 11


def test_an_error_proposes_nothing_that_was_searched():
    large = {"fsdp=8": Step(2, 13)}.items()
    for microbatches, proposes in ((None, False), (1, True)):
        for names, recomputes in ((("none", "full"), False), ((None,), True)):
            with pytest.raises(DoesNotFitError) as caught:
                search(*(Program(name, large, microbatches=microbatches) for name in names))
            text = str(caught.value)
            assert ("microbatches" in text, "rematerialisation" in text) == (proposes, recomputes)


def test_a_mesh_that_cannot_be_the_quickest_is_not_solved():
    """The traffic of the program that recomputes least bounds the steps of all programs."""
    steps = {"fsdp=8": Step(3, 13), "tensor=8": Step(9, 13), "data=8": Step(3.9, 13)}
    none = Program("none", steps.items(), extra={"tensor=8": 4.5, "data=8": 2.5})
    fits = {mesh: Step(step.seconds + 1, 9) for mesh, step in steps.items()}
    full = Program("full", fits.items())
    full.least = 2.0
    assert of(search(none, full)) == ("fsdp=8", "full", 1)
    solved = [(mesh, remat) for mesh, remat, _, alone in none.solved + full.solved if not alone]
    assert solved == [("fsdp=8", "none"), ("data=8", "none"), ("fsdp=8", "full")]
