"""Sizes of public models and FLOPs by convention, against what their papers and records say."""

import dataclasses
import json
from pathlib import Path

import pytest

from published.model import model_of
from shardlib.cost.transformer.flops import attended_pairs, step_flops
from shardlib.cost.workload import FULL, FULL_EAGER, NONE, SELECTIVE, Job, Remat, Transformer

RUNS = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.json").read_text()
)


def public(name):
    return model_of({"model": name}, RUNS["model_dims"]["dims"], [])


def test_flops_of_records_by_their_own_convention():
    """Each record of tokens/s and TFLOP/s implies FLOPs per token by one of the conventions."""
    agreeing = []
    for row in RUNS["rows"]:
        check = row.get("check")
        if not check or check["rel_err_vs_closest"] > 0.002 or "moe" in row["model"].lower():
            continue
        model = model_of(row, RUNS["model_dims"]["dims"], [])
        job = Job(model, row["seq_len"], 1)
        per_token = step_flops(job, check["closest"]) / row["seq_len"] / 1e9
        # The table of positions counts as a parameter for some, and in others it does not.
        assert per_token == pytest.approx(check["implied_gflops_per_token"], rel=0.02), row["id"]
        agreeing.append(row["id"])
    assert len(agreeing) > 80


def test_hardware_flops_are_those_of_narayanan_2021():
    length, batch, layers, embed, vocab = 2048, 7, 80, 12288, 51200
    model = Transformer(layers, embed, 96, 96, 128, 4 * embed, vocab, gated=False, tied=True)
    job = Job(model, length, batch, remat=FULL_EAGER)
    shape = 1 + length / (6 * embed) + vocab / (16 * layers * embed)
    expected = 96 * batch * length * layers * embed**2 * shape
    assert step_flops(job, "hardware") == pytest.approx(expected, rel=1e-12)
    selective = step_flops(dataclasses.replace(job, remat=SELECTIVE), "hardware")
    attention = 4 * batch * length**2 * embed * layers
    assert selective == pytest.approx(step_flops(job, "full") + attention, rel=1e-12)


def test_windows_and_masks_leave_fewer_pairs():
    model = Transformer(6, 64, 4, 4, 16, 256, 100, window=8, windowed_layers=5)
    # Five layers see 8 positions: 32 * 8 - 8 * 8 / 2; one sees 32 * 32 / 2.
    assert attended_pairs(model, 32, causal=True) == 5 * 224 + 512
    assert attended_pairs(model, 4, causal=True) == 6 * 8
    assert attended_pairs(model, 32, causal=False) == 5 * 256 + 1024


def test_what_is_computed_again():
    assert not any(NONE.again(name) for name in ("qkv", "attention", "up", "down"))
    assert [FULL.again(name) for name in ("qkv", "up", "down")] == [1, 1, 0]
    assert FULL_EAGER.again("down") == 1
    assert Remat(frozenset(), half=frozenset({"up"})).again("up") == 0.5
