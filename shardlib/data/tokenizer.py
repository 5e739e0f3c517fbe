"""Tokenizers with a known number of text bytes for every token."""

import contextlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from shardlib.data.hashing import digest
from shardlib.data.missing import missing
from shardlib.errors import DataError, did_you_mean

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = "vocab.txt"
"""Name of the file with the words of an early BERT, one a line."""
SETTINGS = "tokenizer_config.json"
"""Name of the file next to it with what the tokenizer does not say, such as `eos_token`."""
# End-of-document token names of published tokenizers.
_USUAL_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
_OF_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BYTES_FORMAT = {"shardlib": "bytes"}
_BLOCK_CHARACTERS = 1 << 20
# A line end between two non-whitespace characters: the split patterns of published byte-level
# tokenizers never join text across it.
_BLOCK_END = re.compile(r"(?<=\S\n)(?=\S)")
# The trainer merges each pair in time quadratic in the length of a word, so words are cut there.
_MOST_WORD_CHARACTERS = 4096
# Rarer characters are unknown to a WordPiece tokenizer.
_MOST_CHARACTERS = 1000
_LONG_WORD = re.compile(rf"\S{{{_MOST_WORD_CHARACTERS}}}|\s{{{_MOST_WORD_CHARACTERS}}}")


class Encoded(NamedTuple):
    """One document as tokens, without an end-of-text token."""

    ids: np.ndarray
    """`[n] int64`."""
    num_bytes: np.ndarray | None
    """Text bytes of each token, `[n] int64`; None if the tokenizer has `token_num_bytes`."""


class Tokenizer(ABC):
    """Conversion of text to tokens and back."""

    vocab_size: int
    """All ids lie in [0, vocab_size)."""
    eot: int
    """The id of the token between documents."""
    token_num_bytes: np.ndarray | None
    """Text bytes of each id, `[vocab_size] int64`, 0 for special tokens.

    The table is exact: over any text, the sum equals the length of the text in UTF-8. It is None
    for SentencePiece, WordPiece and all tokenizers that normalise text. Their bytes are counted at
    each occurrence instead, from the end of the previous token to the end of the token; these
    counts also add up to the length of the text.
    """
    fingerprint: str
    """A digest that is equal for tokenizers with equal tokens."""
    added_tokens: Mapping[str, int] = MappingProxyType({})
    """Ids of tokens that were added to the vocabulary, special ones among them, by their text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text. Special token names in it are ordinary text."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of tokens; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        """Returns the tokens of many texts, computed on all CPU cores."""

    @abstractmethod
    def to_json(self) -> str:
        """Returns the tokenizer as the text of a file that `read_tokenizer` can read."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for `read_tokenizer` and for `data.tokenizer` in a config."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


