"""Fields of bodies that shape the answer."""

import pytest

from shardlib.data.tokenizer import BytesTokenizer
from shardlib.engine import Grammar
from shardlib.serve.bodies import CHAT, BodyError, Speaker, parse

SPEAKER = Speaker("tiny", lambda ids: "", lambda messages: BytesTokenizer().encode("hi"))


def sampling(**body):
    return parse("/v1/completions", {"prompt": "a", **body}, SPEAKER).samplings[0]


def test_biases_and_penalties_are_read():
    asked = sampling(presence_penalty=1, frequency_penalty=-0.5, logit_bias={"7": 3, "9": -100})
    assert (asked.presence_penalty, asked.frequency_penalty) == (1, -0.5)
    assert asked.logit_bias == {7: 3, 9: -100}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_schema", '{"type": "object"}')),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}},
            Grammar("json_schema", '{"type": "null"}'),
        ),
        ({"type": "regex", "regex": "a+"}, Grammar("regex", "a+")),
    ],
)
def test_formats_are_grammars(given, expected):
    assert sampling(response_format=given).grammar == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": {"type": "json_shema"}}, r"'json_shema'. Did you mean 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, r"has no schema.\n  Give json_schema"),
        ({"response_format": {"type": "lark"}}, r"has no lark.\n  Give its text"),
        ({"logit_bias": {"the": 1.0}}, r"logit_bias has 'the'.\n  Give numbers"),
        ({"logit_bias": {"1" * 5000: 1, "01": 1, "\N{ARABIC-INDIC DIGIT THREE}": 1}}, "has '1111"),
        ({"stop": ["a"] * 17}, r"stop has 17 texts.*\n  Give at most 16"),
        ({"stop": "a" * 1001}, r"of up to 1001 characters.\n  Give"),
        ({"logit_bias": {"1": 101}}, r"logit_bias=\{1: 101\}, which must be numbers"),
        ({"presence_penalty": 3}, r"presence_penalty=3, which must be from -2 to 2"),
    ],
)
def test_wrong_values_are_refused(body, message):
    with pytest.raises(BodyError, match=message):
        sampling(**body)


def of_chat(content, **fields):
    message = {"role": "user", "content": content}
    speaker = Speaker("tiny", lambda ids: "", lambda messages, tools: list(messages[0]["content"]))
    return parse(CHAT, {"messages": [message], **fields}, speaker)


def test_parts_of_a_content_are_one_text():
    parts = [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}]
    assert of_chat(parts).prompts == of_chat("one").prompts == (("o", "n", "e"),)
    for wrong in ({"text": "a"}, 3, [3], [{"type": "image_url", "image_url": {"url": "a"}}]):
        with pytest.raises(BodyError, match=r"(?s)the content of a message is .*\n  Give a"):
            of_chat(wrong)


def test_the_longest_answer_has_one_length_by_either_name():
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 5}):
        assert of_chat("one", **fields).samplings[0].max_tokens == 5
    with pytest.raises(BodyError, match=r"max_completion_tokens is 4, and max_tokens 5.\n  Leave"):
        of_chat("one", max_completion_tokens=4, max_tokens=5)


def test_alternatives_of_tokens_need_their_log_probabilities():
    with pytest.raises(BodyError, match=r"top_logprobs are given without logprobs.\n  Set"):
        of_chat("one", top_logprobs=2)
