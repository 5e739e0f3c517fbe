"""Chats and instructions: tokens, masks, rows and refusals."""

import dataclasses
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib import run
from shardlib.config import load
from shardlib.data import ChatData, InstructionData, StreamPosition, open_data
from shardlib.data.instruct.encode import chat_encoder, encoder, load_tokenizer
from shardlib.data.instruct.template import find_template
from shardlib.errors import DataError
from shardlib.evaluation import TextModel
from shardlib.registry import family
from shardlib.run.served_texts import ServedTexts

BARE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{{ bos_token }}\n{%- for m in messages %}\n"
    "{%- if m.role == 'assistant' %}\n<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{%- else %}\n<|im_start|>{{ m.role }}\n{{ m | tojson }}<|im_end|>\n{%- endif %}\n{%- endfor %}"
)
CHATS = [
    [("system", "Be brief."), ("user", "Hé? <|im_end|> 語"), ("assistant", " Yes, it is 🙂 so.")],
    [("user", "1"), ("assistant", "one"), ("user", "2"), ("assistant", "two\n")],
]


def messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of Hugging Face with special tokens and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["Yes, it is so. one two user assistant"] * 9, trainer)
    special = ["<|im_start|>", "<|im_end|>", "<|begin|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    place = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(place / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>"}
    settings |= {"eos_token": "<|im_end|>", "chat_template": TAGGED}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


def write(path, examples):
    path.write_text("\n".join(map(json.dumps, examples)))
    return str(path)


@pytest.mark.mesh
def test_a_prompt_of_a_chat_is_that_of_transformers(folder):
    """Control tokens of the template are tokens, in samples of a run as in served answers."""
    data = ChatData(tokenizer=str(folder), template=BARE)
    tokenizer = load_tokenizer(data)
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    said = messages([("user", "1")])
    options = {"chat_template": BARE, "add_generation_prompt": True, "return_dict": False}
    expected = oracle.apply_chat_template(said, tokenize=True, **options)
    assert data.prompt_tokens("1", tokenizer) == expected
    assert tokenizer.special_tokens["<|im_start|>"] in expected
    served = TextModel(
        nnx.Module(),
        family("transformer"),
        tokenizer,
        None,
        64,
        0,
        template=lambda: find_template(folder, BARE),
    )
    assert ServedTexts.of(served).chat(said) == expected
    written = [*tokenizer.encode("one"), tokenizer.special_tokens["<|im_end|>"]]
    assert data.sampled_text([*written, *tokenizer.encode("more")], tokenizer) == "one"


def test_the_end_of_an_answer_is_a_line():
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}"
    )
    assert find_template(None, source).answer_end == "<|end|>"
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    assert find_template(None, plain).answer_end == "\n"
    assert find_template(None, "{{ messages[0].content }}").answer_end == ""


@pytest.mark.mesh
def test_chats_equal_those_of_transformers(folder):
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(folder)
    template = find_template(folder, None)
    encode = chat_encoder(load_tokenizer(ChatData(tokenizer=str(folder))))
    for chat in map(messages, CHATS):
        text, spans = template.render(chat)
        assert text == oracle.apply_chat_template(chat, tokenize=False)
        theirs = oracle.apply_chat_template(
            chat, return_assistant_tokens_mask=True, return_dict=True
        )
        ids, mask = encode(text, spans)
        assert ids.tolist() == theirs["input_ids"]
        assert mask.astype(int).tolist() == theirs["assistant_masks"]
        bare, _ = find_template(folder, BARE).render(chat)
        assert bare == oracle.apply_chat_template(chat, tokenize=False, chat_template=BARE)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"é": {}}}},
    }
]
WITH_TOOLS = (
    "{%- if tools %}\n<|im_start|>system\n{% for tool in tools %}{{ tool | tojson(indent=2) }}\n"
    "{% endfor %}{{ strftime_now('%Y') ~ '/' ~ (tools | length) }}<|im_end|>\n{%- endif %}\n"
    "{%- set ns = namespace(seen=0) %}{%- for m in messages %}\n"
    "{%- if m.role not in ['user', 'assistant', 'tool'] %}{% continue %}{% endif %}\n"
    "{%- set ns.seen = ns.seen + 1 %}<|im_start|>{{ m.role ~ loop.index }}\n"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}\n"
    "{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n"
    "{%- endgeneration %}{% else %}{{ m.content | trim }}<|im_end|>{% endif %}\n"
    "{%- if loop.last %}{{ ns.seen }}{% break %}{% endif %}{%- endfor %}"
)
CALLS = [
    *messages([("system", "Be exact."), ("user", "1 + 2?")]),
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
    *messages([("tool", "3"), ("assistant", "It is 3.")]),
]


