"""What cannot be split is refused with the reason, before anything is compiled."""

import jax
import pytest
from refused import Asked

from shardlib.errors import ConfigError, MeshError, ModelError, RuleError
from shardlib.rules import STANDARD
from shardlib.train.pipeline.config import PipelineConfig
from shardlib.train.reduce.reduction import ReductionConfig
from shardlib_models.moe import MoEConfig


def undivided(leaves, logical, reason, mesh, allowing):
    """What is said of parameters with a dim that the mesh does not divide.

    Args: the parameters with their axes and shapes, and the parts of the text.
    """
    faults = [
        f"{path}: logical axis {logical!r} (dim {axes.split().index(logical)} of "
        f"{tuple(axes.split())}, shape {shape}) cannot be sharded: {reason}."
        for path, axes, shape in leaves
    ]
    fix = f"  Change the dim or the mesh ({mesh}), or allow replication: params={allowing}."
    return "\n".join([*faults, fix])


def indivisible_rows(count, fix):
    """What is said of the rows of a batch that cannot be shared out."""
    names = ("positions", "segment_ids", "targets", "tokens")
    shapes = {"num_bytes": (8,), **dict.fromkeys(names, (8, 16))}
    faults = [
        f"the batch's {name} has shape {shape}, whose first dim {count} do not divide."
        for name, shape in shapes.items()
    ]
    return "\n".join([*faults, fix])


NORMS = [
    *(
        f"blocks/{block}/{part}"
        for block in range(8)
        for part in ("branch/0", "branch/1", *(["shortcut"] if block in (2, 4, 6) else []))
    ),
    "stem",
]
STATISTICS = [f"{norm}/norm/{name}" for norm in NORMS for name in ("mean", "var")]

