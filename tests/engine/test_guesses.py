"""Guesses of the next tokens from equal ones before."""

import pytest

from shardlib.engine.guesses import NGrams


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("", ""),
        ("ab", ""),
        ("abcd", ""),
        ("the cat. the", " cat. "),
        ("xyzA--xyzB--xyz", "B--xyz"),
        # Three equal tokens are a better sign than two that stand later.
        ("abc1 zbc2 abc", "1 zbc2"),
        ("aaaa", "aaaaaa"),
        ("xabab", "ababab"),
    ],
)
def test_what_followed_before_is_guessed(text, guess):
    ngrams = NGrams()
    for character in text:
        ngrams.extend([ord(character)])
    assert bytes(ngrams.guess(6)).decode() == guess
    assert len(ngrams) == len(text)
