"""Text as it comes: whole characters, and no part of a stop text."""

from hypothesis import given
from hypothesis import strategies as st

from shardlib.data.tokenizer import BytesTokenizer
from shardlib.engine.texts import TextStream

DECODE = BytesTokenizer().decode


@given(st.text("aé€b", max_size=12), st.lists(st.text("aéb", min_size=1, max_size=3), max_size=2))
def test_what_was_shown_is_never_taken_back(text, stop):
    stream, shown = TextStream(DECODE, stop), ""
    for token in text.encode():
        ended = stream.add(token)
        shown += stream.shown()
        if ended:
            break
    stream.finish()
    shown += stream.shown()
    ends = [at for one in stop if (at := text.find(one)) >= 0]
    assert stream.stopped == bool(ends)
    assert shown == stream.text
    # Of stop texts that end at different tokens, the first to be complete decides.
    firsts = [text.find(one) + len(one) for one in stop if one in text]
    assert stream.text == (text if not ends else text[: _start(text, stop, min(firsts))])


def _start(text, stop, end):
    return min(at for one in stop if (at := text[:end].find(one)) >= 0)


def test_bytes_that_end_within_a_character_are_shown_at_the_end():
    stream = TextStream(DECODE)
    assert not stream.add("é".encode()[0])
    assert stream.shown() == ""
    stream.finish()
    assert stream.shown() == "�"


def test_bytes_that_complete_no_character_are_shown_soon():
    """A character has four bytes at most, so that the ones before stay as they are."""
    stream, shown = TextStream(DECODE), ""
    for number, byte in enumerate([0x80] * 20 + list("€😀a".encode())):
        stream.add(byte)
        shown += stream.shown()
        assert number >= 20 or len(shown) >= number - 2
    assert shown == "\ufffd" * 20 + "€😀a"


def test_bytes_that_complete_no_character_leave_the_ones_before_as_they_are():
    """Tokenizers with bytes for rare characters decode a run of them whole or not at all."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    scores = [(word, -float(number)) for number, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = TextStream(lambda ids: tokenizer.decode(list(ids)))
    for token in (*(1 + byte for byte in "é€".encode()), 1 + "€".encode()[0], len(words) - 1):
        stream.add(token)
    assert stream.shown() == "é€�a"


def test_the_first_token_is_written_as_one_that_follows_the_prompt():
    """Tokenizers of Llama 2 drop the first space of a text."""
    from tokenizers import Tokenizer, decoders, models

    words = {"▁Paris": 0, "▁is": 1, "▁▁▁▁": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="▁is"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for before, text in (((0,), "     is Paris"), ((), "    is Paris")):
        stream = TextStream(lambda ids: tokenizer.decode(list(ids)), before=before)
        for token in (2, 1, 0):
            stream.add(token)
        assert stream.shown() == text
