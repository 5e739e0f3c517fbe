"""A trained run is exported, and transformers computes the logits of its checkpoint."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import hf
from shardlib.cli import main
from shardlib.errors import CheckpointError
from shardlib.run import export

pytestmark = pytest.mark.mesh


def run_cli(*words):
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, words)])
    return ended.value.code


def test_transformers_computes_the_logits_of_a_run(finished, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run_dir, out = finished.copy(tmp_path / "run"), tmp_path / "out"
    assert run_cli(f"{run_dir}@20", "--out", out) == 0
    assert capsys.readouterr().out == f"exported step 20 of {run_dir} to {out} in float32\n"
    tokens = np.random.default_rng(0).integers(0, 200, (2, 12), dtype=np.int32)
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    with jax.default_matmul_precision("highest"):
        logits = hf.load(out).logits(jnp.asarray(tokens))
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    params = hf.load(out).model.token_embedding.embedding[...]
    state = finished.result.state
    np.testing.assert_array_equal(params, state.params["token_embedding"]["embedding"])


def test_refusals_leave_nothing(finished, tmp_path, capsys):
    run_dir = finished.copy(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 21|21"):
        export(str(run_dir), str(tmp_path / "out"), step=21)
    assert run_cli(run_dir, "--out", tmp_path / "out", "--architecture", "LlamaForCausalML") == 2
    assert "Did you mean 'LlamaForCausalLM'?" in capsys.readouterr().err
    assert run_cli(tmp_path / "absent", "--out", tmp_path / "out") == 2
    assert run_cli(run_dir, "--out", run_dir) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
