"""Embeddings of encoders: the pooled hidden states of transformers, with the same bits in any
company."""

import dataclasses
import fnmatch
import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import pytest
from flax import nnx
from small_decoder import Served, made

import shardlib as sl
from shardlib.engine import Engine, Sampling
from shardlib.errors import CheckpointError, ModelError
from shardlib.hf.hub import TEXTS
from shardlib.hf.pooling import TextPooling, text_pooling
from shardlib.registry import DataSpec
from shardlib_models.bert import BertConfig
from shardlib_models.bert_losses import MASKED

VOCAB, LONGEST = 96, 192


def encoder(scope=None):
    config = BertConfig(
        embed_dim=64, num_layers=2, num_heads=4, vocab_size=VOCAB, max_positions=LONGEST,
        head="none", init_stddev=0.3,
    )  # fmt: skip
    model = MASKED.make(config, DataSpec(), nnx.Rngs(0))
    model.eval()
    return Served(model, model.config, scope, family=MASKED)


@pytest.fixture(scope="module")
def served():
    return encoder()


def texts(count, seed=0, longest=LONGEST):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


POOLED = {
    "cls": lambda x: x[0],
    "mean": lambda x: x.mean(axis=0),
    "max": lambda x: x.max(axis=0),
}


@nnx.jit
def outputs(model, ids):
    return model(ids)


@pytest.mark.mesh
def test_embeddings_are_pooled_outputs_of_length_1(served):
    asked = texts(3, longest=60)
    hidden = [np.asarray(outputs(served.model, np.asarray([ids])))[0] for ids in asked]
    for pooling, pool in POOLED.items():
        found = Engine(served, pooling=pooling, context=64).embed(asked)
        for one, vector in zip(map(pool, hidden), found, strict=True):
            np.testing.assert_allclose(vector, one / np.linalg.norm(one), atol=1e-5)


@pytest.mark.mesh
def test_bits_of_embeddings_do_not_depend_on_the_company(served):
    asked = texts(100)
    options = {"deterministic": True}
    together = Engine(served, **options).embed(asked)
    engine = Engine(served, slots=3, chunk=32, overlap=False, **options)
    alone = [engine.embed([one])[0] for one in asked]
    assert together.tobytes() == np.asarray(alone).tobytes()
    rng, requests = np.random.default_rng(1), {}
    left = rng.permutation(len(asked)).tolist()
    while left or engine.step():
        for _ in range(rng.integers(0, 4)):
            if left:
                number = left.pop()
                sampling = Sampling(max_tokens=1, embedding=True)
                requests[number] = engine.submit(asked[number], sampling)
        engine.step()
    mixed = [requests[number].answer().embedding for number in range(len(asked))]
    assert together.tobytes() == np.asarray(mixed).tobytes()
    stats = engine.stats()
    assert (stats.pages_used, stats.num_running, stats.answer_tokens) == (0, 0, 0)
    assert stats.num_compiled == 3


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["data=4,tensor=2", "fsdp=8"])
def test_embeddings_on_a_mesh_are_those_of_one_device(served, mesh):
    asked = texts(12)
    alone = Engine(served).embed(asked)
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD) as scope:
        model = encoder(scope)
        found = Engine(model).embed(asked)
    np.testing.assert_allclose(found, alone, atol=1e-5)


def test_new_parameters_embed_the_next_texts(served):
    engine = Engine(served, context=64)
    before = engine.embed([[1, 2, 3]])
    params = nnx.state(served.model)
    engine.update(jax.tree.map(lambda x: 1.5 * x, params))
    assert np.abs(engine.embed([[1, 2, 3]]) - before).max() > 1e-3
    engine.update(params)
    assert engine.embed([[1, 2, 3]]).tobytes() == before.tobytes()


