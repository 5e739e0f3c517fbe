"""Fields of bodies that shape the answer."""

import pytest

from shardlib.data.tokenizer import BytesTokenizer
from shardlib.engine import Grammar
from shardlib.serve.bodies import BodyError, Speaker, parse

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
        ({"logit_bias": {"1": 101}}, r"logit_bias=\{1: 101\}, which must be numbers"),
        ({"presence_penalty": 3}, r"presence_penalty=3, which must be from -2 to 2"),
    ],
)
def test_wrong_values_are_refused(body, message):
    with pytest.raises(BodyError, match=message):
        sampling(**body)
