"""What cannot be split is refused with the reason, before anything is compiled."""

import jax
import pytest
from refused import Asked

from shardlib.errors import ConfigError, ModelError, RuleError
from shardlib.pipeline.config import PipelineConfig
from shardlib.train.reduction import ReductionConfig
from shardlib_models.moe import MoEConfig

CASES = {
    "heads": (
        Asked("data=2,tensor=4", changes={"num_heads": 6, "num_kv_heads": None, "head_dim": 4}),
        RuleError,
        "layers/attention/out/kernel: logical axis 'heads' (dim 1 of ('layers', 'heads', "
        "'head_dim', 'embed'), shape (8, 6, 4, 32)) cannot be sharded: tensor=4 does not divide 6.",
        "  Change the dim or the mesh (data=2,tensor=4), or allow replication: "
        "params={'heads': ['tensor', None]}.",
    ),
    "hidden units": (
        Asked("data=2,tensor=4", changes={"mlp_dim": 66}),
        RuleError,
        "layers/mlp/down/kernel: logical axis 'mlp' (dim 1 of ('layers', 'mlp', 'embed'), shape "
        "(8, 66, 32)) cannot be sharded: tensor=4 does not divide 66.",
        "  Change the dim or the mesh (data=2,tensor=4), or allow replication: "
        "params={'mlp': ['tensor', None]}.",
    ),
    "vocabulary": (
        Asked("tensor=8", changes={"vocab_size": 65}),
        RuleError,
        "head/kernel: logical axis 'vocab' (dim 1 of ('embed', 'vocab'), shape (32, 65)) cannot be "
        "sharded: tensor=8 does not divide 65.",
        "  Change the dim or the mesh (tensor=8), or allow replication: "
        "params={'vocab': ['tensor', None]}.",
    ),
    "experts": (
        Asked("fsdp=2,expert=4", model="moe", changes={"moe": MoEConfig(num_experts=6)}),
        RuleError,
        "layers/mlp/experts/down: logical axis 'expert' (dim 1 of ('layers', 'expert', 'mlp', "
        "'embed'), shape (4, 6, 64, 32)) cannot be sharded: expert=4 does not divide 6.",
        "  Change the dim or the mesh (fsdp=2,expert=4), or allow replication: "
        "params={'expert': ['expert', None]}.",
    ),
    "layers": (
        Asked("stage=4,data=2", changes={"num_layers": 6}, options={"microbatches": 4}),
        RuleError,
        "layers/attention/key/kernel: logical axis 'layers' (dim 0 of ('layers', 'embed', "
        "'kv_heads', 'head_dim'), shape (6, 32, 2, 4)) cannot be sharded: stage=4 does not divide "
        "6.",
        "  Change the dim or the mesh (stage=4,data=2), or allow replication: "
        "params={'layers': ['stage', None]}.",
    ),
    "layers in chunks": (
        Asked("stage=8", options={"microbatches": 8, "pipeline": "interleaved"}),
        ModelError,
        "8 layers cannot be cut into 8 stages of 2 chunks.",
        "  Use a number of layers that 16 divides, or other stages or chunks.",
    ),
    "length": (
        Asked("data=2,context=4", length=18),
        RuleError,
        "logical axis 'length' (dim 1 of ('batch', 'length'), shape (8, 18)) cannot be sharded: "
        "context=4 does not divide 18.",
        "  Change the dim or the mesh (data=2,context=4), or allow replication: "
        "activations={'length': ['context', None]}.",
    ),
    "length of the residual stream": (
        Asked("tensor=8", rules="sequence", length=20),
        RuleError,
        "logical axis 'residual_length' (dim 1 of ('batch', 'residual_length', 'embed'), shape (8, "
        "20, 32)) cannot be sharded: context+tensor=8 does not divide 20.",
        "  Change the dim or the mesh (tensor=8), or allow replication: "
        "activations={'residual_length': ['context+tensor', None]}.",
    ),
    "length of chunks of the loss": (
        Asked("context=8", changes={"loss_chunks": 4}),
        ModelError,
        "4 chunks of the loss do not divide rows of 16 positions in 8 parts.",
        "  Choose a number of chunks that divides 2; 1 takes rows whole.",
    ),
    "heads by all-to-all": (
        Asked("context=8", changes={"context": "ulysses", "num_heads": 4}),
        ModelError,
        "attention by ulysses over context=8 cannot work: 8 devices do not divide the 4 heads of "
        "each.",
        "  Use context 'ring' or 'gather', or a smaller context axis.",
    ),
    "a ring in stages that idle": (
        Asked(
            "stage=2,context=4",
            changes={"context": "ring"},
            options={"microbatches": 2, "pipeline": PipelineConfig(skip_idle=True)},
        ),
        ModelError,
        "attention by ring over context=4 cannot work: its hops are collective-permutes, which "
        "meet over all devices, those of idle pipeline stages too, and the mesh has stage=2.",
        "  Use context 'auto' or 'gather'.",
    ),
    "batch": (
        Asked("data=4,fsdp=2", rows=12),
        RuleError,
        "logical axis 'batch' (dim 0 of ('batch',), shape (12,)) cannot be sharded: "
        "data+fsdp+expert=8 does not divide 12.",
        "  Change the dim or the mesh (data=4,fsdp=2), or allow replication: "
        "activations={'batch': ['data+fsdp+expert', None]}.",
    ),
    "microbatch": (
        Asked("data=4,tensor=2", options={"microbatches": 4}),
        RuleError,
        "logical axis 'batch' (dim 0 of ('batch',), shape (2,)) cannot be sharded: "
        "data+fsdp+expert=4 does not divide 2.",
        "  Change the dim or the mesh (data=4,tensor=2), or allow replication: "
        "activations={'batch': ['data+fsdp+expert', None]}.",
    ),
    "number of microbatches": (
        Asked("data=2,tensor=4", options={"microbatches": 3}),
        ModelError,
        "the batch's num_bytes has shape (8,), whose first dim 3 microbatches do not divide.",
        "  Choose a batch that is a multiple of 3, or another number of microbatches.",
    ),
    "microbatches for 1f1b": (
        Asked("stage=4,data=2", options={"microbatches": 2}),
        ModelError,
        "2 microbatches do not fill 4 stages: the schedule 1f1b keeps one in each.",
        "  Use at least microbatches=4, fewer stages, or gpipe.",
    ),
    "microbatches for interleaving": (
        Asked("stage=4,data=2", rows=12, options={"microbatches": 6, "pipeline": "interleaved"}),
        ModelError,
        "6 microbatches cannot be interleaved over 4 stages, which take them in groups of 4.",
        "  Use a multiple of 4, or the schedule 1f1b.",
    ),
    "an unknown schedule": (
        Asked("stage=2,data=4", options={"microbatches": 2, "pipeline": "zero"}),
        ModelError,
        "no pipeline schedule is called 'zero'.",
        "  Choose one of: 1f1b, gpipe, interleaved.",
    ),
    "tokens in chunks": (
        Asked(
            "expert=8",
            model="moe",
            changes={"moe": MoEConfig(num_experts=8, exchange_chunks=3)},
        ),
        ModelError,
        "the 16 tokens of a device cannot be computed in 3 chunks of equal size.",
        "  Choose exchange_chunks so that it divides 16.",
    ),
    "stages without stacked layers": (
        Asked("stage=2,data=4", model="resnet", rows=128, options={"microbatches": 2}),
        ModelError,
        "the model updates variables when it is called: blocks/0/branch/0/norm/mean, ",
        "  Use a model without running statistics, or a mesh without stage.",
    ),
    "groups with statistics of their own": (
        Asked(
            "data=8", model="resnet", rows=128, options={"reduction": ReductionConfig(dtype="f32")}
        ),
        ModelError,
        "the model updates blocks/0/branch/0/norm/mean, ",
        "  Leave train.reduction out: then such statistics are those of the whole batch.",
    ),
    "microbatches of too few groups": (
        Asked(
            "data=4,tensor=2", options={"reduction": ReductionConfig(group_microbatches=(1, 2, 1))}
        ),
        ConfigError,
        "reduction.group_microbatches names 3 groups, but the mesh has data=4.",
        "  Give 4, one for each group in order.",
    ),
    "unequal groups of stages": (
        Asked(
            "stage=2,data=4",
            options={"reduction": ReductionConfig(group_microbatches=(1, 2, 1, 4))},
        ),
        ConfigError,
        "groups that take unequal numbers of microbatches cannot split stage: their "
        "collective-permutes meet over all groups, and the group that is done would be waited for.",
        "  Use a mesh without stage, or the same count for every group.",
    ),
    "slices": (
        Asked("data=8", options={"reduction": ReductionConfig(outer=3)}),
        ConfigError,
        "reduction.outer is 3, which does not divide data=8.",
        "  Use the outer degree of the mesh, or leave it out.",
    ),
}


@pytest.fixture
def compilations(caplog):
    """The names of the programs compiled so far."""
    caplog.set_level("WARNING", "jax")
    with jax.log_compiles():
        yield lambda: [r.message for r in caplog.records if "Finished XLA comp" in r.message]


@pytest.mark.parametrize("name", CASES)
def test_refused_before_compilation(name, compilations):
    asked, kind, begins, ends = CASES[name]
    with pytest.raises(kind) as error:
        asked.lower()
    assert str(error.value).startswith(begins)
    assert str(error.value).endswith(f"\n{ends}")
    assert not [m for m in compilations() if "_step" in m or "init" in m]


def test_what_is_refused_works_when_it_divides(compilations):
    """The question is well put: it is the numbers that are refused."""
    Asked("stage=2,fsdp=2,tensor=2", options={"microbatches": 2}).lower()
    Asked("fsdp=2,expert=4", model="moe").lower()
    assert not [m for m in compilations() if "_step" in m or "init" in m]