def test_a_text_that_was_cancelled_or_is_late_leaves_nothing(served):
    engine = Engine(served, context=64, slots=2)
    sampling = Sampling(max_tokens=1, embedding=True)
    late = engine.submit([1, 2], sampling, timeout_seconds=0)
    gone, kept = (engine.submit([1, 2, 3], sampling) for _ in range(2))
    engine.step()
    engine.cancel(gone)
    while engine.step():
        pass
    reasons = [one.finish_reason for one in (late, gone, kept)]
    assert reasons == ["deadline", "cancelled", "stop"]
    assert kept.answer().embedding.shape == (64,)
    assert engine.stats().pages_used == 0
    assert not engine.busy


OTHERS = [
    ({"speculate": 4, "cache": "int8"}, "cache='int8', speculate=4 .*BertMaskedLM.*an encoder"),
    ({"page_size": 32, "prefix_cache": False}, "page_size=32, prefix_cache=False"),
    ({"pooling": "meen"}, "pooling is 'meen'. Did you mean 'mean'"),
    ({"context": 500}, "context=500, but the model has at most 192"),
]


@pytest.mark.parametrize(("options", "fault"), OTHERS, ids=[" ".join(one) for one, _ in OTHERS])
def test_options_that_are_not_for_an_encoder(served, options, fault):
    with pytest.raises(ModelError, match=f"(?s){fault}.*\n  (Leave|Use|Give)"):
        Engine(served, **options)


def test_the_files_that_say_how_texts_are_pooled_come_from_the_hub():
    for file in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert any(fnmatch.fnmatch(file, pattern) for pattern in TEXTS), file


def test_an_embedding_ends_a_request_whatever_it_may_write(served):
    engine = Engine(served, context=64)
    (one,) = engine.generate([[1, 2, 3]], embedding=True, max_tokens=5)
    np.testing.assert_array_equal(one.embedding, engine.embed([[1, 2, 3]])[0])


def test_what_an_encoder_cannot_answer(served):
    engine = Engine(served, context=64)
    with pytest.raises(ModelError, match=r"writes no text.\n  Ask for embeddings: engine.embed"):
        engine.generate([[1, 2]])
    with pytest.raises(ModelError, match=r"65 tokens, and the model embeds at most 64.\n  Short"):
        engine.embed([[1] * 65])
    assert engine.embed([[1] * 64]).shape == (1, 64)
    with pytest.raises(ModelError, match="pooling='cls' for a Transformer, which is a decoder"):
        Engine(made(), pooling="cls")


