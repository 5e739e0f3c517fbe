"""Published sizes have the published numbers of parameters."""

import math

import jax
import pytest
from flax import nnx

from shardlib.config import from_dict
from shardlib.plan.workloads.named_models import NAMED
from shardlib.registry import DataSpec
from shardlib_models.sizes import SIZES
from shardlib_models.transformer import make
from shardlib_models.transformer_config import TransformerConfig, validate

# As the pages of the models on the hub count them.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    # "gpt-oss-120b & gpt-oss-20b Model Card", table 1, has 20.91B and 116.83B.
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "phi3-mini-4k": 3_821_079_552,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
}


def test_every_size_has_a_published_number():
    assert PUBLISHED.keys() == SIZES.keys()


@pytest.mark.rest("mesh", keep=4)
@pytest.mark.parametrize("size", SIZES)
def test_parameters(size):
    config = from_dict(TransformerConfig, SIZES[size], size)
    assert validate(config, DataSpec()) == []
    state = jax.eval_shape(lambda: nnx.state(make(config, DataSpec(), nnx.Rngs(0)), nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == PUBLISHED[size]


def test_sizes_agree_with_the_models_of_the_planner():
    """Vocabularies are left out: the planner pads those of GPT-2."""
    names = {"layers": "num_layers", "embed": "embed_dim", "heads": "num_heads"}
    names |= {"kv_heads": "kv_heads", "head_dim": "head_size", "mlp": "mlp_size"}
    shared = SIZES.keys() & NAMED.keys()
    assert len(shared) > 15
    for size in shared:
        config = from_dict(TransformerConfig, SIZES[size], size)
        for theirs, ours in names.items():
            assert getattr(NAMED[size].model, theirs) == getattr(config, ours), (size, ours)
