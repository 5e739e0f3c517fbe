"""The report on a compiled step as text, as JSON, as a page, and against another one."""

import dataclasses
import json
import os
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.explain.analysis.collectives import ProgramReport
from shardlib.explain.report.diff import diff
from shardlib.explain.report.report import report_on

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
EMBED, MLP, BATCH = 64, 256, 32


class Block(nnx.Module):
    def __init__(self, rngs):
        def kernel(*axes):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)

        options = {"use_bias": False, "rngs": rngs}
        self.up = nnx.Linear(EMBED, MLP, kernel_init=kernel("embed", "mlp"), **options)
        self.down = nnx.Linear(MLP, EMBED, kernel_init=kernel("mlp", "embed"), **options)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x)))


def loss(model, batch, rng):
    return jnp.mean(jnp.square(model(batch)))


def report(mesh, on=None):
    mesh = sl.make_mesh(mesh)
    with sl.use(mesh, sl.rules.STANDARD):
        state = sl.abstract_state(lambda rngs: Block(rngs), optax.adamw(1e-3))
        step = sl.make_train_step(loss)
    placed = NamedSharding(mesh, P(("data", "fsdp") if "data" in mesh.shape else "fsdp"))
    batch = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32, sharding=placed)
    return sl.explain(step, state, batch, on=on)


@pytest.fixture(scope="module")
def here():
    return report("fsdp=4,tensor=2")


@pytest.fixture(scope="module")
def on_tpu():
    pytest.importorskip("libtpu")
    return report("fsdp=4,tensor=2", on="v5e:2x4")


def test_a_report_adds_up(on_tpu):
    memory = on_tpu.memory
    assert sum(memory.categories.values()) == memory.peak_bytes
    # Two float32 kernels, cut 8 times, and twice that of moments.
    assert memory.categories["params"] == 2 * EMBED * MLP * 4 // 8
    sent = {c.mesh_axes for c in on_tpu.program.collectives}
    assert {("fsdp",), ("tensor",)} <= sent
    assert on_tpu.roofline.flops.total_model == 5 * 2 * BATCH * EMBED * MLP
    assert not on_tpu.program.unattributed()