class BytesTokenizer(Tokenizer):
    """One token per byte of UTF-8, and an end-of-text token."""

    vocab_size = 257
    eot = 256

    def __init__(self) -> None:
        self.token_num_bytes = np.ones(self.vocab_size, np.int64)
        self.token_num_bytes[self.eot] = 0
        self.fingerprint = digest(["bytes"])

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        end = END_OF_TEXT.encode()
        joined = b"".join(end if token == self.eot else bytes([token]) for token in ids)
        return joined.decode(errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        return [
            Encoded(np.frombuffer(text.encode(), np.uint8).astype(np.int64), None) for text in texts
        ]

    def to_json(self) -> str:
        return json.dumps(_BYTES_FORMAT)


class JsonTokenizer(Tokenizer):
    """A tokenizer in the `tokenizer.json` format of the `tokenizers` library.

    Args:
        text: The content of the file. Its truncation, padding and BPE dropout are disabled.
        end_of_text: The token between documents; None looks for one of the usual names.
        origin: Its name in messages.

    Raises:
        DataError: If the text cannot be parsed, or has no such end-of-text token.
    """

    def __init__(self, text: str, end_of_text: str | None = None, origin: str = "tokenizer.json"):
        self._json = text
        self._tokenizer = _parse(text, origin)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eot = _find_end_of_text(vocabulary, end_of_text, origin)
        self.end_of_text = next(name for name, token in vocabulary.items() if token == self.eot)
        added = json.loads(text).get("added_tokens") or ()
        self.added_tokens = {one["content"]: one["id"] for one in added}
        self.special_tokens = {one["content"]: one["id"] for one in added if one["special"]}
        self.token_num_bytes = _byte_table(json.loads(text), vocabulary, self.vocab_size)
        self.fingerprint = digest([text, self.eot])

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        plain = [int(token) for token in ids]
        return self._tokenizer.decode(plain, skip_special_tokens=False)

    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        if self.token_num_bytes is None:
            with _parallel():
                encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
            return [_with_num_bytes(*pair) for pair in zip(encodings, texts, strict=True)]
        blocks = [list(_blocks(text)) for text in texts]
        flat = [block for document in blocks for block in document]
        with _parallel():
            encodings = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        documents = [[np.array(next(encodings).ids, np.int64) for _ in each] for each in blocks]
        return [Encoded(np.concatenate(pieces), None) for pieces in documents]

    def num_framing_tokens(self, texts: int) -> int:
        """Returns the number of special tokens that `framed` adds to one text or to two."""
        return self._tokenizer.num_special_tokens_to_add(texts == 2)

    def framed(
        self,
        texts: Sequence[str] | Sequence[tuple[str, str]],
        *,
        max_tokens: int | None = None,
        stride: int = 0,
        cut: Literal["longest_first", "only_second"] = "longest_first",
    ) -> list[Any]:
        """Returns the `tokenizers.Encoding` of each text or pair of texts, with the special tokens
        that the file puts around them: `[CLS] text [SEP]` or `[CLS] text [SEP] text [SEP]` in BERT.

        An encoding is cut at `max_tokens`, and the rest is in its `overflowing`, which begins with
        its last `stride` tokens. `cut` says which text of a pair is cut.
        """
        if max_tokens is not None:
            self._tokenizer.enable_truncation(max_tokens, stride=stride, strategy=cut)
        try:
            with _parallel():
                return self._tokenizer.encode_batch(list(texts))
        finally:
            self._tokenizer.no_truncation()

    def to_json(self) -> str:
        return self._json


def find_tokenizer_file(name: str) -> Path | None:
    """Returns the file that `data.tokenizer` names by its path or that of its folder, or None."""
    place = Path(name).expanduser()
    files = (place, place / "tokenizer.json", place / VOCABULARY)
    return next((file for file in files if file.is_file()), None)


def tokenizer_file(name: str) -> Path:
    """Returns the result of `find_tokenizer_file`, or raises `DataError`."""
    found = find_tokenizer_file(name)
    if found is None:
        place = Path(name).expanduser()
        if place.name == name and not (place.suffix or place.exists()):
            raise DataError(
                f"data.tokenizer: no tokenizer and no folder here is called {name!r}.\n"
                "  Give the path of a tokenizer.json, or of the folder that holds it."
            )
        place = place / "tokenizer.json" if place.is_dir() else place
        raise DataError(f"data.tokenizer: {missing(str(place))}")
    return found


def read_tokenizer(path: str | os.PathLike[str], end_of_text: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a `tokenizer.json`, or of a file that `Tokenizer.save` wrote.

    A `vocab.txt` of BERT is read with the `tokenizer_config.json` of its folder, if there is one.

    Args:
        path: The file.
        end_of_text: The token between documents; None for `eos_token` in the
            `tokenizer_config.json` of its folder, or else one of the usual names.

    Raises:
        DataError: If the file is not a tokenizer, or has no such end-of-text token.
    """
    try:
        if Path(path).name == VOCABULARY:
            return _of_vocabulary(Path(path))
        text = Path(path).read_text(encoding="utf-8")
        if json.loads(text) == _BYTES_FORMAT:
            return BytesTokenizer()
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"the tokenizer {os.fspath(path)!r} cannot be read: {error}.\n"
            f"  Set data.tokenizer to bpe, bytes or the path of a tokenizer.json."
        ) from error
    if end_of_text is None:
        stored = tokenizer_settings(Path(path).parent).get("eos_token")
        end_of_text = stored["content"] if isinstance(stored, dict) else stored
    return JsonTokenizer(text, end_of_text, origin=os.fspath(path))


def tokenizer_settings(folder: Path | None) -> dict[str, Any]:
    """Returns the content of `tokenizer_config.json`, {} without such a file."""
    file = None if folder is None else folder / SETTINGS
    if file is None or not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file} cannot be read: {error}.\n  Repair it.") from None


def train_word_piece(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Returns a WordPiece tokenizer as BERT's, trained on texts; equal texts give equal tokenizers.

    It reads texts in lower case.

    Args:
        texts: The texts. Words of more than 4,096 characters are cut.
        vocab_size: Requested entries. It has more if the texts have more characters, and fewer if
            no pair is left to merge.

    Source: Devlin et al. 2019, "BERT", section 3 and its uncased vocabulary.
    """
    from tokenizers import trainers

    pieces = [piece for text in texts for piece in _bounded_words(text)]
    tokenizer = _word_piece({"[UNK]": 0}, lowercase=True)
    counts = Counter(c for text in pieces for c in tokenizer.normalizer.normalize_str(text))
    counts = {c: count for c, count in counts.items() if not c.isspace()}
    alphabet = sorted(sorted(counts, key=lambda c: (-counts[c], c))[:_MOST_CHARACTERS])
    # The library numbers pieces of words in the order of a hash map, which differs between
    # processes. Those that are given first keep their numbers.
    given = [*_OF_BERT, *alphabet, *(f"##{c}" for c in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=given, limit_alphabet=0, show_progress=False
    )
    with _parallel():
        tokenizer.train_from_iterator(pieces, trainer)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    return _framed_by_bert(_word_piece(vocabulary, lowercase=True))


def _of_vocabulary(file: Path) -> JsonTokenizer:
    """Returns the tokenizer of the `vocab.txt` of an early BERT; raises OSError or ValueError."""
    names = file.read_text(encoding="utf-8").splitlines()
    vocabulary = {name: number for number, name in enumerate(names)}
    if missing := [name for name in _OF_BERT if name not in vocabulary]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    lowercase = tokenizer_settings(file.parent).get("do_lower_case", True)
    return _framed_by_bert(_word_piece(vocabulary, lowercase=lowercase))


def _word_piece(vocabulary: dict[str, int], *, lowercase: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _framed_by_bert(tokenizer: Any) -> JsonTokenizer:
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens(list(_OF_BERT))
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return JsonTokenizer(tokenizer.to_str())


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Returns a byte-level BPE tokenizer trained on texts; equal texts give equal tokenizers.

    It has `vocab_size` entries, at least 257, or fewer if no pair is left to merge. Words of more
    than 4,096 characters are cut.

    Source: Sennrich, Haddow and Birch, "Neural machine translation of rare words with subword
    units", 2016; Radford et al., "Language models are unsupervised multitask learners", 2019
    (bytes as the base alphabet, and the pattern that splits the text first).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with _parallel():
        pieces = (piece for text in texts for piece in _bounded_words(text))
        tokenizer.train_from_iterator(pieces, trainer)
    return JsonTokenizer(tokenizer.to_str())


@contextlib.contextmanager
def _parallel() -> Iterator[None]:
    """Uses all cores inside the context, and keeps the process safe to fork.

    A forked child has none of the library's threads: it would warn, or wait for them forever. The
    library's switch is therefore on only inside the context, and stays off in children. The library
    reads an empty value as off; it distinguishes our setting from a user's, which is respected.
    """
    owner = _thread_owner[0] if _thread_owner else os.getpid()
    if os.environ.get(_SWITCH) or owner != os.getpid():
        yield
        return
    _thread_owner[:] = [owner]
    os.environ[_SWITCH] = "true"
    try:
        yield
    finally:
        os.environ[_SWITCH] = ""


_SWITCH = "TOKENIZERS_PARALLELISM"
# The process in which the library has started its threads.
_thread_owner: list[int] = []


def _parse(text: str, origin: str) -> Any:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # The library raises nothing narrower.
        raise DataError(
            f"{origin!r} is not a tokenizer: {error}.\n"
            f"  Set data.tokenizer to bpe, bytes or the path of a tokenizer.json."
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def _find_end_of_text(vocabulary: dict[str, int], wanted: str | None, origin: str) -> int:
    if wanted is not None and wanted not in vocabulary:
        raise DataError(
            f"{origin!r} has no token {wanted!r}.{did_you_mean(wanted, vocabulary)}\n"
            f"  Set data.end_of_text to its end-of-document token."
        )
    names = _USUAL_NAMES if wanted is None else (wanted,)
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    raise DataError(
        f"{origin!r} has no end-of-text token under any usual name ({', '.join(_USUAL_NAMES)}).\n"
        f"  Set data.end_of_text to its end-of-document token."
    )


def _byte_table(
    content: dict[str, Any], vocabulary: dict[str, int], vocab_size: int
) -> np.ndarray | None:
    """Returns the exact bytes of each id, or None if the bytes of a token are not fixed."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = ByteLevel.alphabet()
    added = {entry["id"]: entry for entry in content.get("added_tokens") or ()}
    strips = any(entry["lstrip"] or entry["rstrip"] for entry in added.values())
    if strips or not _is_lossless(content) or not set(alphabet) <= set(vocabulary):
        return None
    table = np.zeros(vocab_size, np.int64)
    for token, index in vocabulary.items():
        if index not in added:
            table[index] = len(token)  # Each character of a byte-level token stands for one byte.
        elif not added[index]["special"]:
            table[index] = len(token.encode())
    return table


def _is_lossless(content: dict[str, Any]) -> bool:
    """Whether text is split into bytes and merged again, with nothing added, dropped or changed."""
    model = content["model"]
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(affix) for affix in affixes):
        return False
    if content.get("normalizer"):
        return False
    first: dict[str, Any] = content.get("pre_tokenizer") or {"type": None}
    steps: list[dict[str, Any]] = first.get("pretokenizers", [first])
    keeping = [
        step["type"] in ("ByteLevel", "Digits")
        or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in steps
    ]
    prefixed = any(step.get("add_prefix_space") for step in steps)
    return all(keeping) and not prefixed and any(step["type"] == "ByteLevel" for step in steps)


def _bounded_words(text: str) -> Iterator[str]:
    """Yields a text in pieces, cut within each run of many characters without or of whitespace."""
    start = 0
    for word in _LONG_WORD.finditer(text):
        yield text[start : word.end()]
        start = word.end()
    yield text[start:]


def _blocks(text: str) -> Iterator[str]:
    """Yields a long text in pieces split at line ends, to be encoded in parallel."""
    start = 0
    while len(text) - start > _BLOCK_CHARACTERS:
        end = _BLOCK_END.search(text, start + _BLOCK_CHARACTERS)
        if end is None:
            break
        yield text[start : end.start()]
        start = end.start()
    yield text[start:]


def _with_num_bytes(encoding: Any, text: str) -> Encoded:
    """Counts the bytes of each token from its character offsets in the encoding."""
    ids = np.array(encoding.ids, np.int64)
    if not len(ids):
        return Encoded(ids, ids)
    # Tokens of a partial character all end after the character; the first token gets its bytes.
    ends = np.maximum.accumulate(np.array(encoding.offsets, np.int64)[:, 1])
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    byte_ends = np.concatenate([[0], np.cumsum(widths)])[ends]
    byte_ends[-1] = widths.sum()  # Whitespace after the last token belongs to it.
    return Encoded(ids, np.diff(byte_ends, prepend=0))
