"""Encoders are fine-tuned from a published model, on labelled texts and on questions."""

import json
import os
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import hf, run
from shardlib.config import load
from shardlib.data.tokenizer import train_word_piece
from shardlib.errors import ConfigError
from shardlib.hf.safetensors import SINGLE
from shardlib.paths import named_leaves
from shardlib.run import RunConfig

pytestmark = pytest.mark.mesh

KINDS = {"dog": "barks at cats", "bird": "sings in trees", "fox": "steals the hens"}
NAMES = ("anna", "bert", "carl", "dora", "emil", "fred", "gina", "hans")
TRAIN = ("optimizer.learning_rate=3e-3", "optimizer.schedule=constant", "train.global_batch=8")
QUIET = ("train.log_every=1", "checkpoint.every_steps=100", "data.eval_fraction=0.25")


def texts():
    rng = np.random.default_rng(0)
    for number in range(96):
        kind = list(KINDS)[number % 3]
        yield {"text": f"{rng.choice(NAMES)} {number} has one that {KINDS[kind]}", "label": kind}


def questions():
    rng = np.random.default_rng(1)
    for number in range(80):
        first, second = rng.choice(NAMES, 2, replace=False)
        context = f"{number} {first} likes {' '.join(rng.choice(NAMES, number % 20))} and {second}"
        answers = {"text": [second], "answer_start": [len(context) - len(second)]}
        yield {"question": "whom does one like?", "context": context, "answers": answers}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, and the folder of a BERT for masked tokens that transformers wrote."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("encoder")
    for name, examples in (("texts", list(texts())), ("questions", list(questions()))):
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, examples)))
    words = [" ".join(map(str, each.values())) for each in (*texts(), *questions())]
    tokenizer = train_word_piece(words, 200)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8 * (tokenizer.vocab_size // 8 + 1),  # which tensor=2 divides
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformers.BertForMaskedLM(config).save_pretrained(place / "base")
    tokenizer.save(place / "base" / "tokenizer.json")
    return place


def words_of(place, kind, run_dir, *words):
    model = {"texts": "bert_classifier", "questions": "bert_spans"}[kind]
    data = {
        "texts": ("data.kind=labeled_text", "data.sequence_length=24"),
        "questions": ("data.kind=questions", "data.sequence_length=24", "data.stride=8"),
    }[kind]
    path = (f"run_dir={run_dir}", f"data.path={place / kind}.jsonl")
    start = (f"model.name={model}", f"model.init_from={place / 'base'}")
    return [*path, *start, *data, *TRAIN, *QUIET, *words]


def trained(place, kind, run_dir, *words):
    words = ["train.cpu_devices=8", "train.steps=3", *words]
    config = load(RunConfig, None, words_of(place, kind, run_dir, *words))
    with jax.default_matmul_precision("highest"):
        return run.train(config)


def losses(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def evaluated(run_dir):
    """The last evaluation of a run."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "eval/loss" in row]
    return {name.partition("/")[2]: x for name, x in rows[-1].items() if name.startswith("eval/")}


def trained_by_two(place, kind, run_dir, *words):
    """Trains in two processes."""
    words = words_of(place, kind, run_dir, "train.steps=3", *words)
    file = run_dir.with_suffix(".yaml")
    file.write_text("seed: 0")
    launch = ("launch", "--processes", "2", "--")
    command = [sys.executable, "-W", "error", "-m", "shardlib", *launch, "train", str(file), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return evaluated(run_dir), losses(run_dir)


ONE_AFTER_THE_OTHER = """
import json, sys
from shardlib import run
from shardlib.config import load
for words in json.loads(sys.argv[1]):
    run.train(load(run.RunConfig, None, words))
"""


@pytest.fixture(scope="module")
def single(place):
    """The last evaluation and the losses of each kind of run on one device, in a process of their
    own."""
    places = {kind: place / f"single-{kind}" for kind in ("texts", "questions")}
    few = ("train.cpu_devices=1", "train.steps=3")
    words = [words_of(place, kind, run_dir, *few) for kind, run_dir in places.items()]
    command = [sys.executable, "-W", "error", "-c", ONE_AFTER_THE_OTHER, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return {kind: (evaluated(run_dir), losses(run_dir)) for kind, run_dir in places.items()}


# Two processes train on questions.
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    "mesh", ["data=2,fsdp=2,tensor=2", "fsdp=8", "stage=2,fsdp=4 train.microbatches=2"]
)
@pytest.mark.parametrize("kind", ["texts", "questions"])
def test_runs_on_meshes_are_those_of_one_device(place, single, tmp_path, kind, mesh):
    # Batches of another size end in other padding, which must not count.
    result = trained(place, kind, tmp_path / "run", *f"mesh={mesh}".split(), "eval.global_batch=32")
    evaluation, expected = single[kind]
    # Sums in another order, through three updates of Adam.
    np.testing.assert_allclose(losses(tmp_path / "run"), expected, rtol=2e-5)
    assert result.evaluation == pytest.approx(evaluation, rel=2e-5)
    assert (kind == "questions") == ("exact_match" in evaluation)


def test_a_classifier_learns_and_is_exported(place, tmp_path, caplog):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    result = trained(place, "texts", tmp_path / "run", "mesh=fsdp=8", "train.steps=200")
    assert result.evaluation["accuracy"] == 1.0
    assert (
        "holds a BertForMaskedLM: the parameters head/bias, head/kernel, pooler/bias" in caplog.text
    )
    assert "and the tensors cls.predictions.bias, cls." in caplog.text
    run.export(str(tmp_path / "run"), str(tmp_path / "out"))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert theirs.config.num_labels == 3
    tokens = np.random.default_rng(0).integers(5, 90, (2, 24), dtype=np.int32)
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(result.state.model(jnp.asarray(tokens)))
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()
    # A classifier of this folder has its own classes.
    assert hf.describe(tmp_path / "out", family="bert_classifier").fields["num_classes"] == 3


def test_answers_are_learnt(place, tmp_path):
    first = trained(place, "questions", tmp_path / "a", "mesh=fsdp=8", "train.steps=1").evaluation
    result = trained(place, "questions", tmp_path / "b", "mesh=fsdp=8", "train.steps=100")
    assert result.evaluation["exact_match"] > 0.9 > 0.5 > first["exact_match"]
    assert result.evaluation["f1"] >= result.evaluation["exact_match"]


def test_the_encoder_has_the_bits_of_the_folder(place, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    held = safetensors.load_file(place / "base" / SINGLE)
    still = ("optimizer.learning_rate=1e-30", "optimizer.weight_decay=0.0", "train.steps=1")
    result = trained(place, "questions", tmp_path / "run", "mesh=fsdp=4,tensor=2", *still)
    params = named_leaves(result.state.params)
    kernel = np.asarray(params["encoder/layers/mlp/up/kernel"])
    for layer in range(2):
        name = f"bert.encoder.layer.{layer}.intermediate.dense.weight"
        np.testing.assert_array_equal(kernel[layer], held[name].T)
    assert np.asarray(params["head/kernel"]).std() > 0


def test_what_another_head_cannot_have_is_refused(place, tmp_path):
    words = words_of(place, "texts", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"holds a 'bert', but name is 'vit'"):
        load(RunConfig, None, [*words, "model.name=vit"])
    with pytest.raises(ConfigError, match=r"num_layers is 3, there 2. Leave them out"):
        load(RunConfig, None, [*words, "model.num_layers=3"])
    adapters = ("finetune.rank=2", "finetune.targets=['**/attention/*']", "mesh=fsdp=8")
    with pytest.raises(
        ConfigError, match=r"lacks head/.*which finetune would freeze.*\n  Train all"
    ):
        trained(place, "texts", tmp_path / "run", *adapters)


@pytest.mark.process
def test_processes_count_each_question_once(place, single, tmp_path):
    words = ("mesh=fsdp=4", "train.cpu_devices=4", "eval.global_batch=12")
    found = trained_by_two(place, "questions", tmp_path / "run", *words)
    expected = single["questions"]
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-5)
    assert found[0] == pytest.approx(expected[0], rel=2e-5)
