"""Logits equal those of PyTorch's Llama, GPT-2 and OPT with the same random weights."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib.nn.attention import RotaryScaling
from shardlib.registry import DataSpec
from shardlib_models.transformer import make
from shardlib_models.transformer_config import TransformerConfig

pytestmark = pytest.mark.mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS, EMBED, HEADS, KV_HEADS, MLP, VOCAB, POSITIONS = 3, 32, 4, 2, 48, 61, 40
HEAD = EMBED // HEADS

# Sums of at most 48 products of float32 numbers of size about 1, through 3 layers.
TOLERANCE = 1e-4


def assert_same_logits(config, oracle, weights):
    oracle.eval()
    with torch.no_grad():
        # Zero biases and unit scales would hide a swap of two of them.
        for parameter in oracle.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model = nnx.eval_shape(lambda: make(config, DataSpec(), nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    paths = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    found = weights({name: p.detach().numpy() for name, p in oracle.named_parameters()})
    assert found.keys() == paths.keys()
    for path, variable in paths.items():
        assert found[path].shape == variable.get_value().shape, path
        variable.set_value(jnp.asarray(found[path]))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 17))
    with torch.no_grad():
        expected = oracle(torch.from_numpy(tokens)).logits.numpy()
    forward = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    actual = forward(state, jnp.asarray(tokens, jnp.int32))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def stacked(weights, pattern, reshape=lambda x: x):
    return np.stack([reshape(weights[pattern.format(i)]) for i in range(LAYERS)])


def heads_out(num_heads):
    """A PyTorch projection [heads * dim, embed] as [embed, heads, dim]."""
    return lambda w: w.T.reshape(EMBED, num_heads, HEAD)


def llama_weights(w):
    layer = "model.layers.{}."

    def of(name, reshape=np.transpose):
        return stacked(w, layer + name + ".weight", reshape)

    return {
        "token_embedding/embedding": w["model.embed_tokens.weight"],
        "head/kernel": w["lm_head.weight"].T,
        "final_norm/scale": w["model.norm.weight"],
        "layers/attention_norm/scale": of("input_layernorm", np.asarray),
        "layers/mlp_norm/scale": of("post_attention_layernorm", np.asarray),
        "layers/attention/query/kernel": of("self_attn.q_proj", heads_out(HEADS)),
        "layers/attention/key/kernel": of("self_attn.k_proj", heads_out(KV_HEADS)),
        "layers/attention/value/kernel": of("self_attn.v_proj", heads_out(KV_HEADS)),
        "layers/attention/out/kernel": of(
            "self_attn.o_proj", lambda x: x.T.reshape(HEADS, HEAD, EMBED)
        ),
        "layers/mlp/gate/kernel": of("mlp.gate_proj"),
        "layers/mlp/up/kernel": of("mlp.up_proj"),
        "layers/mlp/down/kernel": of("mlp.down_proj"),
    }


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "default", "rope_theta": 500.0}, None),
        (LLAMA3_ROPE, RotaryScaling(factor=4.0, original_positions=16)),
    ],
)
def test_llama_with_grouped_heads(rope, scaling):
    torch.manual_seed(0)
    oracle = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=POSITIONS,
            rope_parameters=rope,
            rms_norm_eps=1e-5,
            attn_implementation="eager",
        )
    )
    config = TransformerConfig(
        num_layers=LAYERS,
        embed_dim=EMBED,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        mlp_dim=MLP,
        vocab_size=VOCAB,
        max_positions=POSITIONS,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
    )
    assert_same_logits(config, oracle, llama_weights)


def classic_config(**changes):
    return TransformerConfig(
        num_layers=LAYERS,
        embed_dim=EMBED,
        num_heads=HEADS,
        mlp_dim=MLP,
        vocab_size=VOCAB,
        max_positions=POSITIONS,
        norm="layer",
        positions="learned",
        mlp="plain",
        tied_embeddings=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        **changes,
    )


def gpt2_weights(w):
    layer = "transformer.h.{}."

    def of(name, reshape=np.asarray):
        return stacked(w, layer + name, reshape)

    found = {
        "token_embedding/embedding": w["transformer.wte.weight"],
        "position_embedding/embedding": w["transformer.wpe.weight"],
        "final_norm/scale": w["transformer.ln_f.weight"],
        "final_norm/bias": w["transformer.ln_f.bias"],
        "layers/attention_norm/scale": of("ln_1.weight"),
        "layers/attention_norm/bias": of("ln_1.bias"),
        "layers/mlp_norm/scale": of("ln_2.weight"),
        "layers/mlp_norm/bias": of("ln_2.bias"),
        "layers/attention/out/kernel": of(
            "attn.c_proj.weight", lambda x: x.reshape(HEADS, HEAD, EMBED)
        ),
        "layers/attention/out/bias": of("attn.c_proj.bias"),
        "layers/mlp/up/kernel": of("mlp.c_fc.weight"),
        "layers/mlp/up/bias": of("mlp.c_fc.bias"),
        "layers/mlp/down/kernel": of("mlp.c_proj.weight"),
        "layers/mlp/down/bias": of("mlp.c_proj.bias"),
    }
    for i, name in enumerate(("query", "key", "value")):
        columns = slice(i * EMBED, (i + 1) * EMBED)
        found[f"layers/attention/{name}/kernel"] = of(
            "attn.c_attn.weight", lambda x, c=columns: x[:, c].reshape(EMBED, HEADS, HEAD)
        )
        found[f"layers/attention/{name}/bias"] = of(
            "attn.c_attn.bias", lambda x, c=columns: x[c].reshape(HEADS, HEAD)
        )
    return found


def test_gpt2():
    torch.manual_seed(1)
    oracle = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=POSITIONS,
            n_embd=EMBED,
            n_layer=LAYERS,
            n_head=HEADS,
            n_inner=MLP,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    )
    assert_same_logits(classic_config(activation="gelu_tanh"), oracle, gpt2_weights)


def opt_weights(w):
    layer = "model.decoder.layers.{}."
    # OPT numbers positions from 2.
    found = {
        "token_embedding/embedding": w["model.decoder.embed_tokens.weight"],
        "position_embedding/embedding": w["model.decoder.embed_positions.weight"][2:],
        "final_norm/scale": w["model.decoder.final_layer_norm.weight"],
        "final_norm/bias": w["model.decoder.final_layer_norm.bias"],
        "layers/attention/out/kernel": stacked(
            w, layer + "self_attn.out_proj.weight", lambda x: x.T.reshape(HEADS, HEAD, EMBED)
        ),
        "layers/attention/out/bias": stacked(w, layer + "self_attn.out_proj.bias"),
    }
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
        name = f"{layer}self_attn.{theirs}_proj"
        found[f"layers/attention/{ours}/kernel"] = stacked(w, name + ".weight", heads_out(HEADS))
        found[f"layers/attention/{ours}/bias"] = stacked(
            w, name + ".bias", lambda x: x.reshape(HEADS, HEAD)
        )
    for ours, theirs in (("up", "fc1"), ("down", "fc2")):
        found[f"layers/mlp/{ours}/kernel"] = stacked(w, f"{layer}{theirs}.weight", np.transpose)
        found[f"layers/mlp/{ours}/bias"] = stacked(w, f"{layer}{theirs}.bias")
    norms = (("attention_norm", "self_attn_layer_norm"), ("mlp_norm", "final_layer_norm"))
    for ours, theirs in norms:
        found[f"layers/{ours}/scale"] = stacked(w, f"{layer}{theirs}.weight")
        found[f"layers/{ours}/bias"] = stacked(w, f"{layer}{theirs}.bias")
    return found


def test_opt():
    torch.manual_seed(2)
    oracle = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            num_hidden_layers=LAYERS,
            ffn_dim=MLP,
            num_attention_heads=HEADS,
            max_position_embeddings=POSITIONS,
            word_embed_proj_dim=EMBED,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    )
    assert_same_logits(classic_config(activation="relu"), oracle, opt_weights)
