"""The report on a compiled step as text, as JSON, as a page, and against another one."""

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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.explain.diff import diff

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
    rows = NamedSharding(mesh, P(("data", "fsdp") if "data" in mesh.shape else "fsdp"))
    batch = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32, sharding=rows)
    return sl.explain(step, state, batch, on=on)


@pytest.fixture(scope="module")
def here():
    return report("fsdp=4,tensor=2")


@pytest.fixture(scope="module")
def on_tpu():
    pytest.importorskip("libtpu")
    return report("fsdp=4,tensor=2", on="v5e:2x4")


def test_a_report_says_where_it_fits(here, on_tpu):
    assert here.title() == "step on mesh fsdp=4,tensor=2 of the devices at hand"
    assert re.fullmatch(r"needs [\d.]+ KiB on each device", here.verdict())
    assert on_tpu.title() == "step on mesh fsdp=4,tensor=2 of v5e:2x4"
    assert re.fullmatch(
        r"fits: needs [\d.]+ [KM]iB of 15\.8 GiB on each device, 0%", on_tpu.verdict()
    )


def test_a_report_adds_up(on_tpu):
    memory = on_tpu.memory
    assert sum(memory.categories.values()) == memory.peak_bytes
    # Two float32 kernels, cut 8 times, and twice that of moments.
    assert memory.categories["params"] == 2 * EMBED * MLP * 4 // 8
    sent = {c.mesh_axes for c in on_tpu.program.collectives}
    assert {("fsdp",), ("tensor",)} <= sent
    assert on_tpu.roofline.flops.total_model == 5 * 2 * BATCH * EMBED * MLP
    assert not on_tpu.program.unattributed()


def test_a_report_prints_its_tables(on_tpu):
    text = str(on_tpu)
    for title in (
        "memory of one device at the peak",
        "largest buffers at the peak",
        "collectives of a step",
        "what bounds each part of the step",
    ):
        assert title in text
    assert "all-gather" in text
    assert "test_report.py" in text, "the user's own lines are named"


def test_a_report_is_json(on_tpu):
    found = json.loads(on_tpu.to_json())
    assert found["cluster"] == "v5e:2x4"
    assert found["mesh"] == {"fsdp": 4, "tensor": 2}
    assert found["fits"] is True
    assert sum(found["memory_bytes"].values()) == found["peak_bytes"]
    assert {row["path"] for row in found["params"]["rows"]} >= {"up/kernel", "down/kernel"}
    kinds = {flow["collective"]["kind"] for flow in found["collectives"]}
    assert "all-gather" in kinds


def test_a_step_against_itself_and_on_another_mesh(here):
    assert str(diff(here, here)).endswith("the steps do the same\n")
    other = report("data=2,fsdp=4")
    found = diff(here, other)
    assert found.titles == (here.title(), other.title())
    assert found.specs["up/kernel"] == ("fsdp, tensor", "fsdp, -")
    by_name = {change.what: change for change in found.changes}
    # Kernels are cut four times instead of eight.
    assert by_name["memory: params"].ratio == 2.0
    assert by_name["sent: all-reduce over tensor"].after is None
    assert "parameters placed otherwise" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["specs"]["up/kernel"] == [
        "fsdp, tensor",
        "fsdp, -",
    ]


def test_a_page_needs_no_network(on_tpu):
    page = on_tpu.html()
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|<script", page)
    assert on_tpu.verdict() in page
    assert page.count("<svg") >= 4
    for table in on_tpu.tables():
        assert f"<h2>{table.title}</h2>" in page


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


def test_what_cannot_be_explained():
    with pytest.raises(TypeError) as caught:
        sl.explain(3)
    assert str(caught.value) == (
        "explain takes a training state, or a function with its arguments, not int and 0 more"
    )
