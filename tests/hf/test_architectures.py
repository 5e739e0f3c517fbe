"""Every architecture: the logits of transformers, the same bits back, and refusals."""

import dataclasses
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import shardlib as sl
from shardlib import hf
from shardlib.engine import Engine
from shardlib.hf.load import describe
from shardlib_models.moe import MoEConfig
from shardlib_models.transformer_block import clamped_swiglu
from shardlib_models.transformer_config import TransformerConfig
from shardlib_models.transformer_decode import generate

pytestmark = pytest.mark.mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 96, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
IDS = {"bos_token_id": 0, "eos_token_id": 1}


OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT_OSS_ROPE = YARN | {"original_max_position_embeddings": 64, "truncate": False}
GEMMA = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 24}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
DEEPSEEK = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
}
GROUPS = {"n_group": 4, "topk_group": 1}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 7.0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def neox(**options):
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    return transformers.GPTNeoXConfig(**sizes, **IDS, **options)


def opt(**options):
    return transformers.OPTConfig(**OPT, **IDS, pad_token_id=1, dropout=0.0, **options)


def stablelm(**options):
    return transformers.StableLmConfig(**SIZES, **IDS, **options)


def gpt_oss(**options):
    sizes = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return transformers.GptOssConfig(**(sizes | {"sliding_window": 5} | options))


def deepseek(config, **options):
    sizes = SIZES | {"num_key_value_heads": 4}
    return config(**(sizes | DEEPSEEK | options))


def qwen2_moe():
    return transformers.Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=40)


def mixtral():
    sizes = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralConfig(**sizes, sliding_window=None)


# The config of each architecture, and a change of config.json that its logits must tell.
CASES = {
    "llama": (lambda: transformers.LlamaConfig(**SIZES), {"rms_norm_eps": 1e-4}),
    "llama3": (
        lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "mistral": (
        lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
        {"sliding_window": 6},
    ),
    "qwen2": (lambda: transformers.Qwen2Config(**SIZES), {"rope_parameters": {"rope_theta": 2e4}}),
    "mixtral": (mixtral, {"hidden_act": "gelu"}),
    "qwen3": (
        lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
        {"rms_norm_eps": 1e-4},
    ),
    "qwen2_moe": (qwen2_moe, {"norm_topk_prob": True}),
    "qwen3_moe": (
        lambda: transformers.Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True),
        {"norm_topk_prob": False},
    ),
    "gemma": (
        lambda: transformers.GemmaConfig(**SIZES, head_dim=16),
        {"hidden_act": "silu"},
    ),
    "phi3": (
        lambda: transformers.Phi3Config(**SIZES, pad_token_id=0, sliding_window=9),
        {"sliding_window": 8},
    ),
    "phi3, partial": (
        lambda: transformers.Phi3Config(**SIZES, pad_token_id=0, partial_rotary_factor=0.5),
        {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4}},
    ),
    "phi3, longrope": (
        lambda: transformers.Phi3Config(**SIZES, pad_token_id=0, rope_parameters=LONGROPE),
        {"original_max_position_embeddings": 32},
    ),
    "granite": (
        lambda: transformers.GraniteConfig(**SIZES, **GRANITE),
        {"residual_multiplier": 0.25},
    ),
    "stablelm": (lambda: stablelm(use_qkv_bias=True), {"layer_norm_eps": 1e-3}),
    "stablelm, parallel": (
        lambda: stablelm(use_parallel_residual=True, qk_layernorm=True),
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
    ),
    "gpt_oss": (gpt_oss, {"layer_types": ["full_attention"] * 3}),
    "gpt_oss, yarn": (
        lambda: gpt_oss(rope_parameters=GPT_OSS_ROPE, num_experts_per_tok=3),
        {"rope_parameters": GPT_OSS_ROPE | {"truncate": True}},
    ),
    "linear": (
        lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
        {"rope_parameters": LINEAR | {"factor": 3.0}},
    ),
    "yarn": (
        lambda: transformers.Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN),
        {"rope_parameters": YARN | {"factor": 3.0}},
    ),
    "gemma2": (
        lambda: transformers.Gemma2Config(**GEMMA, sliding_window=5, attn_logit_softcapping=2.0),
        {"attn_logit_softcapping": 3.0},
    ),
    "gemma3": (
        lambda: transformers.Gemma3TextConfig(
            **GEMMA, sliding_window=5, sliding_window_pattern=3, rope_parameters=GEMMA3_ROPE
        ),
        {"sliding_window_pattern": 2, "layer_types": None},
    ),
    "deepseek_v2": (
        lambda: deepseek(transformers.DeepseekV2Config, q_lora_rank=None),
        {"routed_scaling_factor": 1.0},
    ),
    "deepseek_v2, groups": (
        lambda: deepseek(
            transformers.DeepseekV2Config, topk_method="group_limited_greedy", **GROUPS
        ),
        {"topk_group": 2},
    ),
    "deepseek_v3": (
        lambda: deepseek(transformers.DeepseekV3Config, **GROUPS),
        {"topk_group": 2},
    ),
    "gpt2": (lambda: transformers.GPT2Config(**GPT2, **IDS), {"activation_function": "gelu"}),
    "gptj": (lambda: transformers.GPTJConfig(**GPT2, **IDS, rotary_dim=4), {"rotary_dim": 2}),
    "gpt_neox": (neox, {"hidden_act": "gelu_new"}),
    "gpt_neox, one after the other": (
        lambda: neox(use_parallel_residual=False, rotary_pct=1.0),
        {"use_parallel_residual": True},
    ),
    "opt": (opt, {"activation_function": "gelu"}),
    "opt, 350m": (
        lambda: opt(word_embed_proj_dim=16, do_layer_norm_before=False),
        {"activation_function": "gelu"},
    ),
}


