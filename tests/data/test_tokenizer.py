"""Tokenizers: text comes back, and every token stands for a known number of bytes."""

import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from shardlib.data.tokenizer import (
    BytesTokenizer,
    JsonTokenizer,
    _blocks,
    read_tokenizer,
    train_bpe,
    train_word_piece,
)
from shardlib.errors import DataError
from shardlib.run.config import DATA_CONFIGS

SAMPLE = ["def add(first, second):\n    return first + second\n", "für élan: 你好 🙂\n"] * 20
# Surrogates cannot be encoded as UTF-8, so no document holds any.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
BPE = train_bpe(SAMPLE, 300)


def byte_level(**changes):
    """A byte-level BPE in `tokenizer.json` form with some of its parts replaced."""
    content = json.loads(BPE.to_json())
    content.update(changes)
    return JsonTokenizer(json.dumps(content))


def word_level():
    """A tokenizer that lowers case, drops white space and knows few words."""
    words = {"[UNK]": 0, "</s>": 1, "def": 2, "return": 3, "first": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    return JsonTokenizer(tokenizer.to_str())


def metaspace():
    """A tokenizer in the manner of SentencePiece, with byte fallback."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "d", "e", "f"]
    pieces += ["de", "def", "▁def"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("d", "e"), ("de", "f"), ("▁", "def")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["</s>"])
    return JsonTokenizer(tokenizer.to_str())


EXACT = [BytesTokenizer(), BPE]
COUNTED = [word_level(), metaspace(), byte_level(normalizer={"type": "NFC"})]


@pytest.mark.parametrize("tokenizer", EXACT, ids=["bytes", "bpe"])
@given(text=TEXTS)
def test_text_comes_back_and_the_byte_table_is_exact(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.token_num_bytes[ids].sum() == len(text.encode())
    [encoded] = tokenizer.encode_documents([text])
    assert encoded.num_bytes is None
    assert encoded.ids.tolist() == ids


@pytest.mark.parametrize("tokenizer", COUNTED, ids=["words", "metaspace", "nfc"])
@given(text=TEXTS)
def test_bytes_of_other_tokenizers_are_counted_at_each_occurrence(tokenizer, text):
    assert tokenizer.token_num_bytes is None
    [encoded] = tokenizer.encode_documents([text])
    assert encoded.ids.tolist() == tokenizer.encode(text)
    assert (encoded.num_bytes >= 0).all()
    if len(encoded.ids):
        assert encoded.num_bytes.sum() == len(text.encode())


def test_counted_bytes_belong_to_the_token_that_ends_them():
    [encoded] = word_level().encode_documents(["Def  été first \n"])
    assert encoded.ids.tolist() == [2, 0, 4]
    assert encoded.num_bytes.tolist() == [3, 2 + 5, 1 + 5 + 2]


@pytest.mark.parametrize("tokenizer", EXACT, ids=["bytes", "bpe"])
def test_the_name_of_a_special_token_is_ordinary_text(tokenizer):
    text = "before<|endoftext|>after"
    ids = tokenizer.encode(text)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"
    assert tokenizer.token_num_bytes[tokenizer.eot] == 0


def test_training_is_deterministic_and_stops_where_no_pair_is_left():
    assert train_bpe(SAMPLE, 300).to_json() == BPE.to_json()
    assert BPE.vocab_size == 300
    assert train_bpe(["ab"], 300).vocab_size == 258


@pytest.mark.parametrize("tokenizer", [*EXACT, metaspace()], ids=["bytes", "bpe", "metaspace"])
def test_a_saved_tokenizer_reads_back_equal(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    again = read_tokenizer(tmp_path / "tokenizer.json")
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocab_size, again.eot) == (tokenizer.vocab_size, tokenizer.eot)
    assert again.encode(SAMPLE[1]) == tokenizer.encode(SAMPLE[1])


def test_truncation_padding_and_dropout_of_a_file_are_switched_off():
    content = json.loads(BPE.to_json())
    tokenizer = Tokenizer.from_str(BPE.to_json())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=500)
    changed = json.loads(tokenizer.to_str())
    changed["model"] = content["model"] | {"dropout": 0.5}
    assert JsonTokenizer(json.dumps(changed)).encode(SAMPLE[0]) == BPE.encode(SAMPLE[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                           "use_regex": True}},
        {"normalizer": {"type": "Lowercase"}},
    ],
    ids=["prefix_space", "lowercase"],
)  # fmt: skip
def test_a_byte_level_tokenizer_that_changes_text_has_no_table(changes):
    tokenizer = byte_level(**changes)
    assert tokenizer.token_num_bytes is None
    [encoded] = tokenizer.encode_documents([SAMPLE[1]])
    assert encoded.num_bytes.sum() == len(SAMPLE[1].encode())


def test_added_tokens_count_as_their_text_unless_special():
    tokenizer = Tokenizer.from_str(BPE.to_json())
    tokenizer.add_tokens(["été"])
    added = JsonTokenizer(tokenizer.to_str())
    assert added.token_num_bytes[added.vocab_size - 1] == 5
    tokenizer.add_tokens([AddedToken("wide", lstrip=True)])
    assert JsonTokenizer(tokenizer.to_str()).token_num_bytes is None


def test_long_documents_are_cut_where_no_token_crosses(monkeypatch):
    monkeypatch.setattr("shardlib.data.tokenizer._BLOCK_CHARACTERS", 1000)
    line = "    x = compute(alpha, beta)  # note\nif x:\n\n\n    y = 'text'\nz = 3\n"
    text = line * 200
    blocks = list(_blocks(text))
    assert len(blocks) > 10
    assert min(map(len, blocks[:-1])) >= 1000
    assert "".join(blocks) == text
    [encoded] = BPE.encode_documents([text])
    assert encoded.ids.tolist() == BPE.encode(text)
    assert list(_blocks("x" * 5000)) == ["x" * 5000]


def test_training_cuts_words_of_more_than_4096_characters():
    word = "xyz" * 2000
    assert train_bpe([word], 270).to_json() == train_bpe([word[:4096], word[4096:]], 270).to_json()


@pytest.mark.parametrize(
    ("content", "options", "match"),
    [
        ('{"model": 3}', {}, "is not a tokenizer: "),
        ("not json", {}, r"cannot be read: Expecting value: .*\n  Set data.tokenizer to"),
        (BPE.to_json(), {"end_of_text": "<|endofdoc|>"},
         r"no token '<\|endofdoc\|>'. Did you mean '<\|endoftext\|>'\?\n  Set data.end_of_text"),
        (BPE.to_json().replace("<|endoftext|>", "<|finis|>"), {},
         r"has no end-of-text token .*\n  Set data.end_of_text"),
    ],
    ids=["model", "json", "named", "unnamed"],
)  # fmt: skip
def test_errors_name_the_file_and_the_fix(tmp_path, content, options, match):
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(DataError, match=f"{re.escape(repr(str(file)))} .*{match}"):
        read_tokenizer(file, **options)


def test_an_end_of_text_of_another_name(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(BPE.to_json().replace("<|endoftext|>", "<|finis|>"))
    assert read_tokenizer(file, end_of_text="<|finis|>").eot == 0


def test_every_kind_of_data_names_a_tokenizer_by_its_file_or_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "tokenizer.json"
    train_word_piece(["anna bert carl"] * 3, 60).save(file)
    names = (str(file), str(tmp_path), "~", "~/tokenizer.json")
    for kind in ("text", "captioned_images", "instructions", "labeled_text"):
        data = DATA_CONFIGS[kind]
        found = [data(path="unread", tokenizer=name).find_tokenizer() for name in names]
        assert {tokenizer.fingerprint for tokenizer in found} == {read_tokenizer(file).fingerprint}


FORKING = """
import multiprocessing, os, sys
from shardlib.data.tokenizer import train_bpe
tokenizer = train_bpe(["some text to train on"] * 50, 300)
texts = ["some text"] * 50
def count():
    return sum(len(each.ids) for each in tokenizer.encode_documents(texts))
print(count(), os.environ.get("TOKENIZERS_PARALLELISM"), flush=True)
child = multiprocessing.get_context("fork").Process(target=lambda: print(count(), flush=True))
child.start()
child.join(30)
sys.exit(child.exitcode)
"""


@pytest.mark.parametrize(("setting", "after"), [(None, ""), ("false", "false"), ("0", "0")])
def test_a_forked_child_neither_warns_nor_hangs(setting, after):
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    if setting is not None:
        environment["TOKENIZERS_PARALLELISM"] = setting
    command = [sys.executable, "-c", FORKING]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stderr == ""
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert first == f"{second} {after}"


def test_the_vocabulary_of_an_early_bert(tmp_path):
    transformers = pytest.importorskip("transformers")
    trained = train_word_piece(["The quick brown Fox, über all"] * 9, 80)
    words = json.loads(trained.to_json())["model"]["vocab"]
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(words, key=words.get)))
    for lower in (True, False):
        settings = {"do_lower_case": lower, "tokenizer_class": "BertTokenizer"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        ours = read_tokenizer(tmp_path / "vocab.txt")
        theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
        (pair,) = ours.framed([("The fox", "ÜBER [SEP] über")])
        assert pair.ids[:5] == theirs("The fox", "ÜBER")["input_ids"][:5]
        assert ours.encode("The fox, über") == theirs.encode(
            "The fox, über", add_special_tokens=False
        )
    (tmp_path / "vocab.txt").write_text("the\nfox")
    with pytest.raises(DataError, match=r"cannot be read: it lacks \[PAD\], \[UNK\]"):
        read_tokenizer(tmp_path / "vocab.txt")


def test_equal_texts_give_equal_word_pieces_in_every_process():
    code = (
        "from shardlib.data.tokenizer import train_word_piece\n"
        "print(train_word_piece(['anna bert carl 12 13 has one that barks'] * 3, 60).fingerprint)"
    )
    command = [sys.executable, "-c", code]
    found = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(3)}
    assert len(found) == 1
