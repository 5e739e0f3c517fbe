"""Tasks of lm-eval-harness: the numbers and texts of its own model of transformers."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import pytest
import yaml
from flax import nnx

from shardlib.errors import ConfigError, DataError, ModelError
from shardlib.evaluation import find_tasks, harness_model, run_tasks
from shardlib.run.evaluating import text_model

pytestmark = pytest.mark.mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps"]
LENGTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a random Llama, and a tokenizer of letters that puts a token first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    place = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<s>"
    )
    fast.save_pretrained(place)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a task of choices, one of texts and one of continuations."""
    place, rng = tmp_path_factory.mktemp("tasks"), np.random.default_rng(0)

    def words(count):
        return " ".join(rng.choice(WORDS, count))

    rows = [
        {"text": words(4 + 3 * (i % 8)), "choices": [words(1), words(3)], "label": i % 2}
        for i in range(20)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(place / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    choices = {
        "task": "own_choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
    }
    rolling = {
        "task": "own_perplexity",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    drawn = {
        "task": "own_texts",
        "output_type": "generate_until",
        "doc_to_target": "fox",
        "generation_kwargs": {"until": ["x"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    for task in (choices, rolling, drawn):
        (place / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))
    return place


NAMES = ["own_choices", "own_perplexity", "own_texts"]


def evaluated(model, tasks):
    """The answers to each question, and the metrics."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=NAMES, task_manager=manager, bootstrap_iters=0
    )
    answers = {task: [row["resps"] for row in found["samples"][task]] for task in NAMES}
    return answers, found["results"]


@pytest.fixture(scope="module")
def expected(folder, tasks):
    from lm_eval.models.huggingface import HFLM

    return evaluated(HFLM(pretrained=str(folder), device="cpu", dtype="float32"), tasks)


@pytest.fixture(scope="module")
def known(tasks):
    """Two tasks among the published ones, which take seconds to index."""
    found = find_tasks(["own_ch*", "own_texts"], include_path=str(tasks))
    assert found.names == ("own_choices", "own_texts")
    return found


@pytest.fixture(scope="module")
def model(folder):
    """One for all tests, which share its compiled programs."""
    return text_model(str(folder), mesh="data=8")


@pytest.mark.rest("soak")
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "fsdp=8"])
def test_answers_are_those_of_the_harness(folder, tasks, expected, mesh):
    with jax.default_matmul_precision("highest"):
        model = text_model(str(folder), mesh=mesh)
        answers, results = evaluated(harness_model(model), tasks)
    theirs, their_results = expected
    assert answers["own_texts"] == theirs["own_texts"]
    for ours, other in zip(answers["own_choices"], theirs["own_choices"], strict=True):
        for (mine, greedy), (value, is_greedy) in zip(
            (x[0] for x in ours), (x[0] for x in other), strict=True
        ):
            assert float(mine) == pytest.approx(float(value), abs=1e-4)
            assert greedy == is_greedy
    for task in NAMES:
        for name, value in their_results[task].items():
            if isinstance(value, float):
                assert results[task][name] == pytest.approx(value, rel=1e-5), (task, name)


def test_prompts_of_unequal_length_continue_as_alone(model):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 250, n).tolist() for n in (1, 3, 17, 20, 33, 34)]
    together = model.continued(prompts, 8)
    for prompt, found in zip(prompts, together, strict=True):
        row = list(prompt)
        for token in found:
            logits = model.scores([[*row, 0]])
            assert logits[0].logprobs.shape == (len(row),)
            assert model.scores([[*row, token]])[0].is_greedy[-1]
            row.append(token)


def test_scores_keep_the_programs_that_continue_texts(model):
    first = model.continued([[1, 2, 3]], 4)
    engine = model._engine
    count = engine.stats().num_compiled
    assert engine._state is not None
    model.scores([[1, 2, 3]])
    assert engine._state is None
    assert model.continued([[1, 2, 3]], 4) == first
    assert model._engine is engine
    assert engine.stats().num_compiled == count


def test_rows_that_differ_in_the_last_token_are_read_once(model, monkeypatch):
    rng = np.random.default_rng(2)
    starts = [rng.integers(1, 250, n).tolist() for n in (1, 5, 20, 20, 40)]
    rows = [[*start, int(last)] for start in starts for last in rng.choice(250, 20, replace=False)]
    rows += rows[:3]
    read, inner = [], model._scored
    monkeypatch.setitem(
        model.__dict__,
        "_scored",
        lambda state, tokens, targets, ids, others: (
            read.append(int(ids.any(axis=1).sum())) or inner(state, tokens, targets, ids, others)
        ),
    )
    together = model.scores(rows)
    # 20 last tokens of a start take two rows, as 16 fit into one.
    assert sum(read) == 2 * len(starts)
    read.clear()
    for row, scores in zip(rows, together, strict=True):
        (alone,) = model.scores([row])
        np.testing.assert_allclose(scores.logprobs, alone.logprobs, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(scores.is_greedy, alone.is_greedy)
    assert sum(read) == len(rows)
    assert len({float(scores.logprobs[-1]) for scores in together[:20]}) == 20


def test_writing_stops_when_a_row_has_ended(model, monkeypatch):
    monkeypatch.setattr("shardlib.evaluation.text_model._FIRST_CHECK", 4)
    prompts = [[1, *range(40, 40 + n)] for n in (2, 5, 9)]
    with jax.default_matmul_precision("highest"):
        whole = model.continued(prompts, 24)
        # It is asked after 4, 8 and 16 tokens.
        needed = (1, 6, 12)
        found = model.continued(prompts, 24, ended=lambda at, new: len(new) >= needed[at])
        assert list(map(len, found)) == [4, 8, 16]
        for some, all_of_it in zip(found, whole, strict=True):
            assert some == all_of_it[: len(some)]
        never = model.continued(prompts, 24, ended=lambda at, new: False)
    assert never == whole
    encode = model.tokenizer.encode
    assert model.has_ended(encode("the fox jumps"), ["x j"])
    assert not model.has_ended(encode("the fox jumps"), ["dog", ""])
    assert model.has_ended([*encode("fox"), 0])
    assert model.has_ended([*encode("fox"), 1], ["<s>"])
    assert not model.has_ended([*encode("fox"), 1])


def test_wrong_requests(model, tasks, known):
    with pytest.raises(ConfigError, match=r"'own_choice'.*own_choices.*\n  .*--include-path"):
        find_tasks(["own_choice"], include_path=str(tasks))
    with pytest.raises(ConfigError, match="no tasks are named"):
        find_tasks([])
    with pytest.raises(ConfigError, match="'nowhere' is not a folder"):
        find_tasks(["own_choices"], include_path="nowhere")
    with pytest.raises(ModelError, match=rf"have 60 to 60 tokens, .* 1 to {LENGTH}"):
        model.scores([[1] * 61])
    with pytest.raises(ModelError, match="0 to 0 tokens"):
        model.continued([[]], 4)
    with pytest.raises(ModelError, match="99999"):
        model.continued([[1], [99999]], 4)
    assert not model._engine.busy
    harness = harness_model(model)
    with pytest.raises(ConfigError, match=rf"up to {LENGTH} tokens \(max_gen_toks\).*\n  Lower"):
        harness.generate_until([request("the", {"max_new_tokens": LENGTH})])
    with pytest.raises(
        ConfigError, match=r"1 of 2 answers .*\n  'y' joins the last token of 'laz'"
    ):
        harness._loglikelihood_tokens([((" a", " b"), [1], [2]), (("laz", "y"), [5], [])])
    with pytest.raises(ConfigError, match="has 60 tokens of 48 at most"):
        harness._loglikelihood_tokens([(("a", "b"), [1], [2] * 60)])
    found = run_tasks(model, dataclasses.replace(known, names=("own_choices",)), limit=4)
    scores = found["own_choices"]
    assert 0 <= scores.metrics["acc"] <= 1
    assert 0 <= scores.stderrs["acc"] <= 1
    assert (scores.version, scores.num_fewshot) == ("Yaml", 0)


def request(text, options):
    return SimpleNamespace(args=(text, options))


def test_sampling_stops_and_framing(model, caplog):
    options = {"max_tokens": 8, "temperature": 0.8, "top_p": 0.5, "until": ["<s>", "q"]}
    harness_model(model).generate_until([request("the", options)])
    assert "sampling has no top_p: ignored" in caplog.text
    encode = model.tokenizer.encode
    written = [*encode("fox"), 1, *encode("dog")]
    assert model.written(written) == "foxdog"
    assert model.written(written, ["<s>"]) == "fox"
    assert model.written([*encode("fox"), 0, *encode("dog")]) == "fox"
    assert model.tokens("fox") == [1, *encode("fox")]
    ours = dataclasses.replace(model, framing="prefix", prefix=0, ends=frozenset(encode("g")))
    assert ours.tokens("fox") == [0, *encode("fox")]
    assert ours.written(encode("lag")) == "la"


def test_a_model_without_numbers_is_never_right(folder):
    model = text_model(str(folder))
    state = jax.tree.map(lambda x: x * np.nan, nnx.state(model.model, nnx.Param))
    nnx.update(model.model, state)
    (scores,) = model.scores([[1, 2, 3]])
    assert np.isnan(scores.logprobs).all()
    assert not scores.is_greedy.any()


CHAT = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}<s>assistant:"


def test_chats_and_the_folders_own_end(folder, known, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(DataError, match="has no chat template"):
        harness_model(text_model(str(tmp_path)), chat=True)
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 70]}')
    model = text_model(str(tmp_path))
    assert model.ends == {0, 70}
    harness = harness_model(model, chat=True)
    prompt = harness.apply_chat_template([{"role": "user", "content": "the fox"}])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert prompt == "<s>user: the fox<s>assistant:"
    assert harness.tok_encode(prompt) == tokenizer.encode(prompt, add_special_tokens=False)
    found = run_tasks(model, dataclasses.replace(known, names=("own_texts",)), chat=True)
    assert "exact_match" in found["own_texts"].metrics


@pytest.mark.soak
def test_a_server_gives_the_scores_of_the_harness(folder, tasks, tmp_path, monkeypatch):
    """`local-completions` of lm-eval asks `shardlib serve` by tokens, with `echo`."""
    # It cuts long texts in another way.
    folder = shutil.copytree(folder, tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    words = ["serve", str(folder), "--port", "0", "--mesh", "fsdp=1"]
    command = [sys.executable, "-m", "shardlib", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stderr.readline, "")
            address = next(found[0] for x in lines if (found := re.search(r"http://\S+:\d+", x)))
            client = LocalCompletionsAPI(
                base_url=f"{address}/v1/completions",
                model="small",
                tokenizer=str(folder),
                tokenizer_backend="huggingface",
                max_length=128,
                add_bos_token=True,
                num_concurrent=4,
            )
            answers, results = evaluated(client, tasks)
        finally:
            server.kill()
    with jax.default_matmul_precision("highest"):
        own = evaluated(harness_model(text_model(str(folder), mesh="fsdp=8")), tasks)
    assert answers["own_texts"] == own[0]["own_texts"]
    for task in NAMES:
        ours = {name: x for name, x in own[1][task].items() if isinstance(x, float)}
        assert {name: results[task][name] for name in ours} == pytest.approx(ours, rel=1e-5)
