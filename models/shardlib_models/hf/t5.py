"""T5 v1.0, T5 v1.1 and Flan-T5."""

from typing import Any

from shardlib.hf import Architecture, Field, TensorRow, rows
from shardlib_models.hf.encoder_fields import attention


def _table(config: Any) -> tuple[TensorRow, ...]:
    up = "wi_1" if config.mlp == "gated_gelu" else "wi"
    text = """
token_embedding/embedding  shared.weight  vocab embed
"""
    # The MLP is the last part of a layer. The rows of cross-attention have no effect in an encoder.
    for stack, counted, mlp in (("encoder", "encoder_layers", 1), ("decoder", "layers", 2)):
        ours, theirs = f"{stack}/layers", f"{stack}.block.{{{counted}}}.layer"
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        text += f"""
{stack}/bias/table  {bias}.weight  buckets heads
{stack}/norm/scale  {stack}.final_layer_norm.weight  norm
{ours}/attention_norm/scale  {theirs}.0.layer_norm.weight  norm
{attention(f"{ours}/attention", f"{theirs}.0.SelfAttention", "q k v o")}
{ours}/cross_norm/scale  {theirs}.1.layer_norm.weight  norm
{attention(f"{ours}/cross", f"{theirs}.1.EncDecAttention", "q k v o")}
{ours}/mlp_norm/scale  {theirs}.{mlp}.layer_norm.weight  norm
{ours}/mlp/gate/kernel  {theirs}.{mlp}.DenseReluDense.wi_0.weight  mlp embed
{ours}/mlp/up/kernel  {theirs}.{mlp}.DenseReluDense.{up}.weight  mlp embed
{ours}/mlp/down/kernel  {theirs}.{mlp}.DenseReluDense.wo.weight  embed mlp
"""
    return rows(text + "head/kernel  lm_head.weight  vocab embed")


T5 = Architecture(
    name="T5ForConditionalGeneration",
    model_type="t5",
    fields={
        "vocab_size": Field("vocab_size"),
        "d_model": Field("embed_dim"),
        "d_kv": Field("head_dim", resolved="head_size"),
        "d_ff": Field("mlp_dim", resolved="mlp_size"),
        "num_layers": Field("num_layers"),
        "num_decoder_layers": Field("num_decoder_layers", None, resolved="decoder_size"),
        "num_heads": Field("num_heads"),
        "relative_attention_num_buckets": Field("relative_buckets", 32),
        "relative_attention_max_distance": Field("relative_max_distance", 128),
        "feed_forward_proj": Field("mlp", "relu", {"relu": "relu", "gated_gelu": "gated-gelu"}),
        "layer_norm_epsilon": Field("norm_eps", 1e-6),
        "dropout_rate": Field("dropout", 0.1),
        "initializer_factor": Field("init_factor", 1.0),
        "decoder_start_token_id": Field("start_token", 0),
        # Newer versions of transformers write the last, and true for the first whatever it is.
        "tie_word_embeddings": Field("tied_embeddings", True),
        "scale_decoder_outputs": Field("tied_embeddings", True, aliases=("tie_word_embeddings",)),
    },
    fixed={"is_encoder_decoder": True, "is_decoder": False},
    table=_table,
    tied={"shared.weight": "lm_head.weight"},
    attention_dropout="dropout_rate",
    # Copies of the embedding, and a bias that no layer of T5 v1.0 reads.
    ignored=("*.embed_tokens.weight", "*.EncDecAttention.relative_attention_bias.weight"),
)