def pooling_folder(tmp_path, said, parts=("Transformer", "Pooling", "Normalize")):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(said))
    listed = [
        {"path": "1_Pooling" if one == "Pooling" else "", "type": f"sentence_transformers.{one}"}
        for one in parts
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    return tmp_path


SAID = {
    "cls": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "mean": {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8},
    "max": {"pooling_mode": "max"},
}


@pytest.mark.parametrize("kind", SAID)
def test_a_folder_says_how_outputs_are_pooled(tmp_path, kind):
    pooling_folder(tmp_path, SAID[kind])
    assert text_pooling(tmp_path) == TextPooling(kind, None)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert text_pooling(tmp_path) == TextPooling(kind, 128)


def test_folders_that_say_nothing_or_what_is_not_known(tmp_path, served):
    assert text_pooling(tmp_path) == TextPooling(None, None)
    folder = pooling_folder(tmp_path, {"pooling_mode_lasttoken": True})
    file = folder / "1_Pooling" / "config.json"
    both = SAID["mean"] | {"pooling_mode_cls_token": True}
    unknown = {
        "pools by nothing, but": {},
        "pools by pooling_mode_lasttoken, but": {"pooling_mode_lasttoken": True},
        "pools by pooling_mode_mean_tokens, pooling_mode_cls_token, but": both,
        r"leaves the tokens of prompts out \(include_prompt": SAID["cls"]
        | {"include_prompt": False},
    }
    for fault, said in unknown.items():
        file.write_text(json.dumps(said))
        model = SaidByFolder(**vars(served), pooling=text_pooling(folder))
        with pytest.raises(ModelError, match=rf"{fault}.*\n.*or pool all tokens: pooling='mean'"):
            Engine(model, context=64)
        Engine(model, context=64, pooling="mean")
    file.write_text(json.dumps(SAID["cls"]))
    of_model = folder / "config_sentence_transformers.json"
    of_model.write_text('{"default_prompt_name": "query", "prompts": {"query": ""}}')
    assert text_pooling(folder) == TextPooling("cls", None)
    of_model.write_text('{"default_prompt_name": "query"}')
    with pytest.raises(ModelError, match=r"transformers.json puts the prompt 'query'.*\n  Set it"):
        text_pooling(folder)
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(ModelError, match=r"modules.json has the parts Dense.*\n  Choose"):
        text_pooling(folder)


def test_all_faults_of_malformed_files_are_named(tmp_path):
    folder = pooling_folder(
        tmp_path, {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": True}
    )
    (folder / "sentence_bert_config.json").write_text(
        '{"max_seq_length": "128", "do_lower_case": 0}'
    )
    (folder / "modules.json").write_text(
        '[3, {"type": null}, {"type": "x.Pooling", "path": "2_Pooling"}]'
    )
    (folder / "config_sentence_transformers.json").write_text("[")
    with pytest.raises(CheckpointError) as error:
        text_pooling(folder)
    *faults, fix = str(error.value).splitlines()
    assert fix == "  Download the files again, or correct them."
    ends = (
        "modules.json: part 0 is 3, expected an object.",
        "modules.json: part 1 has no type.",
        "2_Pooling/config.json does not exist, but modules.json has the part.",
        "sentence_bert_config.json: max_seq_length is '128', expected an integer.",
        "sentence_bert_config.json: do_lower_case is 0, expected true or false.",
        "config_sentence_transformers.json cannot be read: Expecting value: line 1 column 2",
    )
    assert len(faults) == len(ends)
    for fault, end in zip(faults, ends, strict=True):
        assert fault.replace(f"{folder}/", "").startswith(end)
    (folder / "modules.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"1_Pooling/config.json: pooling_mode_mean_tokens is 1,"
    ):
        text_pooling(folder)


def test_texts_become_lower_case_where_the_folder_says_so(tmp_path, served):
    (tmp_path / "sentence_roberta_config.json").write_text(
        '{"max_seq_length": 32, "do_lower_case": true}'
    )
    said = text_pooling(tmp_path)
    assert said == TextPooling(None, 32, lowers=True)
    model = dataclasses.replace(served, tokenizer=BytesOfTexts())
    engine = Engine(SaidByFolder(**vars(model), pooling=said))
    assert engine.context == 32
    assert engine.encode("AbÄ") == engine.encode("abä")
    assert Engine(model, context=64).encode("AB") != engine.encode("AB")
    # A decoder reads texts as they are, whatever its folder says.
    decoder = dataclasses.replace(made(vocab_size=256), tokenizer=BytesOfTexts())
    engine = Engine(SaidByFolder(**vars(decoder), pooling=said), slots=2)
    assert (engine.encode("A"), engine.context) == ((65,), 256)


@dataclasses.dataclass(frozen=True)
class SaidByFolder(Served):
    pooling: TextPooling | None = None


class BytesOfTexts:
    def encode(self, text):
        return [byte % VOCAB for byte in text.encode()]


def wordpieces(folder):
    """Writes a tokenizer that cuts texts and fills them up, as published ones do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = names + [start + letter for start in ("", "##") for letter in "abcdefgh"]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(words)


@pytest.mark.mesh
@pytest.mark.parametrize(("kind", "pooling"), [("Bert", "cls"), ("XLMRoberta", "mean")])
def test_a_folder_embeds_texts_as_transformers_pooled(tmp_path, kind, pooling):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=wordpieces(tmp_path), hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=80,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(tmp_path)
    pooling_folder(tmp_path, SAID[pooling])
    loaded = sl.hf.load(tmp_path)
    asked = ["a", "head bed", "abcdefgh " * 6]
    found = Engine(loaded).embed(asked)
    for text, vector in zip(asked, found, strict=True):
        ids = loaded.tokenizer.encode(text).ids
        assert (ids[0], ids[-1]) == (2, 3)
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
        one = POOLED[pooling](hidden)
        np.testing.assert_allclose(vector, one / np.linalg.norm(one), atol=1e-5)
