"""A server of T5, by the official client."""

import dataclasses

import openai
import pytest
from byte_decoder import SPEAKER, TEXT, serving
from flax import nnx

from shardlib.data.instruct.config import PairData
from shardlib.data.text.config import SpanData
from shardlib.engine import Engine
from shardlib.engine.texts import TextStream
from shardlib.errors import ModelError
from shardlib.evaluation import TextModel
from shardlib.registry import DataSpec
from shardlib.run.served_texts import ServedTexts
from shardlib_models.t5 import FAMILY
from shardlib_models.t5_config import T5Config


class ServedT5:
    """A T5 whose tokens are bytes."""

    family, scope, tokenizer, end_tokens = FAMILY, None, TEXT, (TEXT.eot,)

    def __init__(self):
        config = T5Config(
            embed_dim=64, num_layers=1, num_heads=4, vocab_size=257, init_factor=2.0,
            relative_buckets=8, relative_max_distance=20,
        )  # fmt: skip
        self.model = FAMILY.make(config, DataSpec(), nnx.Rngs(0))
        self.model.eval()
        self.config = self.model.config


@pytest.mark.mesh
def test_the_official_client_gets_answers_of_t5():
    engine = Engine(ServedT5(), slots=4, context=64, chunk=64)
    alone = engine.generate("one", max_tokens=8, temperature=0.8, seed=3)[0]
    with serving(engine, speaker=SPEAKER) as (service, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        asked = {"model": "tiny", "max_tokens": 8, "temperature": 0.8, "seed": 3}
        found = client.completions.create(prompt=["one", "two"], n=2, **asked)
        assert [one.index for one in found.choices] == [0, 1, 2, 3]
        assert found.choices[0].text == alone.text
        # Each prompt once, without the token that the decoder starts from.
        assert found.usage.prompt_tokens == 6
        pieces = client.completions.create(prompt="one", stream=True, echo=True, **asked)
        assert "".join(piece.choices[0].text for piece in pieces) == "one" + alone.text
        with pytest.raises(openai.BadRequestError, match=r"prompt_logprobs \(echo with logprobs"):
            client.completions.create(prompt="one", echo=True, logprobs=1, **asked)
        with pytest.raises(openai.BadRequestError, match="no embeddings"):
            client.embeddings.create(model="tiny", input="one")
        assert service.thread.stats.num_running == 0


@pytest.mark.mesh
def test_texts_of_a_run_are_those_of_its_data():
    served = ServedT5()
    model = TextModel(served.model, FAMILY, TEXT, None, 64, TEXT.eot, data=PairData())
    assert ServedTexts.of(model).encode("a") == [97, TEXT.eot]
    with pytest.raises(ModelError, match=r"not a language model that continues.*\n  Evaluate"):
        model.scores([[1, 2]])
    spans = SpanData(sequence_length=64)
    texts = ServedTexts.of(dataclasses.replace(model, data=spans))
    # The sentinels of bytes follow the vocabulary, and ids after them pad that of the model.
    assert texts.encode("a<extra_id_1>") == [97, 258, TEXT.eot]
    assert texts.decode([257, *b"one", 258, 500, *b"two"]) == "<extra_id_0>one<extra_id_1>two"
    stream = TextStream(texts.decode, ["<extra_id_1>"])
    is_last = [stream.add(token) for token in [257, 195, 164, 98, 258]]
    assert (is_last, stream.text) == ([False] * 4 + [True], "<extra_id_0>äb")
