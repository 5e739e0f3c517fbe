"""What cannot be split is refused with the reason and a fix, before anything is compiled."""

import jax
import pytest
from refused import Asked

from shardlib.errors import ConfigError, MeshError, ModelError, RuleError
from shardlib.rules import STANDARD
from shardlib.train.pipeline.config import PipelineConfig
from shardlib.train.reduce.reduction import ReductionConfig
from shardlib_models.moe import MoEConfig


def options(**kwargs):
    return {"options": kwargs}


def reduced(**kwargs):
    return {"options": {"reduction": ReductionConfig(**kwargs)}}


def changed(**kwargs):
    return {"changes": kwargs}


# Mesh, the rest of what is asked for, the error, and parts of its text.
APART = STANDARD.override(expert="expert+tensor", mlp=None, activations={"expert": "expert+tensor"})
THREE_CHUNKS = PipelineConfig(schedule="interleaved", chunks_per_stage=3)
SKIPS = {"microbatches": 2, "pipeline": PipelineConfig(skip_idle=True)}

# fmt: off
CASES = {
    "heads": ("data=2,tensor=4", changed(num_heads=6, num_kv_heads=None, head_dim=4), RuleError,
        "layers/attention/out/kernel: logical axis 'heads'", "params={'heads': ['tensor', None]}"),
    "key-value heads that are not to be held whole": ("data=2,tensor=4",
        {"rules": STANDARD.override(kv_heads="tensor")}, RuleError,
        "layers/attention/key/kernel: logical axis 'kv_heads'", "tensor=4 does not divide 2"),
    "hidden units": ("data=2,tensor=4", changed(mlp_dim=66), RuleError,
        "layers/mlp/down/kernel: logical axis 'mlp'", "tensor=4 does not divide 66"),
    "vocabulary": ("tensor=8", changed(vocab_size=65), RuleError,
        "token_embedding/embedding: logical axis 'vocab'", "tensor=8 does not divide 65"),
    "experts": ("fsdp=2,expert=4", {"model": "moe", "changes": {"moe": MoEConfig(num_experts=6)}},
        RuleError, "layers/mlp/experts/down: logical axis 'expert'", "expert=4 does not divide 6"),
    "experts over devices with the same tokens and with others": ("expert=2,tensor=4",
        {"model": "moe", "rules": APART},
        RuleError,
        "experts are sharded over expert, which shards tokens too, and over tensor, which shards",
        "shard 'expert' over expert alone"),
    "layers": ("stage=4,data=2", {"changes": {"num_layers": 3}, "options": {"microbatches": 4}},
        RuleError, "layers/attention_norm/scale: logical axis 'layers'",
        "stage=4 does not divide 3"),
    "layers in chunks": ("stage=8", options(microbatches=8, pipeline="interleaved"), ModelError,
        "8 stages of 2 chunks need 16 layers, and the model has 8", "at least 16 layers"),
    "layers in chunks of their own number": ("stage=2,data=4",
        options(microbatches=2, pipeline=THREE_CHUNKS),
        ModelError, "8 layers cannot be cut into 2 stages of 3 chunks"),
    "length": ("data=2,context=4", {"length": 18}, RuleError,
        "logical axis 'length' (dim 1 of ('batch', 'length'), shape (8, 18))",
        "activations={'length': ['context', None]}"),
    "length over axes that share no attention": ("context=4,tensor=2",
        {"rules": STANDARD.override(activations={"length": "context+tensor"})}, ModelError,
        "the rules split 'length' over context+tensor",
        "Set the activation rule of 'length' to 'context'"),
    "length of the residual stream": ("tensor=8", {"rules": "sequence", "length": 20}, RuleError,
        "logical axis 'residual_length'", "context+tensor=8 does not divide 20"),
    "a ring of a backend that needs whole rows": ("context=8",
        changed(context="ring", attention="xla"), ModelError,
        "attention by ring over context=8 cannot work", "Use backend 'auto'"),
    "a backend of another platform": ("data=8", changed(attention="cudnn"), ModelError,
        "attention by cudnn cannot run here: the platform is cpu", "Use backend 'auto' or 'xla'"),
    "heads by all-to-all": ("context=8", changed(context="ulysses", num_heads=4), ModelError,
        "4 heads cannot be divided over 8 devices", "Use context 'ring' or 'gather'"),
    "a ring in stages that idle": ("stage=2,context=4",
        {"changes": {"context": "ring"}, "options": SKIPS},
        ModelError, "attention by ring over context=4 cannot work",
        "Use context 'auto' or 'gather'"),
    "devices": ("data=2,tensor=8", {}, MeshError,
        "mesh data=2,tensor=8 needs 16 devices but 8 are available", "data=-1,tensor=8 gives 1x8"),
    "batch": ("data=4,fsdp=2", {"rows": 12}, RuleError,
        "the batch's num_bytes: logical axis 'batch'", "drop_last=True"),
    "microbatch": ("data=4,tensor=2", options(microbatches=4), RuleError, "the batch's num_bytes",
        "data+fsdp+expert=4 does not divide 2"),
    "number of microbatches": ("data=2,tensor=4", options(microbatches=3), ModelError,
        "num_bytes has shape (8,), whose first dim cannot be divided into 3 microbatches",
        "a multiple of 3"),
    "no microbatches": ("data=8", options(microbatches=0), ModelError,
        "microbatches=0 is not a positive whole number"),
    "microbatches for 1f1b": ("stage=4,data=2", options(microbatches=2), ModelError,
        "2 microbatches do not fill 4 stages", "microbatches=4, fewer stages, or gpipe"),
    "microbatches for interleaving": ("stage=4,data=2",
        {"rows": 12, "options": {"microbatches": 6, "pipeline": "interleaved"}}, ModelError,
        "6 microbatches cannot be interleaved over 4 stages"),
    "an unknown schedule": ("stage=2,data=4", options(microbatches=2, pipeline="zero"),
        ModelError, "no pipeline schedule is called 'zero'", "1f1b, gpipe, interleaved"),
    "stages without stacked layers": ("stage=2,data=4",
        {"model": "resnet", "rows": 128, "options": {"microbatches": 2}}, ModelError,
        "the model updates variables when it is called: blocks/0/branch/0/norm/mean",
        "a mesh without stage"),
    "groups with statistics of their own": ("data=8",
        {"model": "resnet", "rows": 128, **reduced(dtype="f32")}, ModelError,
        "the model updates blocks/0/branch/0/norm/mean", "Leave train.reduction out"),
    "microbatches of too few groups": ("data=4,tensor=2", reduced(group_microbatches=(1, 2, 1)),
        ConfigError, "reduction.group_microbatches names 3 groups, but the mesh has data=4"),
    "microbatches of groups and of all": ("data=2,tensor=4",
        options(microbatches=2, reduction=ReductionConfig(group_microbatches=(3, 1))),
        ConfigError, "microbatches=2 conflicts with reduction.group_microbatches"),
    "rows of unequal groups": ("data=2,tensor=4", reduced(group_microbatches=(2, 1)), ModelError,
        "whose first dim cannot be divided into 3 microbatches over all groups",
        "a multiple of 3"),
    "parameters split between groups": ("data=8",
        {"rules": STANDARD.override(vocab="data"), **reduced(dtype="f32")}, RuleError,
        "head/kernel, token_embedding/embedding: split over data", "Split parameters over fsdp"),
    "unequal groups of rings": ("data=2,context=4", reduced(group_microbatches=(3, 1)),
        ConfigError, "unequal numbers of microbatches cannot split context",
        "Use a mesh without context"),
    "unequal groups of stages": ("stage=2,data=4", reduced(group_microbatches=(1, 2, 1, 4)),
        ConfigError, "unequal numbers of microbatches cannot split stage"),
    "slices that are none": ("data=8", reduced(compress_dcn=True), ConfigError,
        "reduction.compress_dcn is set, but data=8 crosses no slices or hosts"),
    "slices": ("data=8", reduced(outer=3), ConfigError,
        "reduction.outer is 3, which does not divide data=8"),
}
# fmt: on


@pytest.fixture
def compilations(caplog):
    """The names of the programs compiled so far."""
    caplog.set_level("WARNING", "jax")
    with jax.log_compiles():
        yield lambda: [r.message for r in caplog.records if "Finished XLA comp" in r.message]


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("name", CASES)
def test_refused_before_compilation(name, compilations):
    mesh, asked, kind, *parts = CASES[name]
    with pytest.raises(kind) as error:
        Asked(mesh, **asked).lower()
    assert [part for part in parts if part not in str(error.value)] == []
    assert "\n  " in str(error.value), "a fix is given"
    assert not [m for m in compilations() if "train_step" in m or "init" in m]


@pytest.mark.mesh
def test_what_is_refused_works_when_it_divides(compilations):
    """The question is well put: it is the numbers that are refused."""
    Asked("stage=2,fsdp=2,tensor=2", options={"microbatches": 2}).lower()
    Asked("fsdp=2,expert=4", model="moe").lower()
    assert not [m for m in compilations() if "train_step" in m or "init" in m]
