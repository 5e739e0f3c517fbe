"""A server of an encoder, by the official client."""

import base64

import numpy as np
import openai
import pytest
from byte_decoder import SPEAKER, TEXT, serving
from flax import nnx

from shardlib.engine import Engine
from shardlib.registry import DataSpec
from shardlib_models.bert import BertConfig
from shardlib_models.bert_losses import MASKED


class ServedEncoder:
    """An encoder whose tokens are bytes."""

    family, scope, tokenizer, end_tokens = MASKED, None, TEXT, (TEXT.eot,)

    def __init__(self):
        config = BertConfig(
            embed_dim=64, num_layers=1, num_heads=4, vocab_size=257, max_positions=64, head="none"
        )
        self.model = MASKED.make(config, DataSpec(), nnx.Rngs(0))
        self.model.eval()
        self.config = self.model.config


@pytest.mark.mesh
def test_the_official_client_gets_embeddings_of_an_encoder():
    engine = Engine(ServedEncoder(), slots=4)
    alone = engine.embed(["one", "two words"])
    with serving(engine, speaker=SPEAKER) as (service, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for form in ("float", "base64"):
            found = client.embeddings.create(
                model="tiny", input=["one", "two words"], encoding_format=form
            )
            vectors = [one.embedding for one in found.data]
            if form == "base64":
                vectors = [np.frombuffer(base64.b64decode(one), "<f4") for one in vectors]
            np.testing.assert_array_equal(np.asarray(vectors, np.float32), alone)
            assert found.usage.prompt_tokens == 12
        with pytest.raises(openai.BadRequestError, match="writes no text"):
            client.completions.create(model="tiny", prompt="one")
        with pytest.raises(openai.BadRequestError, match="65 tokens, and the model embeds at"):
            client.embeddings.create(model="tiny", input="x" * 65)
        assert service.thread.stats.num_running == 0
        assert b"shardlib_" in service.metrics.text()