@pytest.mark.mesh
def test_tools_are_rendered_as_by_transformers(folder, tmp_path):
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(folder)
    options = {"chat_template": WITH_TOOLS, "tools": TOOLS}
    theirs = oracle.apply_chat_template(
        CALLS, return_assistant_tokens_mask=True, return_dict=True, **options
    )
    config = ChatData(tokenizer=str(folder), template=WITH_TOOLS)
    _, encode = encoder(config, load_tokenizer(config))
    for tools in (TOOLS, json.dumps(TOOLS)):
        ids, mask = encode({"messages": CALLS, "tools": tools})
        assert ids.tolist() == theirs["input_ids"]
        assert mask.astype(int).tolist() == theirs["assistant_masks"]
    for wrong, text in (("{", "is not JSON"), ([1], "is not a list of functions")):
        with pytest.raises(DataError, match=text):
            encode({"messages": CALLS, "tools": wrong})


HOSTILE = {
    "attributes": ("{{ messages.__class__.__mro__ }}", "is unsafe"),
    "loops": (
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "steps",
    ),
    "calls": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
    "product": ("{{ 'a' * 10**10 }}", "a value or a text of more than 50,000,000 characters"),
    "power": ("{{ 10**(10**9) }}", "a value or a text"),
    "format": ("{{ '%9999999999d' % 1 }}", "a value or a text"),
    "doubled": (
        "{% set n = namespace(x='ab') %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        "a value or a text",
    ),
    "output": (
        "{% set x %}{% for i in range(9999) %}{{ 'a' * 10**5 }}{% endfor %}{% endset %}",
        "a value or a text",
    ),
    "arithmetic": ("{{ 1 // 0 }}", "division"),
}


@pytest.mark.parametrize(("source", "text"), HOSTILE.values(), ids=HOSTILE)
def test_templates_that_do_harm_or_fail_are_refused(source, text):
    with pytest.raises(DataError, match=rf"template refuses the messages: .*{text}.*\n  Change"):
        find_template(None, source).render(messages(CHATS[1]))


def test_a_template_without_the_tag_gives_the_text_after_its_prompt(folder):
    text, spans = find_template(folder, BARE).render(messages(CHATS[1]))
    assert [text[start:stop] for start, stop in spans] == ["one<|im_end|>\n", "two<|im_end|>\n"]


def sums(tmp_path, count=60, **options):
    examples = [
        {"prompt": f"{n}+1=", "completion": "é" * (n % 5) + str(n + 1)} for n in range(count)
    ]
    path = write(tmp_path / "sums.jsonl", examples)
    return examples, InstructionData(path=path, sequence_length=40, **options)