def strictly(text):
    """Reads JSON as the standard has it."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_report_is_json(on_tpu):
    found = strictly(on_tpu.to_json())
    assert (found["cluster"], found["compiled_for"]) == ("v5e:2x4", "v5e:2x4")
    assert found["mesh"] == {"fsdp": 4, "tensor": 2}
    assert found["fits"] is True
    assert sum(found["memory_bytes"].values()) == found["peak_bytes"]
    assert max(size for _, size in found["timeline"]) == found["live_bytes"]
    assert {row["path"] for row in found["params"]["rows"]} >= {"up/kernel", "down/kernel"}
    assert (found["unattributed_bytes"], found["unread"], found["unread_bytes"]) == (0, {}, 0)
    assert found["findings"] == [finding.to_dict() for finding in on_tpu.findings]
    assert (found["accepted"], found["fixes"], found["choices"]) == ([], [], {})
    flops = found["roofline"]["flops"]
    assert flops["total_model"] == on_tpu.roofline.flops.total_model
    assert found["roofline"]["binding"] == on_tpu.roofline.binding
    gathers = [c for c in found["collectives"] if c["kind"] == "all-gather"]
    assert gathers[0]["sent_bytes"] == max(
        c.sent_bytes for c in on_tpu.collectives if c.kind == "all-gather"
    )
    assert gathers[0]["model_path"] in ("up", "down")
    assert gathers[0]["phase"] in ("forward", "backward")
    assert list(gathers[0]["seconds"]) == ["ici"]


def test_json_has_one_shape_on_every_platform(here, on_tpu):
    first, other = (strictly(report.to_json()) for report in (here, on_tpu))
    assert first.keys() == other.keys()
    assert first["roofline"].keys() == other["roofline"].keys()
    assert first["largest_buffers"][0].keys() == other["largest_buffers"][0].keys()
    collective = first["collectives"][0]
    assert collective.keys() == other["collectives"][0].keys()
    assert (collective["seconds"], collective["overlap"]) == ({}, "unknown")


def test_a_number_that_is_none_is_null(here):
    stage = dataclasses.replace(here.roofline.stages[0], memory_bytes=0.0)
    roofline = dataclasses.replace(here.roofline, stages=(stage,), peak_flops=float("nan"))
    found = strictly(dataclasses.replace(here, roofline=roofline).to_json())
    assert found["roofline"]["stages"][0]["intensity"] is None
    assert found["roofline"]["peak_flops"] is None


def test_what_is_not_attributed_is_told_with_its_bytes(here):
    lost = dataclasses.replace(here.program.collectives[0], mesh_axes=None)
    program = ProgramReport(here.program.mesh, (lost,), {"send": 2}, 3 * 2**20)
    found = dataclasses.replace(here, program=program)
    notes = next(t for t in found.tables() if t.title == "collectives of a step").notes
    assert notes[0].startswith(f"follows no mesh axes: {lost.kind} ")
    assert notes[1] == "not read: 2 send, 3.0 MiB sent"
    facts = found.to_dict()
    assert facts["unattributed_bytes"] == lost.sent_bytes
    assert (facts["unread"], facts["unread_bytes"]) == ({"send": 2}, 3 * 2**20)


def test_a_step_of_ones_own_that_does_not_fit_says_what_to_do():
    pytest.importorskip("libtpu")
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    whole = jax.ShapeDtypeStruct((2**15, 2**15), jnp.float32, sharding=NamedSharding(mesh, P()))
    found = sl.explain(jax.jit(lambda a: (a + 1.0, a * 2.0, jnp.sin(a))), whole, on="v5e-8")
    assert not found.fits
    (line,) = found.fixes
    assert line.startswith("most of it is outputs (")
    assert f"\n{line}\n" in str(found)
    assert found.to_dict()["fixes"] == [line]


def test_a_step_against_itself_and_on_another_mesh(here):
    assert str(diff(here, here)).endswith("the steps do not differ\n")
    other = report("data=2,fsdp=4")
    found = diff(here, other)
    assert found.titles == (here.title(), other.title())
    assert found.specs["up/kernel"] == ("fsdp, tensor", "fsdp, -")
    by_name = {change.what: change for change in found.changes}
    # Kernels are cut four times instead of eight.
    assert by_name["memory: params"].ratio == 2.0
    assert by_name["sent: all-reduce over tensor"].after is None
    assert "parameters placed otherwise" in str(found)
    named = diff(here, here, names=("a.yaml", "a.yaml rules=zero1"))
    assert named.titles == (f"a.yaml: {here.title()}", f"a.yaml rules=zero1: {here.title()}")
    assert json.loads(json.dumps(found.to_dict()))["specs"]["up/kernel"] == [
        "fsdp, tensor",
        "fsdp, -",
    ]


def test_a_page_needs_no_network(on_tpu):
    page = on_tpu.html()
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|<script", page)
    assert page.count("<svg") >= 4


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_the_page(on_tpu, tmp_path):
    """What Chromium has drawn: its tree after layout, measured by a script of the test's own."""
    probe = """<script>
    const boxes = [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect());
    const wide = document.documentElement.scrollWidth > window.innerWidth;
    const heat = document.querySelectorAll('rect.heat').length;
    const drawn = boxes.filter(b => b.width > 50 && b.height > 20).length;
    document.title = `svgs ${drawn}/${boxes.length} heat ${heat} overflow ${wide}`;
    </script>"""
    (tmp_path / "page.html").write_text(on_tpu.html().replace("</body>", probe + "</body>"))
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,900",
            "--dump-dom", (tmp_path / "page.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    found = re.search(r"<title>svgs (\d+)/(\d+) heat (\d+) overflow (\w+)</title>", done.stdout)
    assert found, done.stderr
    drawn, svgs, heat, overflow = found.groups()
    assert drawn == svgs
    assert int(svgs) >= 5
    # Each of 8 devices sends along fsdp, and along tensor.
    assert int(heat) >= 16
    assert overflow == "false"


def test_a_program_is_read_once(here):
    class Text(str):
        readings = 0

        def splitlines(self, *arguments):
            Text.readings += 1
            return super().splitlines(*arguments)

    again = report_on(dataclasses.replace(here.step, text=Text(here.step.text)), here.params)
    assert Text.readings == 1
    assert again.to_dict() == here.to_dict()
