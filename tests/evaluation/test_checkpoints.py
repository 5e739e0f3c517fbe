"""`shardlib evaluate` of a run: its held-out metrics, counted by hand, and refusals."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from shardlib import run
from shardlib.config import load
from shardlib.run import RunConfig
from shardlib.run.setup import open_source

pytestmark = pytest.mark.mesh

TEXT = "\n".join(f"the {i} quick brown foxes jump over {i * i} lazy dogs" for i in range(300))
WORDS = (
    "model.num_layers=2",
    "model.embed_dim=32",
    "model.num_heads=4",
    "model.mlp_dim=64",
    "model.vocab_size=304",
    "data.tokenizer=bpe",
    "data.vocab_size=300",
    "data.separator='\n'",
    "data.sequence_length=32",
    "data.eval_fraction=0.2",
    "train.global_batch=8",
    "train.steps=4",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "eval.every_steps=0",
    "train.sample_length=0",
    "mesh=fsdp=8",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    (place / "text.txt").write_text(TEXT)
    words = (*WORDS, f"run_dir={place / 'run'}", f"data.path={place / 'text.txt'}")
    config = load(RunConfig, None, list(words))
    return place / "run", config, run.train(config).state


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_metrics_are_those_counted_by_hand(shardlib, trained, mesh):
    place, config, state = trained
    code, out, err = shardlib("evaluate", f"{place}@4", "--mesh", mesh, "--json")
    assert code == 0, err
    found = json.loads(out)
    source, nats, hits, count, num_bytes = open_source(config, "eval"), 0.0, 0, 0, 0
    model = state.model
    model.eval()
    for step in range(source.num_steps):
        batch = source.read(step, 0, 8)
        rows = {k: jnp.asarray(batch[k]) for k in ("tokens", "positions", "segment_ids")}
        logits = np.asarray(jax.jit(lambda m, r: m(**r))(model, rows), np.float64)
        logits -= logits.max(-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        seen = batch["segment_ids"] > 0
        taken = np.take_along_axis(logprobs, batch["targets"][..., None], -1)[..., 0]
        nats -= taken[seen].sum()
        hits += (logprobs.argmax(-1) == batch["targets"])[seen].sum()
        count += seen.sum()
        num_bytes += batch["num_bytes"].sum()
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-4)
    assert found["accuracy"] == pytest.approx(hits / count, abs=1.5 / count)


def test_an_export_says_which_token_ends_a_text(shardlib, trained, tmp_path):
    assert shardlib("export", trained[0], "--out", tmp_path / "out")[0] == 0
    said = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    named = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    tokens = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["added_tokens"]
    assert {"id": said["eos_token_id"], "content": named["eos_token"]}.items() <= tokens[0].items()


OWN = {
    "task": "own",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
}


def test_tasks_of_a_run(shardlib, trained, tmp_path):
    pytest.importorskip("lm_eval")
    rows = [{"text": f"the {i}", "choices": [" quick", " lazy"], "label": 0} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**OWN, "dataset_kwargs": files}))
    words = ("--tasks", "own", "--include-path", tmp_path, "--rows", "3", "--limit", "4")
    code, out, err = shardlib("evaluate", trained[0], *words)
    assert code == 0, err
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["own", "acc"],
        ["own", "acc_norm"],
    ]
    code, _, err = shardlib("evaluate", trained[0], *words, "--chat")
    assert code != 0
    assert "was not trained on chats" in err


def test_wrong_requests(shardlib, trained, tmp_path):
    code, _, err = shardlib("evaluate", trained[0], "--limit", "3")
    assert (code, err) == (
        2,
        "ConfigError: --limit needs --tasks.\n  Name tasks, or leave it out.\n",
    )
    code, _, err = shardlib("evaluate", tmp_path)
    assert code == 2
    assert "does not hold a run" in err
