"""T5 v1.0, T5 v1.1 and Flan-T5."""

from typing import Any

from shardlib.hf import Architecture, Field, TensorRow, rows


def _attention(ours: str, theirs: str) -> str:
    return f"""
{ours}/query/kernel  {theirs}.q.weight  heads*head_dim embed
{ours}/key/kernel  {theirs}.k.weight  kv_heads*head_dim embed
{ours}/value/kernel  {theirs}.v.weight  kv_heads*head_dim embed
{ours}/out/kernel  {theirs}.o.weight  embed heads*head_dim
"""


def _stack(stack: str, mlp: int, gated: bool) -> str:
    """Returns the rows of a stack whose layers have their MLP in the part of that number."""
    counted = "encoder_layers" if stack == "encoder" else "layers"
    ours, theirs = f"{stack}/layers", f"{stack}.block.{{{counted}}}.layer"
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    up = "wi_1" if gated else "wi"
    return f"""
{stack}/bias/table  {table}  buckets heads
{stack}/norm/scale  {stack}.final_layer_norm.weight  norm
{ours}/attention_norm/scale  {theirs}.0.layer_norm.weight  norm
{_attention(f"{ours}/attention", f"{theirs}.0.SelfAttention")}
{ours}/mlp_norm/scale  {theirs}.{mlp}.layer_norm.weight  norm
{ours}/mlp/gate/kernel  {theirs}.{mlp}.DenseReluDense.wi_0.weight  mlp embed
{ours}/mlp/up/kernel  {theirs}.{mlp}.DenseReluDense.{up}.weight  mlp embed
{ours}/mlp/down/kernel  {theirs}.{mlp}.DenseReluDense.wo.weight  embed mlp
"""


def _table(config: Any) -> tuple[TensorRow, ...]:
    gated, cross = config.mlp == "gated_gelu", "decoder.block.{layers}.layer.1"
    return rows(f"""
token_embedding/embedding  shared.weight  vocab embed
head/kernel  lm_head.weight  vocab embed
{_stack("encoder", 1, gated)}
{_stack("decoder", 2, gated)}
decoder/layers/cross_norm/scale  {cross}.layer_norm.weight  norm
{_attention("decoder/layers/cross", f"{cross}.EncDecAttention")}
""")


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
        "initializer_factor": Field("init_factor", 1.0),
        "decoder_start_token_id": Field("start_token", 0),
        # Newer versions of transformers write the last, and true for the first whatever it is.
        "tie_word_embeddings": Field("tied_embeddings", True),
        "scale_decoder_outputs": Field("tied_embeddings", True, aliases=("tie_word_embeddings",)),
    },
    fixed={"is_encoder_decoder": True, "is_decoder": False},
    ours={},
    table=_table,
    tied={"shared.weight": "lm_head.weight"},
    # Copies of the embedding, and a bias that no layer of T5 v1.0 reads.
    ignored=(
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    ),
)
