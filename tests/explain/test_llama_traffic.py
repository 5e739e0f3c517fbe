"""What is reported of Llama 3 8B on four clusters, against closed forms and a second reading.

Nothing is shrunk: all layers, the mesh of the config, and on each device a row of 8,192 tokens in
each microbatch. On clusters for which the batch of the config is too large, or too small for its 8
microbatches, one of the two is less.
"""

import collections
import dataclasses
import io
from pathlib import Path

import pytest
from documents import assert_shown, examples
from rich.console import Console
from second_reading import sent_bytes

from shardlib.config import load
from shardlib.run.config import RunConfig
from shardlib.run.reports.explaining import explain_compiled

pytestmark = pytest.mark.aot

CONFIG = Path(__file__).parents[2] / "configs" / "llama3_8b.yaml"
LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 32, 4096, 32, 8, 128, 14336, 128256
LENGTH = 8192
FSDP = 8
BF16, F32 = 2, 4

QUERY = EMBED * HEADS * HEAD_DIM
KEY = EMBED * KV_HEADS * HEAD_DIM
BLOCKS = LAYERS * (2 * QUERY + 2 * KEY + 3 * EMBED * MLP)
"""Weights of the matrices of all layers."""
TABLE = VOCAB * EMBED
"""Weights of the embedding, and of the head."""
NORMS = (2 * LAYERS + 1) * EMBED
"""Weights of the norms, which every device has."""

ICI, DCN = "ici", "dcn"
F, D, ALL = ("fsdp",), ("data",), ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class Case:
    cluster: str
    overrides: tuple[str, ...]
    data: int
    microbatches: int = 8
    slices: int = 1
    module: str = "libtpu"
    fits: bool = True
    is_soak: bool = False

    @property
    def extra(self):
        return "tpu" if self.module == "libtpu" else "cuda"


CASES = [
    Case("v5e-16", ("train.global_batch=128",), data=2, fits=False),
    Case("v5p-128", (), data=8, is_soak=True),
    Case("2xv5e-256", ("train.microbatches=1",), 64, microbatches=1, slices=2, fits=False),
    # Whether cuDNN is installed decides what else would compute attention.
    Case("64xh100", ("model.attention=blockwise",), data=8, module="jax_cuda12_plugin"),
]


PARAMS = [
    pytest.param(case, marks=[pytest.mark.soak] * case.is_soak, id=case.cluster) for case in CASES
]


@pytest.fixture(scope="module", params=PARAMS)
def compiled(request, tmp_path_factory):
    """A case and the report on its step."""
    case = request.param
    pytest.importorskip(case.module, reason=f"needs the extra {case.extra}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDLIB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.chdir(tmp_path_factory.mktemp("no_data"))
        config = load(RunConfig, CONFIG, list(case.overrides))
        return case, explain_compiled(config, case.cluster, most_fixes=0)


@pytest.mark.parametrize("compiled", PARAMS[:1], indirect=True)
def test_the_report_is_that_of_the_guide(compiled):
    """But for its fixes."""
    case, report = compiled
    ((command, *lines),) = examples("shardlib explain")
    overrides, cluster = command.split("llama3_8b.yaml ")[1].split(" --on ")
    assert (case.cluster, case.overrides) == (cluster, (overrides,))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.render())
    shown = [line for line in lines if not line.startswith("fits with ")]
    assert_shown(shown, console.export_text().splitlines())


def reported(report):
    """Bytes that a device sends, by kind, mesh axes and network."""
    found = collections.Counter()
    for collective in report.program.collectives:
        network = DCN if collective.between_slices else ICI
        found[collective.kind, collective.mesh_axes, network] += collective.sent_bytes
    return found


def by_axes(sent):
    found = collections.Counter()
    for (_, axes, network), size in sent.items():
        found[axes, network] += size
    return found


def part(devices):
    """Of a buffer, what a device sends to gather it, or to reduce and scatter it, in a ring."""
    return (devices - 1) / devices


def on_tpus(case):
    """Fully sharded data parallelism as it is written down: Rajbhandari et al. 2020, "ZeRO",
    section 7.2.2, for each microbatch, with parameters and gradients in bfloat16.

    Matrices of layers are gathered forward, and again backward, since their forward pass is
    recomputed; the head once. Vectors of tokens are exchanged, and so are their gradients.
    Gradients are reduced to the parts of `fsdp` in each microbatch, and over `data` once a step, in
    float32. With one microbatch they are reduced over both at once, matrices in bfloat16.
    """
    times, devices = case.microbatches, case.data * FSDP
    each = {
        ("all-gather", F, ICI): times * part(FSDP) * BF16 * (2 * BLOCKS + TABLE),
        ("all-to-all", F, ICI): times * part(FSDP) * BF16 * 2 * LENGTH * EMBED,
        ("reduce-scatter", F, ICI): times * part(FSDP) * BF16 * (BLOCKS + TABLE),
    }
    matrices = (BLOCKS + 2 * TABLE) / FSDP
    if times == 1:
        return each | {
            ("all-reduce", D, ICI): 2 * part(case.data) * BF16 * matrices,
            ("all-reduce", ALL, ICI): 2 * part(devices) * F32 * NORMS,
        }
    return each | {
        ("all-reduce", F, ICI): times * 2 * part(FSDP) * BF16 * (NORMS + EMBED),
        ("all-reduce", D, ICI): 2 * part(case.data) * F32 * (matrices + NORMS),
    }


