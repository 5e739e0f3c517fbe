"""GPT-J, whose branches are parallel under one norm, and whose rotary pairs are neighbours."""

from shardlib.hf import Architecture, Field, rows
from shardlib_models.hf.decoder_fields import LAYER_NORM, without

_BLOCK = "transformer.h.{layers}"
_ROWS = rows(f"""
token_embedding/embedding  transformer.wte.weight  vocab embed
layers/attention_norm/scale|bias  {_BLOCK}.ln_1.weight|bias  (norm)
layers/attention/query/kernel  {_BLOCK}.attn.q_proj.weight  heads*head_dim embed
layers/attention/key/kernel  {_BLOCK}.attn.k_proj.weight  kv_heads*head_dim embed
layers/attention/value/kernel  {_BLOCK}.attn.v_proj.weight  kv_heads*head_dim embed
layers/attention/out/kernel  {_BLOCK}.attn.out_proj.weight  embed heads*head_dim
layers/mlp/up/kernel|bias  {_BLOCK}.mlp.fc_in.weight|bias  (mlp) embed
layers/mlp/down/kernel|bias  {_BLOCK}.mlp.fc_out.weight|bias  (embed) mlp
final_norm/scale|bias  transformer.ln_f.weight|bias  (norm)
head/kernel|bias  lm_head.weight|bias  (vocab) embed
""")

GPTJ = Architecture(
    name="GPTJForCausalLM",
    model_type="gptj",
    fields={
        "n_layer": Field("num_layers"),
        "n_embd": Field("embed_dim"),
        "n_head": Field("num_heads"),
        "n_inner": Field("mlp_dim", None),
        "n_positions": Field("max_positions"),
        "rotary_dim": Field("rotary_dims"),
        "vocab_size": Field("vocab_size"),
        "layer_norm_epsilon": Field("norm_eps"),
        "embd_pdrop": Field("dropout", 0.0),
        "resid_pdrop": Field("dropout", 0.0),
        "activation_function": Field(
            "activation", "gelu_new", {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
        ),
    },
    fixed={"tie_word_embeddings": False},
    ours={
        **without(LAYER_NORM, "rotary_dims"),
        "block": "parallel_one_norm",
        "rotary_interleaved": True,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tied_embeddings": False,
        "head_bias": True,
        "qkv_bias": False,
        "out_bias": False,
        "num_kv_heads": None,
        "head_dim": None,
    },
    table=lambda config: _ROWS,
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
