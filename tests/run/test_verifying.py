"""Plans are compiled, and ranked again by what their programs hold and send."""

import json

import pytest

pytestmark = pytest.mark.aot

pytest.importorskip("libtpu")

CONFIG = """
run_dir: unused
model: {name: transformer, num_layers: 2, embed_dim: 256, num_heads: 4, num_kv_heads: 2,
  mlp_dim: 512, vocab_size: 512}
data: {path: /nowhere, tokenizer: bytes, sequence_length: 256, eval_fraction: 0.2}
train: {steps: 20, global_batch: 16, sample_length: 0}
eval: {every_steps: 0}
precision: bf16
"""


def test_the_best_plans_are_compiled_and_ranked_again(shardlib, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    code, out, err = shardlib(
        "plan", str(path), "--on", "v5e-8", "--verify", "2", "--top", "2", "--json"
    )
    assert code == 0, err
    facts = json.loads(out)
    first, second = facts["verified"]
    assert {first["mesh"], second["mesh"]} == {
        plan["settings"]["mesh"] for plan in facts["plans"][:2]
    }
    assert first["seconds"] <= second["seconds"]
    for found in (first, second):
        assert found["fault"] == ""
        assert found["peak_bytes"] < 15.75 * 2**30
        # The program sends what the cost model says it would, but for start-ups and scalars.
        assert 0.3 < found["traffic"] < 3.0