def only(*names):
    """Tests these architectures; the others in the tier `soak`."""
    cases = [pytest.param(x, marks=() if x in names else pytest.mark.soak) for x in CASES]
    return pytest.mark.parametrize("case", cases, indirect=True)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A folder that transformers wrote, with random weights, and its logits of random tokens."""
    make, change = CASES[request.param]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make()).eval()
    with torch.no_grad():
        # Zero biases and unit scales would hide a swap of two of them.
        for tensor in {x.data_ptr(): x for x in model.state_dict().values()}.values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn(tensor.shape))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH), dtype=np.int32)
    return folder, tokens, oracle(model, tokens), change


def oracle(model, tokens, dtype=None):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens.astype(np.int64))).logits.to(dtype).numpy()


def error(actual, expected):
    return np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()


@pytest.fixture(autouse=True)
def highest():
    with jax.default_matmul_precision("highest"):
        yield


# Sums of at most 96 products of float32 numbers, through 3 layers: measured 3e-7 to 7e-7.
TOLERANCE = 1e-5


def test_logits_are_those_of_transformers_and_an_export_has_the_same_bits(case, tmp_path):
    folder, tokens, expected, _ = case
    loaded = hf.load(folder)
    assert error(loaded.logits(jnp.asarray(tokens)), expected) < TOLERANCE
    hf.save(loaded, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    np.testing.assert_array_equal(oracle(again, tokens), expected)


def test_a_field_read_wrongly_would_be_told(case, edited):
    folder, tokens, expected, change = case
    copy = edited(folder, change)
    assert error(hf.load(copy).logits(jnp.asarray(tokens)), expected) > 10 * TOLERANCE


FREE = {"name", "init_from", "init_stddev", "dropout", "attention", "context", "remat"}
FREE |= {"loss_chunks"}
FREE_OF_EXPERTS = {"dispatch", "capacity_factor", "balance", "balance_loss", "balance_over"}
FREE_OF_EXPERTS |= {"router_z_loss", "exchange", "exchange_chunks"}


def test_every_option_that_changes_the_function_is_decided(case):
    """An option without a field or a value would be lost in an export."""
    fields = describe(case[0]).fields
    left = names_of(TransformerConfig) - fields.keys() - FREE
    left -= {"rope_theta", "rope_scaling"} if fields["positions"] == "learned" else set()
    left -= {"head_dim", "num_kv_heads"} if fields["latent"] else set()
    if fields["moe"]:
        left |= names_of(MoEConfig) - fields["moe"].keys() - FREE_OF_EXPERTS
    assert left == set()


def names_of(config):
    return {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize(
    "mesh", ["fsdp=2,expert=2,tensor=2", pytest.param("fsdp=8", marks=pytest.mark.soak)]
)
def test_on_every_mesh(case, tmp_path, mesh):
    folder, tokens, expected, _ = case
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        loaded = hf.load(folder)
        assert error(loaded.logits(jnp.asarray(tokens)), expected) < TOLERANCE
        hf.save(loaded, tmp_path / "out", max_file_bytes=10_000)
    placed = {axis for x in jax.tree.leaves(nnx.state(loaded.model, nnx.Param)) for axis in used(x)}
    assert placed
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    np.testing.assert_array_equal(oracle(again, tokens), expected)


@pytest.mark.rest("soak")
@pytest.mark.parametrize("name", ["gpt_oss, yarn", "granite", "stablelm, parallel"])
def test_generation_with_a_cache_takes_the_tokens_of_transformers(name, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CASES[name][0]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path)
    prompt = np.random.default_rng(0).integers(0, VOCAB, (2, 7), dtype=np.int32)
    model.generation_config.eos_token_id = None
    ids = torch.from_numpy(prompt.astype(np.int64))
    # Beyond the window of 5, and beyond the prompt's own.
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False).numpy()
    model, greedy = hf.load(tmp_path).model, {"temperature": 0.0, "rng": jax.random.key(0)}
    ours = jax.jit(lambda x: generate(model, x, length=12, **greedy))(prompt)
    np.testing.assert_array_equal(ours, theirs)


def continued_as_by_transformers(folder, answers):
    """Asserts that each token is the likeliest of transformers, or within 1e-5 of it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for answer in answers:
        row = np.asarray([[*answer.prompt, *answer.ids]], np.int32)
        logits = oracle(model, row)[0, len(answer.prompt) - 1 : -1]
        chosen = np.take_along_axis(logits, np.asarray(answer.ids)[:, None], axis=-1)[:, 0]
        assert (chosen >= logits.max(axis=-1) - 1e-5).all()