def on_gpus(case):
    """The same, with the gradients of norms in float32, that of the last one once a step."""
    norms = case.microbatches * (NORMS - EMBED) + EMBED
    return on_tpus(case) | {("all-reduce", F, ICI): 2 * part(FSDP) * F32 * norms}


def on_slices(case):
    """As on TPUs within a slice; all-reduces that cross slices have three parts: gradients are
    reduced and scattered within a slice, each device reduces its part with the devices of the other
    slices that have the same, and the slice gathers them."""
    inner = dataclasses.replace(case, data=case.data // case.slices)
    devices = inner.data * FSDP
    within = on_tpus(inner)
    scattered = within.pop(("all-reduce", D, ICI)) / 2
    between = BF16 * (BLOCKS + 2 * TABLE) / devices + F32 * NORMS
    return within | {
        ("reduce-scatter", D, ICI): scattered,
        ("all-gather", D, ICI): scattered,
        ("all-reduce", D, DCN): 2 * part(case.slices) * between,
    }


def closed_form(case):
    if case.extra == "cuda":
        return on_gpus(case)
    return on_slices(case) if case.slices > 1 else on_tpus(case)


def test_every_byte_has_its_axes(compiled):
    case, report = compiled
    assert dict(report.step.mesh_sizes) == {"data": case.data, "fsdp": FSDP}
    assert report.step.compiled_for == case.cluster
    assert report.program.unattributed_share == 0
    assert report.program.unread == {}
    assert all(collective.trips_known for collective in report.program.collectives)


def test_traffic_is_that_of_a_second_reading(compiled):
    case, report = compiled
    again = sent_bytes(report.step.text, dict(report.step.mesh_sizes), case.slices)
    found = {key: sent for key, sent in reported(report).items() if sent}
    assert again == pytest.approx(found, rel=1e-9)


def test_traffic_is_that_of_closed_forms(compiled):
    case, report = compiled
    found, expected = reported(report), closed_form(case)
    # Besides: single numbers, and where parts are padded to whole tiles, what moves them back.
    besides = sum(sent for key, sent in found.items() if key not in expected)
    assert besides < 1e-3 * found.total()
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=0.02)
    axes = by_axes(found)
    assert axes == pytest.approx(by_axes(expected), rel=0.02)
    assert set(axes) == set(by_axes(expected))


def state_bytes(width):
    """What a device has of a tree of the shape of the parameters."""
    return width * ((BLOCKS + 2 * TABLE) // FSDP + NORMS)


def arguments_bytes(case):
    """Parameters and both moments of Adam in float32; and of each token its number, target, place
    and document, in four bytes each."""
    return state_bytes(3 * F32) + case.microbatches * LENGTH * 4 * 4


def test_state_is_that_of_the_specification(compiled):
    case, report = compiled
    # Counters and keys, which TPUs pad.
    assert 0 <= report.step.memory["argument"] - arguments_bytes(case) < 4096
    assert 0 <= report.memory.categories["optimizer"] - state_bytes(2 * F32) < 4096
    assert 0 <= report.memory.categories["batch"] - case.microbatches * LENGTH * 16 < 4096
    assert report.memory.categories["params"] >= state_bytes(F32)


def peak_form(case):
    """The closed form of what is held where most is: arguments, sums of gradients over microbatches
    in float32, parameters in bfloat16, what goes into each layer and out of the last; and

    - while the loss is computed: the head, whole, and the logits;
    - on v5p, which has the room, a second array of the size of the logits, which on v5e is computed
      again or in place;
    - on H100 the buffers that gradients of layers are to be added into;
    - on a v5e with microbatches the backward pass of a layer holds more: the gradients of layers,
      and of an MLP two gathered matrices, one gradient and three hidden vectors.
    """
    residual, logits = BF16 * LENGTH * EMBED, BF16 * LENGTH * VOCAB
    held = arguments_bytes(case) + BF16 * BLOCKS / FSDP + (LAYERS + 1) * residual
    if case.microbatches > 1:
        held += F32 * (BLOCKS + 2 * TABLE) / FSDP + BF16 * 2 * TABLE / FSDP
    if case.cluster == "v5e-16":
        return held + BF16 * (BLOCKS / FSDP + 3 * EMBED * MLP + 3 * LENGTH * MLP)
    held += BF16 * TABLE + logits
    if case.cluster == "2xv5e-256":
        return held
    return held + (logits if case.extra == "tpu" else BF16 * BLOCKS / FSDP)


def test_peak_is_that_of_closed_forms_and_of_the_compiler(compiled):
    case, report = compiled
    memory, said = report.memory, report.step.memory
    assert memory.peak_bytes == said["peak"] + said["generated_code"]
    assert sum(memory.categories.values()) == memory.peak_bytes
    # Live ranges are read out of the text; the peak is the compiler's own account.
    assert memory.live_bytes == pytest.approx(said["peak"], rel=1e-4)
    # What the form leaves out is of the size of vectors and matrices of one layer.
    assert said["peak"] == pytest.approx(peak_form(case), rel=0.03)
    assert report.fits == case.fits