def test_rows_hold_whole_examples_and_learn_the_completions(tmp_path):
    examples, config = sums(tmp_path, eval_fraction=0.2)
    found = []
    for split in ("train", "eval"):
        source = open_data(config, global_batch=2, seed=0, split=split)
        rows = len(source.read(0, 0, 2)["tokens"]) and (source.num_examples or 30)
        for index in range(rows // 2):
            batch = source.read(index, 0, 2)
            for row in range(2):
                segments = batch["segment_ids"][row]
                for segment in range(1, segments.max() + 1):
                    here = segments == segment
                    tokens, targets = (batch[name][row][here] for name in ("tokens", "targets"))
                    np.testing.assert_array_equal(tokens[1:], targets[:-1])
                    np.testing.assert_array_equal(
                        batch["positions"][row][here], np.arange(here.sum())
                    )
                    learned = targets[batch["loss_mask"][row][here] > 0]
                    assert learned[-1] == 256
                    prompt = bytes(tokens[: len(targets) - len(learned) + 1].tolist()).decode()
                    found.append((split, prompt, bytes(learned[:-1].tolist()).decode()))
                assert not batch["loss_mask"][row][segments == 0].any()
    sides = [{pair[1:] for pair in found if pair[0] == split} for split in ("train", "eval")]
    assert sides[0] | sides[1] == {(e["prompt"] + "\n", e["completion"]) for e in examples}
    assert not sides[0] & sides[1]


def test_a_resumed_stream_and_shares_of_processes_are_those_of_one(tmp_path):
    _, config = sums(tmp_path)
    whole = open_data(config, global_batch=4, seed=3, split="train").read(5, 0, 4)
    resumed = open_data(config, global_batch=4, seed=3, split="train").at(StreamPosition(5, 20))
    for name, values in whole.items():
        parts = [resumed.read(5, start, start + 2)[name] for start in (0, 2)]
        np.testing.assert_array_equal(np.concatenate(parts), values)


def test_long_examples_are_refused_or_cut_with_their_number(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", [{"prompt": "p" * n, "completion": "c"} for n in (3, 9, 40)])
    config = InstructionData(path=path, sequence_length=10, eval_fraction=0.0)
    with pytest.raises(DataError, match=r"2 of 3 examples are longer than a row of 10 tokens.*42"):
        open_data(config, global_batch=1, seed=0, split="train")
    config = dataclasses.replace(config, too_long="truncate")
    open_data(config, global_batch=1, seed=0, split="train").read(0, 0, 1)
    assert "2 of 3 examples to train on are cut" in caplog.text
    assert "1 of them are left out" in caplog.text


@pytest.mark.mesh
def test_every_storage_gives_the_same_rows(tmp_path):
    examples, config = sums(tmp_path)
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(examples)
    pyarrow.parquet.write_table(table, tmp_path / "sums.parquet")
    (tmp_path / "sums2.jsonl.gz").write_bytes(gzip.compress((tmp_path / "sums.jsonl").read_bytes()))
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "d.arrow"}]}))
    with pyarrow.ipc.new_stream(str(saved / "d.arrow"), table.schema) as stream:
        stream.write_table(table)
    expected = open_data(config, global_batch=4, seed=0, split="train").read(1, 0, 4)
    for name in ("sums.parquet", "sums2.jsonl.gz", "saved", "sums.par*"):
        other = dataclasses.replace(config, path=str(tmp_path / name))
        got = open_data(other, global_batch=4, seed=0, split="train").read(1, 0, 4)
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        ({"promt": "a"}, {}, "no field 'prompt'"),
        ({"prompt": 1, "completion": "a"}, {}, "the field 'prompt' holds int, not text"),
        ([], {}, "expected a JSON object, found list"),
        (
            {"messages": messages(CHATS[1]), "tools": [1]},
            {"template": BARE},
            "is not a list of functions",
        ),
        ({"messages": "hi"}, {"template": BARE}, "'messages' is not a list of messages"),
        ({"messages": messages([("user", "a")])}, {"template": BARE}, "has no token to learn"),
        ({}, {"template": "{% if %}"}, "the chat template is malformed"),
        ({}, {"template": None}, "the tokenizer has no chat template"),
        (
            {"messages": messages(CHATS[1])},
            {"template": "{{ raise_exception('no') }}"},
            "the chat template refuses the messages: no",
        ),
        (
            {"messages": messages(CHATS[1])},
            {"template": "{{ messages | length }}"},
            "renders the beginning of a chat in another way",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faults_name_their_place(tmp_path, example, options, message):
    kind = ChatData if options else InstructionData
    config = kind(path=write(tmp_path / "a.jsonl", [example]), **options)
    with pytest.raises(DataError) as caught:
        open_data(config, global_batch=1, seed=0, split="train")
    assert message in str(caught.value)
    assert "\n  " in str(caught.value)


@pytest.mark.mesh
def test_the_loss_counts_only_masked_targets():
    from flax import nnx

    from shardlib_models import transformer

    sizes = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32}
    model = transformer.Transformer(transformer.TransformerConfig(**sizes), 50, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 50, jnp.int32)
    mask = jnp.zeros((2, 8), jnp.int32).at[:, 3:5].set(1)
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": mask}
    batch |= {"segment_ids": jnp.ones((2, 8), jnp.int32)}
    mean, _ = transformer.loss(model, batch, jax.random.key(0), train=False)
    changed = batch | {"targets": jnp.where(mask > 0, tokens, 0)}
    other, _ = transformer.loss(model, changed, jax.random.key(0), train=False)
    assert mean.weight == 4
    np.testing.assert_allclose(other.total, mean.total, rtol=1e-6)


RUN = """
run_dir: {run_dir}
model:
  {{name: transformer, num_layers: 1, embed_dim: 32, num_heads: 4, mlp_dim: 64, vocab_size: 264}}
data: {{kind: instructions, path: {path}, sequence_length: 40, eval_fraction: 0.2}}
optimizer: {{learning_rate: 1.0e-2, warmup_steps: 0, schedule: constant}}
train: {{steps: 20, global_batch: 8, cpu_devices: 8}}
mesh: {mesh}
checkpoint: {{every_steps: 20}}
eval: {{every_steps: 20}}
"""


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "fsdp=8"])
def test_a_run_learns_completions(tmp_path, mesh):
    _, data = sums(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(run_dir=tmp_path / "run", path=data.path, mesh=mesh))
    trained = run.train(load(run.RunConfig, file))
    first, *_ = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert trained.evaluation["loss"] < 0.75 * json.loads(first)["loss"]
