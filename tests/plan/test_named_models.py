"""Dims of named models agree with their published numbers of parameters."""

import pytest

from shardlib.plan.workloads.named_models import named_model


@pytest.mark.parametrize(
    ("name", "embedding", "others"),
    # Gemma Team 2025, "Gemma 3 Technical Report", table 1, in millions, without the vision encoder.
    [("gemma3-4b", 675, 3209), ("gemma3-12b", 1012, 10759), ("gemma3-27b", 1416, 25600)],
)
def test_gemma3(name, embedding, others):
    model = named_model(name).model
    assert model.vocab_weights == pytest.approx(embedding * 1e6, rel=0.01)
    assert model.num_params - model.vocab_weights == pytest.approx(others * 1e6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "total"),
    # Meta 2025, model cards of Llama 4: 109B and 400B parameters, of which a token uses 17B.
    [("llama4-scout", 109), ("llama4-maverick", 400)],
)
def test_llama4(name, total):
    model = named_model(name).model
    assert model.num_params == pytest.approx(total * 1e9, rel=0.02)
    assert model.active_weights + model.vocab_weights == pytest.approx(17e9, rel=0.05)