def random_prompts(count):
    """Prompts beyond the windows, and beyond the original length of scaled rotations."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, rng.integers(17, 40)).tolist() for _ in range(count)]


# Windows, latents, sinks and experts, rotations by length, learned positions, one branch.
@only("gemma2", "deepseek_v3", "gpt_oss, yarn", "phi3, longrope", "opt", "gptj")
def test_the_engine_continues_as_transformers_does(case):
    folder, *_ = case
    engine = Engine(hf.load(folder), slots=4, chunk=64)
    answers = engine.generate(random_prompts(8), max_tokens=10, ignore_end=True)
    assert engine.stats().num_steps < 60
    continued_as_by_transformers(folder, answers)


@pytest.mark.soak
def test_200_greedy_answers_are_those_of_transformers(case):
    folder, *_ = case
    engine = Engine(hf.load(folder), slots=32)
    answers = engine.generate(random_prompts(200), max_tokens=16, ignore_end=True)
    continued_as_by_transformers(folder, answers)


@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen3_moe", "expert=2,tensor=2,fsdp=2"),
        ("gemma3", "tensor=2,fsdp=4"),
        ("llama", "tensor=4,data=2"),
        ("deepseek_v3", "expert=2,tensor=2,fsdp=2"),
    ],
)
def test_the_engine_on_meshes(name, mesh, tmp_path):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CASES[name][0]()).save_pretrained(tmp_path)
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        engine = Engine(hf.load(tmp_path), slots=4, chunk=64)
    answers = engine.generate(random_prompts(6), max_tokens=10, ignore_end=True)
    continued_as_by_transformers(tmp_path, answers)


@pytest.mark.rest("soak", keep=2)
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "gemma", "gemma2", "granite"])
def test_bfloat16_is_as_close_to_float32_as_transformers(name, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CASES[name][0]()).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH), dtype=np.int32)
    theirs = oracle(model, tokens, dtype=torch.float32)
    exact = oracle(model.float(), tokens)
    loaded = hf.load(tmp_path)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(loaded.model))} == {jnp.dtype("bfloat16")}
    with jax.default_matmul_precision("default"):
        ours = np.asarray(loaded.logits(jnp.asarray(tokens)))
    distance = np.sqrt(np.mean(np.square(theirs - exact)))
    assert np.sqrt(np.mean(np.square(ours - exact))) < 1.25 * distance


# Logits that are right have right gradients, unless a backward pass is written by hand.
@only("llama", "gemma2", "deepseek_v3", "gpt_oss", "phi3, longrope", "stablelm, parallel", "opt")
def test_gradients_are_those_of_transformers(case, tmp_path):
    """Gradients go into the place of weights, and are compared by the names on disk."""
    folder, tokens, expected, _ = case
    tokens = np.maximum(tokens, 2)  # torch gives the row of a padding id, 0 or 1, no gradient
    weights = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(torch.from_numpy(tokens.astype(np.int64))).logits
    torch.sum(logits * torch.from_numpy(weights)).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(tmp_path / "theirs")

    loaded = hf.load(folder, dtype=jnp.float32)
    graphdef, params, rest = nnx.split(loaded.model, nnx.Param, ...)
    ids = jnp.asarray(tokens)
    loss = jax.jit(lambda params: jnp.sum(nnx.merge(graphdef, params, rest)(ids) * weights))
    nnx.update(loaded.model, jax.grad(loss)(params))
    hf.save(loaded, tmp_path / "ours")

    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    # A bias that only chooses experts has no gradient.
    names = [name for name in ours if "e_score_correction_bias" not in name]
    scale = {name: np.abs(theirs[name]).max() for name in names}
    for name in names:
        # Sums of terms that cancel: relative to the gradients of the largest tensors too.
        size = max(scale[name], 1e-3 * max(scale.values()))
        assert np.abs(ours[name] - theirs[name]).max() <= 1e-4 * size, name


def test_the_hidden_units_of_gpt_oss_beyond_their_bounds():
    experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(gpt_oss())
    gate, up = np.random.default_rng(0).uniform(-12, 12, (2, 50)).astype(np.float32)
    joined = torch.from_numpy(np.stack([gate, up], axis=-1).reshape(-1))
    expected = experts._apply_gate(joined).numpy()
    assert error(clamped_swiglu(jnp.asarray(gate), jnp.asarray(up)), expected) < TOLERANCE


def used(array):
    return {
        axis
        for entry in array.sharding.spec
        for axis in ([entry] if isinstance(entry, str) else entry or ())
    }
