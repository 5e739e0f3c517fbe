"""GPT-NeoX and Pythia, whose query, key and value are joined within each head."""

from shardlib.hf import Architecture, Field, rows
from shardlib_models.hf.decoder_fields import ACTIVATIONS, LAYER_NORM, rope, without

_LAYER = "gpt_neox.layers.{layers}"
_FUSED = f"{_LAYER}.attention.query_key_value"
_ROWS = rows(f"""
token_embedding/embedding  gpt_neox.embed_in.weight  vocab embed
layers/attention_norm/scale|bias  {_LAYER}.input_layernorm.weight|bias  (norm)
layers/attention/query/kernel|bias  {_FUSED}.weight|bias  (heads*+head_dim) embed
layers/attention/key/kernel|bias  {_FUSED}.weight|bias  (kv_heads*+head_dim) embed
layers/attention/value/kernel|bias  {_FUSED}.weight|bias  (kv_heads*+head_dim) embed
layers/attention/out/kernel|bias  {_LAYER}.attention.dense.weight|bias  (embed) heads*head_dim
layers/mlp_norm/scale|bias  {_LAYER}.post_attention_layernorm.weight|bias  (norm)
layers/mlp/up/kernel|bias  {_LAYER}.mlp.dense_h_to_4h.weight|bias  (mlp) embed
layers/mlp/down/kernel|bias  {_LAYER}.mlp.dense_4h_to_h.weight|bias  (embed) mlp
final_norm/scale|bias  gpt_neox.final_layer_norm.weight|bias  (norm)
head/kernel  embed_out.weight  vocab embed
""")

NEOX = Architecture(
    name="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    fields={
        "num_hidden_layers": Field("num_layers"),
        "hidden_size": Field("embed_dim"),
        "intermediate_size": Field("mlp_dim", resolved="mlp_size"),
        "num_attention_heads": Field("num_heads"),
        "vocab_size": Field("vocab_size"),
        "max_position_embeddings": Field("max_positions"),
        "layer_norm_eps": Field("norm_eps"),
        "hidden_dropout": Field("dropout", 0.0),
        "tie_word_embeddings": Field("tied_embeddings", False),
        "hidden_act": Field("activation", "gelu", {**ACTIVATIONS, "gelu_tanh": "gelu_new"}),
        "use_parallel_residual": Field("block", True, {"parallel": True, "pre": False}),
    },
    fixed={"attention_bias": True},
    ours={
        **without(LAYER_NORM, "block", "rotary_dims"),
        "num_kv_heads": None,
        "head_dim": None,
    },
    converters=(rope(theta="rotary_emb_base", partial="rotary_pct", default_partial=0.25),),
    table=lambda config: _ROWS,
    tied={"gpt_neox.embed_in.weight": "embed_out.weight"},
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
)
