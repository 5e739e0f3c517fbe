"""Grammars that answers follow, read by the package llguidance."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from shardlib.engine.requests import Grammar
from shardlib.engine.servable import TextTokenizer
from shardlib.errors import ModelError, require


class GrammarReader:
    """Reads grammars over the tokens of one tokenizer, whose `to_json` or `to_str` returns the text
    of a tokenizer.json. The tokens `ends` end an answer."""

    def __init__(self, tokenizer: TextTokenizer | None, ends: Sequence[int], vocab_size: int):
        self._tokenizer, self._ends, self._vocab_size = tokenizer, list(ends), vocab_size
        self._words: Any = None

    def read(self, grammar: Grammar) -> "Matcher":
        """Returns a matcher that has read no token.

        Raises:
            MissingExtraError: If the extra `grammar` is not installed.
            ModelError: If the model has no tokenizer or no end of text, or the grammar is
                malformed.
        """
        LLMatcher = require("llguidance", "grammar", "a grammar").LLMatcher
        if self._words is None:
            self._words = self._read_words()
        try:
            text = getattr(LLMatcher, f"grammar_from_{grammar.kind}")(grammar.text)
        except ValueError as error:
            raise _malformed(grammar, error) from None
        matcher = LLMatcher(self._words, text, log_level=0)
        if matcher.is_error():
            raise _malformed(grammar, matcher.get_error())
        return Matcher(matcher, self._vocab_size)

    def _read_words(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        to_json = getattr(self._tokenizer, "to_json", getattr(self._tokenizer, "to_str", None))
        ends = [end for end in self._ends if end < self._vocab_size]
        if to_json is None or not ends:
            missing = "a tokenizer.json" if to_json is None else "a token that ends texts"
            raise ModelError(
                f"a grammar needs {missing}, and the model has none.\n"
                "  Serve a model that has it, or leave the grammar out."
            )
        fields = json.loads(to_json())
        if fields.get("shardlib") == "bytes":
            return LLTokenizer(TokenizerWrapper(_Bytes(ends[0])), eos_token=ends)
        fields["decoder"] = _spelt_out(fields.get("decoder"))
        try:
            text = json.dumps(fields)
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends)
        except ValueError as error:
            raise ModelError(
                f"llguidance cannot read the tokenizer.json of the model for a grammar: {error}.\n"
                "  Leave the grammar out (response_format, and tool_choice that forces a call)."
            ) from None


def _spelt_out(decoder: Any) -> Any:
    """Returns the decoder of a tokenizer.json with the parts of SentencePiece in place of
    `Metaspace`, which llguidance does not know. The space that it drops at the start is kept."""
    if not isinstance(decoder, dict):
        return decoder
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    spaces = [part for part in parts if part["type"] == "Metaspace"]
    if not spaces:
        return decoder
    replaced = {"String": spaces[0]["replacement"]}
    kinds = {"type": "Replace", "pattern": replaced, "content": " "}, {"type": "ByteFallback"}
    return {"type": "Sequence", "decoders": [*kinds, {"type": "Fuse"}]}


class _Bytes:
    """The tokenizer of bytes, in the form that llguidance takes."""

    bos_token_id = None

    def __init__(self, end: int):
        self.eos_token_id = end
        self.tokens = [bytes([n]) for n in range(256)] + [b"<end>"] * (end - 255)
        self.special_token_ids = list(range(256, end + 1))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _malformed(grammar: Grammar, error: object) -> ModelError:
    first = str(error).strip().splitlines()[0]
    return ModelError(f"the grammar ({grammar.kind}) is malformed: {first}.\n  Correct it.")


class Matcher:
    """A grammar that has read some tokens of one answer."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size
        self._read: list[int] = []

    def allowed(self, tokens: Sequence[int]) -> Bool[np.ndarray, " vocab"]:
        """Returns the tokens that may follow an answer.

        Raises:
            ModelError: If the answer does not follow the grammar, or the grammar is too complex.
        """
        matcher, tokens = self._matcher, list(tokens)
        if tokens[: len(self._read)] != self._read:
            matcher.reset()
            self._read = []
        matcher.consume_tokens(tokens[len(self._read) :])
        self._read = tokens
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            first = matcher.get_error().strip().splitlines()[0]
            raise ModelError(f"the grammar cannot go on: {first}.\n  Give a simpler grammar.")
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)