CASES = {
    "heads": (
        Asked("data=2,tensor=4", changes={"num_heads": 6, "num_kv_heads": None, "head_dim": 4}),
        RuleError,
        undivided(
            [
                (
                    "layers/attention/out/kernel",
                    "layers heads head_dim embed",
                    (8, 6, 4, 32),
                ),
                (
                    "layers/attention/query/kernel",
                    "layers embed heads head_dim",
                    (8, 32, 6, 4),
                ),
            ],
            "heads",
            "tensor=4 does not divide 6",
            "data=2,tensor=4",
            "{'heads': ['tensor', None]}",
        ),
    ),
    "key-value heads that are not to be held whole": (
        Asked("data=2,tensor=4", rules=STANDARD.override(kv_heads="tensor")),
        RuleError,
        undivided(
            [
                ("layers/attention/key/kernel", "layers embed kv_heads head_dim", (8, 32, 2, 4)),
                ("layers/attention/value/kernel", "layers embed kv_heads head_dim", (8, 32, 2, 4)),
            ],
            "kv_heads",
            "tensor=4 does not divide 2",
            "data=2,tensor=4",
            "{'kv_heads': ['tensor', None]}",
        ),
    ),
    "hidden units": (
        Asked("data=2,tensor=4", changes={"mlp_dim": 66}),
        RuleError,
        undivided(
            [
                ("layers/mlp/down/kernel", "layers mlp embed", (8, 66, 32)),
                ("layers/mlp/gate/kernel", "layers embed mlp", (8, 32, 66)),
                ("layers/mlp/up/kernel", "layers embed mlp", (8, 32, 66)),
            ],
            "mlp",
            "tensor=4 does not divide 66",
            "data=2,tensor=4",
            "{'mlp': ['tensor', None]}",
        ),
    ),
    "vocabulary": (
        Asked("tensor=8", changes={"vocab_size": 65}),
        RuleError,
        undivided(
            [
                ("head/kernel", "embed vocab", (32, 65)),
                ("token_embedding/embedding", "vocab embed", (65, 32)),
            ],
            "vocab",
            "tensor=8 does not divide 65",
            "tensor=8",
            "{'vocab': ['tensor', None]}",
        ),
    ),
    "experts": (
        Asked("fsdp=2,expert=4", model="moe", changes={"moe": MoEConfig(num_experts=6)}),
        RuleError,
        undivided(
            [
                ("layers/mlp/experts/down", "layers expert mlp embed", (4, 6, 64, 32)),
                ("layers/mlp/experts/gate", "layers expert embed mlp", (4, 6, 32, 64)),
                ("layers/mlp/experts/up", "layers expert embed mlp", (4, 6, 32, 64)),
                ("layers/mlp/router/kernel", "layers embed expert", (4, 32, 6)),
            ],
            "expert",
            "expert=4 does not divide 6",
            "fsdp=2,expert=4",
            "{'expert': ['expert', None]}",
        ),
    ),
    "experts over devices with the same tokens and with others": (
        Asked(
            "expert=2,tensor=4",
            model="moe",
            rules=STANDARD.override(
                expert="expert+tensor", mlp=None, activations={"expert": "expert+tensor"}
            ),
        ),
        RuleError,
        "experts are sharded over expert, which shards tokens too, and over tensor, which shards "
        "none.\n"
        "  Let the rule for the activation axis 'batch' include tensor, or shard 'expert' over "
        "expert alone.",
    ),
    "layers": (
        Asked("stage=4,data=2", changes={"num_layers": 6}, options={"microbatches": 4}),
        RuleError,
        undivided(
            [
                ("layers/attention/key/kernel", "layers embed kv_heads head_dim", (6, 32, 2, 4)),
                ("layers/attention/out/kernel", "layers heads head_dim embed", (6, 8, 4, 32)),
                ("layers/attention/query/kernel", "layers embed heads head_dim", (6, 32, 8, 4)),
                ("layers/attention/value/kernel", "layers embed kv_heads head_dim", (6, 32, 2, 4)),
                ("layers/attention_norm/scale", "layers norm", (6, 32)),
                ("layers/mlp/down/kernel", "layers mlp embed", (6, 64, 32)),
                ("layers/mlp/gate/kernel", "layers embed mlp", (6, 32, 64)),
                ("layers/mlp/up/kernel", "layers embed mlp", (6, 32, 64)),
                ("layers/mlp_norm/scale", "layers norm", (6, 32)),
            ],
            "layers",
            "stage=4 does not divide 6",
            "stage=4,data=2",
            "{'layers': ['stage', None]}",
        ),
    ),
    "layers in chunks": (
        Asked("stage=8", options={"microbatches": 8, "pipeline": "interleaved"}),
        ModelError,
        "8 layers cannot be cut into 8 stages of 2 chunks.\n"
        "  Use a number of layers that 16 divides, or other stages or chunks.",
    ),
    "layers in chunks of their own number": (
        Asked(
            "stage=2,data=4",
            options={
                "microbatches": 2,
                "pipeline": PipelineConfig(schedule="interleaved", chunks_per_stage=3),
            },
        ),
        ModelError,
        "8 layers cannot be cut into 2 stages of 3 chunks.\n"
        "  Use a number of layers that 6 divides, or other stages or chunks.",
    ),
    "length": (
        Asked("data=2,context=4", length=18),
        RuleError,
        "logical axis 'length' (dim 1 of ('batch', 'length'), shape (8, 18)) cannot be sharded: "
        "context=4 does not divide 18.\n"
        "  Change the dim or the mesh (data=2,context=4), or allow replication: "
        "activations={'length': ['context', None]}.",
    ),
    "length over axes that share no attention": (
        Asked(
            "context=4,tensor=2", rules=STANDARD.override(activations={"length": "context+tensor"})
        ),
        ModelError,
        "the rules split 'length' over context+tensor, but attention shares a row over context "
        "alone.\n"
        "  Set the activation rule of 'length' to 'context'.",
    ),
    "length of the residual stream": (
        Asked("tensor=8", rules="sequence", length=20),
        RuleError,
        "logical axis 'residual_length' (dim 1 of ('batch', 'residual_length', 'embed'), shape (8, "
        "20, 32)) cannot be sharded: context+tensor=8 does not divide 20.\n"
        "  Change the dim or the mesh (tensor=8), or allow replication: "
        "activations={'residual_length': ['context+tensor', None]}.",
    ),
    "length of chunks of the loss": (
        Asked("context=8", changes={"loss_chunks": 4}),
        ModelError,
        "4 chunks of the loss do not divide rows of 16 positions in 8 parts.\n"
        "  Choose a number of chunks that divides 2; 1 takes rows whole.",
    ),
    "a ring of a back end that takes whole rows": (
        Asked("context=8", changes={"context": "ring", "attention": "xla"}),
        ModelError,
        "attention by ring over context=8 cannot work: it computes tiles itself, and the back end "
        "xla takes whole rows.\n"
        "  Use backend 'auto', and a length that is a power of two.",
    ),
    "a back end of another platform": (
        Asked("data=8", changes={"attention": "cudnn"}),
        ModelError,
        "attention by cudnn cannot run here: the platform is cpu; the dtype is float32, not "
        "bfloat16 or float16; head_dim is 4, not a multiple of 8 up to 128.\n"
        "  Use backend 'auto' or 'xla'.",
    ),
    "heads by all-to-all": (
        Asked("context=8", changes={"context": "ulysses", "num_heads": 4}),
        ModelError,
        "attention by ulysses over context=8 cannot work: 8 devices do not divide the 4 heads of "
        "each.\n"
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
        "meet over all devices, idle pipeline stages too, and the mesh has stage=2.\n"
        "  Use context 'auto' or 'gather'.",
    ),
    "devices": (
        Asked("data=2,tensor=8"),
        MeshError,
        "mesh data=2,tensor=8 needs 16 devices but 8 are available.\n"
        "  Set one axis to -1 (data=-1,tensor=8 gives 1x8).",
    ),
    "batch": (
        Asked("data=4,fsdp=2", rows=12),
        RuleError,
        "the batch's num_bytes: logical axis 'batch' (dim 0 of ('batch',), shape (12,)) cannot be "
        "sharded: data+fsdp+expert=8 does not divide 12.\n"
        "  Drop a smaller last batch (drop_last=True in most loaders) or pad it, choose another "
        "batch size, or change the mesh or the rules of the batch.",
    ),
    "microbatch": (
        Asked("data=4,tensor=2", options={"microbatches": 4}),
        RuleError,
        "the batch's num_bytes: logical axis 'batch' (dim 0 of ('batch',), shape (2,)) cannot be "
        "sharded: data+fsdp+expert=4 does not divide 2.\n"
        "  Drop a smaller last batch (drop_last=True in most loaders) or pad it, choose another "
        "batch size, or change the mesh or the rules of the batch.",
    ),
    "number of microbatches": (
        Asked("data=2,tensor=4", options={"microbatches": 3}),
        ModelError,
        indivisible_rows(
            "3 microbatches",
            "  Choose a batch that is a multiple of 3, or another number of microbatches.",
        ),
    ),
    "no microbatches": (
        Asked("data=8", options={"microbatches": 0}),
        ModelError,
        "microbatches=0 is not a positive whole number.\n"
        "  Use 1 for no splitting; fit_microbatches finds the fewest that fit into memory.",
    ),
    "microbatches for 1f1b": (
        Asked("stage=4,data=2", options={"microbatches": 2}),
        ModelError,
        "2 microbatches do not fill 4 stages: the schedule 1f1b keeps one in each.\n"
        "  Use at least microbatches=4, fewer stages, or gpipe.",
    ),
    "microbatches for interleaving": (
        Asked("stage=4,data=2", rows=12, options={"microbatches": 6, "pipeline": "interleaved"}),
        ModelError,
        "6 microbatches cannot be interleaved over 4 stages, which take them in groups of 4.\n"
        "  Use a multiple of 4, or the schedule 1f1b.",
    ),
    "an unknown schedule": (
        Asked("stage=2,data=4", options={"microbatches": 2, "pipeline": "zero"}),
        ModelError,
        "no pipeline schedule is called 'zero'.\n  Choose one of: 1f1b, gpipe, interleaved.",
    ),
    "stages without stacked layers": (
        Asked("stage=2,data=4", model="resnet", rows=128, options={"microbatches": 2}),
        ModelError,
        f"the model updates variables when it is called: {', '.join(STATISTICS[:4])}, .... The "
        "stages of a pipeline run microbatches side by side and keep no order of updates.\n"
        "  Use a model without running statistics, or a mesh without stage.",
    ),
    "groups with statistics of their own": (
        Asked(
            "data=8", model="resnet", rows=128, options={"reduction": ReductionConfig(dtype="f32")}
        ),
        ModelError,
        f"the model updates {', '.join(STATISTICS[:4])}, ... as it runs, which would be different "
        "in every group.\n"
        "  Leave train.reduction out to compute such statistics over the whole batch.",
    ),
    "microbatches of too few groups": (
        Asked(
            "data=4,tensor=2", options={"reduction": ReductionConfig(group_microbatches=(1, 2, 1))}
        ),
        ConfigError,
        "reduction.group_microbatches names 3 groups, but the mesh has data=4.\n"
        "  Give 4, one for each group in order.",
    ),
    "microbatches of groups and of all": (
        Asked(
            "data=2,tensor=4",
            options={"microbatches": 2, "reduction": ReductionConfig(group_microbatches=(3, 1))},
        ),
        ConfigError,
        "microbatches=2 conflicts with reduction.group_microbatches, which sets it for each "
        "group.\n"
        "  Leave microbatches at 1.",
    ),
    "rows of unequal groups": (
        Asked("data=2,tensor=4", options={"reduction": ReductionConfig(group_microbatches=(2, 1))}),
        ModelError,
        indivisible_rows(
            "3 microbatches over all groups", "  Choose a batch that is a multiple of 3."
        ),
    ),
    "parameters split between groups": (
        Asked(
            "data=8",
            rules=STANDARD.override(vocab="data"),
            options={"reduction": ReductionConfig(dtype="f32")},
        ),
        RuleError,
        "head/kernel, token_embedding/embedding: split over data, but groups that reduce their "
        "gradients once a step hold whole parameters.\n"
        "  Split parameters over fsdp, and over data gradients or optimizer state at most.",
    ),
    "unequal groups of rings": (
        Asked(
            "data=2,context=4", options={"reduction": ReductionConfig(group_microbatches=(3, 1))}
        ),
        ConfigError,
        "groups that take unequal numbers of microbatches cannot split context: their "
        "collective-permutes meet over all groups, and the group that is done would be waited "
        "for.\n"
        "  Use a mesh without context, or the same count for every group.",
    ),
    "unequal groups of stages": (
        Asked(
            "stage=2,data=4",
            options={"reduction": ReductionConfig(group_microbatches=(1, 2, 1, 4))},
        ),
        ConfigError,
        "groups that take unequal numbers of microbatches cannot split stage: their "
        "collective-permutes meet over all groups, and the group that is done would be waited "
        "for.\n"
        "  Use a mesh without stage, or the same count for every group.",
    ),
    "slices that are none": (
        Asked("data=8", options={"reduction": ReductionConfig(compress_dcn=True)}),
        ConfigError,
        "reduction.compress_dcn is set, but data=8 crosses no slices or hosts.\n"
        "  Set reduction.outer to how many it crosses, or reduction.dtype to bf16.",
    ),
    "slices": (
        Asked("data=8", options={"reduction": ReductionConfig(outer=3)}),
        ConfigError,
        "reduction.outer is 3, which does not divide data=8.\n"
        "  Use the outer degree of the mesh, or leave it out.",
    ),
}


@pytest.fixture
def compilations(caplog):
    """The names of the programs compiled so far."""
    caplog.set_level("WARNING", "jax")
    with jax.log_compiles():
        yield lambda: [r.message for r in caplog.records if "Finished XLA comp" in r.message]


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("name", CASES)
def test_refused_before_compilation(name, compilations):
    asked, kind, text = CASES[name]
    with pytest.raises(kind) as error:
        asked.lower()
    assert str(error.value) == text
    assert not [m for m in compilations() if "train_step" in m or "init" in m]


@pytest.mark.mesh
def test_what_is_refused_works_when_it_divides(compilations):
    """The question is well put: it is the numbers that are refused."""
    Asked("stage=2,fsdp=2,tensor=2", options={"microbatches": 2}).lower()
    Asked("fsdp=2,expert=4", model="moe").lower()
    assert not [m for m in compilations() if "train_step" in m or "init" in m]
