"""The closed forms of traffic, and programs of two axes that send what they say."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def forms(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("closed_forms")


# Of a layer: 2 * 4 * 1 * (2 + 1) = 24 in attention, 3 * 4 * 8 = 96 in the MLP; 40 in each table.
SMALL = {"layers": 2, "embed": 4, "heads": 2, "kv_heads": 1, "head_dim": 1, "mlp": 8, "vocab": 10}
SMALL |= {"batch": 8, "length": 16}
LAYERS, TABLES, TOKENS = 2 * (24 + 96), 2 * 40, 8 * 16


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"mesh": {"data": 4}}, {"data": 2 * 3 / 4 * (LAYERS + TABLES) * 4}),
        ({"mesh": {"fsdp": 4}}, {"fsdp": 3 / 4 * (3 * LAYERS + 2 * TABLES) * 4}),
        ({"mesh": {"fsdp": 4}, "zero": 2}, {"fsdp": 3 / 4 * 2 * (LAYERS + TABLES) * 4}),
        (
            {"mesh": {"data": 2, "fsdp": 4}},
            {
                "data": 2 * 1 / 2 * (LAYERS + TABLES) / 4 * 4,
                "fsdp": 3 / 4 * (3 * LAYERS + 2 * TABLES) * 4,
            },
        ),
        # Four all-reduces a layer, and two, of [tokens, embed].
        ({"mesh": {"tensor": 2}}, {"tensor": 10 * 2 * 1 / 2 * TOKENS * 4 * 4}),
        (
            {"mesh": {"context": 4}},
            {
                # Three hops of [tokens / 4, kv_heads * head_dim]: K, V, again, and their gradients.
                "context": 2 * 3 * 6 * TOKENS / 4 * 4 + 2 * 3 / 4 * (LAYERS + TABLES) * 4
            },
        ),
        (
            {"mesh": {"context": 4}, "shared": "ulysses"},
            {
                # Query, key, value and output, forward and backward.
                "context": 2 * 2 * 3 / 4 * TOKENS / 4 * 6 * 4 + 2 * 3 / 4 * (LAYERS + TABLES) * 4
            },
        ),
        (
            {"mesh": {"stage": 2}, "microbatches": 4},
            {"stage": 2 * TOKENS * 4 * 4 + 2 * 1 / 2 * TABLES * 4},
        ),
    ],
    ids=str,
)
def test_closed_forms(forms, strategy, expected):
    found = forms.sent_bytes(forms.Sizes(**SMALL), forms.Strategy(**strategy))
    assert found == pytest.approx(expected)


def test_experts_send_copies_of_tokens_four_times(forms):
    sizes = forms.Sizes(**SMALL, experts=4, experts_per_token=2)
    found = forms.sent_bytes(sizes, forms.Strategy({"expert": 4}))
    exchanged = 2 * 4 * 3 / 4 * TOKENS / 4 * 2 * 4 * 4
    replicated = 2 * 3 / 4 * (2 * 24 + TABLES) * 4
    assert found == pytest.approx({"expert": exchanged + replicated})


def test_programs_for_the_cpu_send_what_the_forms_say():
    # Large enough that what travels is no small collective.
    sizes = {"layers": 2, "embed": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "mlp": 1024}
    sizes |= {"vocab": 1024, "batch": 16, "length": 64}
    command = [sys.executable, str(BENCHMARKS / "collectives.py"), "--platforms=cpu"]
    command += ["--rows=fsdp,tensor_sequence", *(f"--size={k}={v}" for k, v in sizes.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["row"] for row in rows] == ["fsdp", "tensor_sequence"]
    for row in rows:
        # Gradients of the scales of norms go with those of matrices.
        assert row["folded_ratio"] == pytest.approx(1.0, abs=2e-3), row
        assert row["sent"] > row["folded"], "XLA for CPU makes no reduce-scatter"
        assert row["trips_known"]
    assert "all-reduces of which a part is read" in rows[0]["why"]
