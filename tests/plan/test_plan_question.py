"""Questions: all their faults, batches in tokens, what a model says of itself."""

import re

import pytest

from shardlib.cost.workload import Job
from shardlib.errors import ConfigError
from shardlib.plan import plan
from shardlib.plan.workloads.named_models import named_model
from shardlib.plan.workloads.transformer import TransformerWorkload

LLAMA8 = named_model("llama3-8b").model


def workload(batch=512):
    return TransformerWorkload(Job(LLAMA8, 8192, batch))


def refusal(kind, *args, **options):
    with pytest.raises(kind) as refused:
        plan(*args, **options)
    return str(refused.value)


def test_all_faults_of_a_question_at_once():
    options = {"objective": "chps", "days": -1, "global_batch_tokens": "4X", "precision": "bf61"}
    text = refusal(ConfigError, "lama3-70b", on="v5pp-8", **options)
    assert text.startswith("the question has 6 faults:\n  no objective is called 'chps'.")
    for part in (
        "Did you mean 'chips'?",
        "days is -1, but must be a positive number.\n    Give another one.",
        "days gives a deadline, but not the tokens",
        "'4X' is not a number of tokens.\n    Write it as 4M",
        "no precision is called 'bf61'. Did you mean 'bf16'?\n    Choose one of: f32, bf16, bf16_",
        "cluster 'v5pp-8' is unknown. Did you mean 'v5p'?",
        "no model is known by the name 'lama3-70b'. Did you mean 'llama3-70b'?",
    ):
        assert part in text
    assert "not known.\n  Give length" in refusal(ConfigError, LLAMA8, on="8xh100")
    both = {"global_batch": 8, "global_batch_tokens": "1M"}
    assert "exclude each other" in refusal(ConfigError, "llama3-8b", on="8xh100", **both)


NO_TOKENS = "but not the tokens to train on.\n  Give tokens too."
POSITIVE = "a positive number.\n  Give another one."
WHOLE = "a whole number of at least 1.\n  Give another number."


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"days": "30"}, f"days is '30', but must be {POSITIVE}"),
        ({"global_batch": 64.5}, f"global_batch is 64.5, but must be {WHOLE}"),
        ({"on": 8}, "on is 8, but must be a cluster.\n  Name one, as in v5p-128"),
        ({"why_not": 8}, "why_not is 8, but must be a mesh, or several.\n  Name one, as in fsdp=8"),
        ({"tokens": ()}, "() is not a number of tokens.\n  Write it as 4M or 4194304"),
        # What cannot be told without the length of a run.
        ({"tokens": None, "price": 2}, f"price gives an hourly cost, {NO_TOKENS}"),
        ({"tokens": None, "on": "v5p", "days": 30}, f"days gives a deadline, {NO_TOKENS}"),
    ],
)
def test_what_cannot_be_asked(options, text):
    options = {"on": "v5p-8", "tokens": "1T", **options}
    assert refusal(ConfigError, "llama3-8b", **options).startswith(text)


@pytest.mark.mesh
def test_batches_in_tokens():
    def batch(**options):
        return plan("llama3-8b", on="v5p-32", top=1, **options).workload.batch

    assert batch() == batch(global_batch_tokens="4M") == batch(global_batch=512) == 512
    assert batch(global_batch_tokens="4M", length=4096) == 1024
    assert batch(global_batch_tokens=2**21) == 256
    assert re.match(
        r"global_batch_tokens \(--global-batch\) is 512, less(.|\n)*\n  It counts tokens: 512",
        refusal(ConfigError, "llama3-8b", on="v5p-32", global_batch_tokens=512),
    )


@pytest.mark.mesh
def test_what_a_workload_has_of_its_own():
    """A workload says its precision and its length; tokens of a step give it another batch."""

    def asked(**options):
        return plan(workload(512), on="v5p-32", top=1, **options)

    assert asked(global_batch_tokens="2M").workload.batch == 256
    assert asked(global_batch=256).workload.batch == 256
    assert asked().workload.batch == 512
    assert re.match(
        r"precision is f32, but TransformerWorkload is a(.|\n)*\n  Leave it out, or trace",
        refusal(ConfigError, workload(), on="v5p-32", precision="f32"),
    )
    assert re.match(
        r"length is 64, but TransformerWorkload was traced(.|\n)*\n  Leave it out, or give a",
        refusal(ConfigError, workload(), on="v5p-32", length=64),
    )
