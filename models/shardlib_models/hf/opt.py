"""OPT, from 125M to 175B; 350M has its norms after the branches and projects its embeddings."""

from shardlib.hf import Architecture, Field, rows
from shardlib_models.hf.decoder_fields import ACTIVATIONS, LAYER_NORM, without

_LAYER = "model.decoder.layers.{layers}"
_ROWS = rows(f"""
token_embedding/embedding  model.decoder.embed_tokens.weight  vocab embed
position_embedding/embedding  model.decoder.embed_positions.weight  positions embed
project_in/kernel  model.decoder.project_in.weight  embed token_dim
project_out/kernel  model.decoder.project_out.weight  token_dim embed
layers/attention_norm/scale|bias  {_LAYER}.self_attn_layer_norm.weight|bias  (norm)
layers/attention/query/kernel|bias  {_LAYER}.self_attn.q_proj.weight|bias  (heads*head_dim) embed
layers/attention/key/kernel|bias  {_LAYER}.self_attn.k_proj.weight|bias  (kv_heads*head_dim) embed
layers/attention/value/kernel|bias  {_LAYER}.self_attn.v_proj.weight|bias  (kv_heads*head_dim) embed
layers/attention/out/kernel|bias  {_LAYER}.self_attn.out_proj.weight|bias  (embed) heads*head_dim
layers/mlp_norm/scale|bias  {_LAYER}.final_layer_norm.weight|bias  (norm)
layers/mlp/up/kernel|bias  {_LAYER}.fc1.weight|bias  (mlp) embed
layers/mlp/down/kernel|bias  {_LAYER}.fc2.weight|bias  (embed) mlp
final_norm/scale|bias  model.decoder.final_layer_norm.weight|bias  (norm)
""")
_PROJECTED = rows("token_embedding/embedding  model.decoder.embed_tokens.weight  vocab token_dim")

OPT = Architecture(
    name="OPTForCausalLM",
    model_type="opt",
    fields={
        "num_hidden_layers": Field("num_layers"),
        "hidden_size": Field("embed_dim"),
        "word_embed_proj_dim": Field("token_dim", None, resolved="token_size"),
        "ffn_dim": Field("mlp_dim", resolved="mlp_size"),
        "num_attention_heads": Field("num_heads"),
        "vocab_size": Field("vocab_size"),
        "max_position_embeddings": Field("max_positions"),
        "activation_function": Field("activation", "relu", ACTIVATIONS),
        "do_layer_norm_before": Field("block", True, {"pre": True, "post": False}),
    },
    fixed={
        "tie_word_embeddings": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
    ours={
        **without(LAYER_NORM, "block", "token_dim"),
        "positions": "learned",
        "position_offset": 2,
        "norm_eps": 1e-5,
        "tied_embeddings": True,
        "num_kv_heads": None,
        "head_dim": None,
    },
    table=lambda config: _ROWS if config.token_size == config.embed_dim else _ROWS + _PROJECTED,
    prefix="model.",
    tied={"model.decoder.embed_tokens.weight": "lm_head.weight"},
)
