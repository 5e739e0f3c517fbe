"""Secrets planted in the environment and in URLs come to light nowhere that a run writes."""

import os
import pathlib

import pytest

CANARY = "c4n4ry"
SECRETS = {
    "WANDB_API_KEY": f"{CANARY}{'0' * 34}",
    "HF_TOKEN": f"hf_{CANARY}",
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}/aws",
    "GITHUB_TOKEN": f"ghp_{CANARY}",
    "HTTPS_PROXY": f"http://me:{CANARY}@localhost:1",
    "MY_PASSWORD": CANARY,
}
URL = f"https://me:{CANARY}@host/text?X-Amz-Signature={CANARY}"


def shown_by(lab, *words):
    """Runs the command line with secrets around it; returns its exit code and all it printed."""
    done = lab.shardlib(*words, env=os.environ | SECRETS)
    return done.returncode, done.stdout + done.stderr


def holding(word, *folders):
    """The files that hold a word, or are called by it."""
    files = [file for folder in folders for file in pathlib.Path(folder).rglob("*")]
    return [
        file
        for file in files
        if word in file.name or (file.is_file() and word.encode() in file.read_bytes())
    ]


@pytest.mark.process
def test_a_run_and_what_it_writes(lab, tmp_path):
    run_dir = tmp_path / "run"
    less = ["eval.every_steps=0", "train.sample_length=0", "train.steps=3"]
    words = ["train", lab.config_file, f"run_dir={run_dir}", *less]
    code, text = shown_by(lab, *words)
    assert (code, CANARY in text) == (0, False), text
    written = {file.name for file in run_dir.rglob("*")}
    assert {"config.yaml", "tokenizer.json", "metrics.jsonl", "checkpoints"} <= written
    # What is to be recorded is found by the same search, beside the arrays too.
    recorded = holding("learning_rate", run_dir)
    assert run_dir / "config.yaml" in recorded
    assert any(run_dir / "checkpoints" in file.parents for file in recorded)
    assert holding(CANARY, run_dir, lab.root) == []
    # Resumed, and refused with its config and its URL.
    code, text = shown_by(lab, *words, "train.steps=4", f"data.path={URL}")
    assert code == 2
    assert "data.path: '" in text
    assert "'https://***@host/text?X-Amz-Signature=***' now" in text
    assert CANARY not in text
    assert holding(CANARY, run_dir, lab.root) == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("override", "exit_code", "part"),
    [
        (f"data.path={URL}", 1, "no file matches 'https://***@host/text?X-Amz-Signature=***'."),
        (f"train.steps={URL}", 2, "expected an integer, got 'https://***@host/"),
        (f"run_dir={URL}", 2, "run_dir https:/***@host/"),
    ],
    ids=["data", "config", "directory"],
)
def test_tracebacks_of_failures(lab, tmp_path, override, exit_code, part):
    words = ["train", lab.config_file, f"run_dir={tmp_path}/run", override, "--debug"]
    code, text = shown_by(lab, *words)
    assert code == exit_code
    assert text.startswith("Traceback")
    assert part in text
    assert CANARY not in text
    assert holding(CANARY, tmp_path, lab.root) == []
