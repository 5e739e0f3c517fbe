"""Where tokens begin in the text of a choice."""

import pytest

from shardlib.data.tokenizer import BytesTokenizer
from shardlib.engine import Token
from shardlib.engine.texts import TextStream
from shardlib.serve.bodies import COMPLETIONS, Speaker, parse
from shardlib.serve.logprobs import CompletionText

BYTES = BytesTokenizer().decode
WORDS = {"<s>": 0, "▁Paris": 1, "▁is": 2, "▁big": 3}


def of_llama_2():
    """A tokenizer that drops the first space of a text."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<s>"))
    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def choice(decode, before, ids, **body):
    """Returns the text and the log probabilities of a choice, from tokens as the engine gives
    them."""
    speaker = Speaker("m", decode, lambda messages, tools: [])
    asked = parse(COMPLETIONS, {"logprobs": 0, **body}, speaker)
    stream, tokens = TextStream(decode, before=before), []
    for number in ids:
        tokens.append(Token(number, -1.0, text_offset=len(stream.text)))
        stream.add(number)
    stream.finish()
    scored = [Token(number, -2.0) for number in before[1:]]
    return CompletionText(asked, 0, before, speaker).add(stream.text, tokens, scored)


@pytest.mark.parametrize(
    ("prompt", "offsets"),
    [
        ("Paris is", [0, 0, 5, 8, 12]),
        # A text that its tokens write otherwise, as one that is normalized.
        ("PARIS  is", [0, 0, 6, 9, 13]),
        ("is", [0, 0, 0, 2, 6]),
    ],
)
def test_a_token_before_a_text_is_not_in_it(prompt, offsets):
    text, logprobs = choice(of_llama_2(), [0, 1, 2], [3, 2], prompt=prompt, echo=True)
    assert text == prompt + " big is"
    assert logprobs["text_offset"] == offsets
    assert logprobs["token_logprobs"] == [None, -2.0, -2.0, -1.0, -1.0]
    assert logprobs["tokens"] == ["<s>", "Paris", "is", "big", "is"]


def test_an_answer_alone_begins_at_0():
    text, logprobs = choice(of_llama_2(), [0, 1], [2, 3], prompt="Paris")
    assert (text, logprobs["text_offset"]) == (" is big", [0, 3])


def test_the_tokens_of_one_character_begin_where_it_does():
    prompt, ids = "é€".encode(), "a€b".encode()
    text, logprobs = choice(BYTES, prompt, ids, prompt=list(prompt), echo=True)
    assert text == "é€a€b"
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 2, 3, 3, 3, 4]
