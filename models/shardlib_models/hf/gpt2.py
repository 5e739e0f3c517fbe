"""GPT-2, whose query, key and value are one tensor [in, out]."""

from shardlib.hf import Architecture, Field, rows
from shardlib_models.hf.decoder_fields import LAYER_NORM

_BLOCK = "transformer.h.{layers}."
_ROWS = rows(f"""
token_embedding/embedding  transformer.wte.weight  vocab embed
position_embedding/embedding  transformer.wpe.weight  positions embed
layers/attention_norm/scale|bias  {_BLOCK}ln_1.weight|bias  (norm)
layers/attention/query/kernel|bias  {_BLOCK}attn.c_attn.weight|bias  embed (+heads*head_dim)
layers/attention/key/kernel|bias  {_BLOCK}attn.c_attn.weight|bias  embed (+kv_heads*head_dim)
layers/attention/value/kernel|bias  {_BLOCK}attn.c_attn.weight|bias  embed (+kv_heads*head_dim)
layers/attention/out/kernel|bias  {_BLOCK}attn.c_proj.weight|bias  heads*head_dim (embed)
layers/mlp_norm/scale|bias  {_BLOCK}ln_2.weight|bias  (norm)
layers/mlp/up/kernel|bias  {_BLOCK}mlp.c_fc.weight|bias  embed (mlp)
layers/mlp/down/kernel|bias  {_BLOCK}mlp.c_proj.weight|bias  mlp (embed)
final_norm/scale|bias  transformer.ln_f.weight|bias  (norm)
head/kernel  lm_head.weight  vocab embed
""")

GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    fields={
        "n_layer": Field("num_layers"),
        "n_embd": Field("embed_dim"),
        "n_head": Field("num_heads"),
        "n_inner": Field("mlp_dim", None),
        "n_positions": Field("max_positions"),
        "vocab_size": Field("vocab_size"),
        "layer_norm_epsilon": Field("norm_eps"),
        "embd_pdrop": Field("dropout", 0.1),
        "resid_pdrop": Field("dropout", 0.1),
        "tie_word_embeddings": Field("tied_embeddings", True),
        "activation_function": Field(
            "activation", "gelu_new", {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
        ),
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    ours={**LAYER_NORM, "positions": "learned", "num_kv_heads": None, "head_dim": None},
    table=lambda config: _ROWS,
    prefix="transformer.",
    tied={"transformer.wte.weight": "lm_head.weight"},
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)
