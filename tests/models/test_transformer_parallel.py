"""A transformer under every way to cut its activations: the same loss and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib.errors import RuleError
from shardlib.explain.analysis.collectives import collectives
from shardlib.explain.aot.topology import devices_of
from shardlib.hardware import parse_cluster
from shardlib.mesh import make_mesh
from shardlib.registry import DataSpec
from shardlib.rules import SEQUENCE, STANDARD
from shardlib_models.moe import MoEConfig
from shardlib_models.transformer import FAMILY, loss, make
from shardlib_models.transformer_config import TransformerConfig

VOCAB, BATCH, LENGTH = 32, 8, 16
DATA = DataSpec(vocab_size=VOCAB, sequence_length=LENGTH)
AXES = dict.fromkeys(("tokens", "targets", "segment_ids"), ("batch", "length"))
SMALL = {"num_layers": 2, "embed_dim": 32, "num_heads": 8, "mlp_dim": 64}
# A router decides between experts by rounding only where two are as good, which none are here.
MOE = MoEConfig(num_experts=4, mlp_dim=32, num_shared_experts=1, router_z_loss=1e-3)

MODELS = {
    "plain": TransformerConfig(**SMALL, dropout=0.1),
    "grouped": TransformerConfig(**SMALL, num_kv_heads=2, qkv_bias=True, loss_chunks=2),
    "learned": TransformerConfig(
        **SMALL, positions="learned", max_positions=LENGTH, tied_embeddings=True, loss_chunks=2
    ),
    "experts": TransformerConfig(**SMALL, moe=MOE),
}


def batch_of():
    tokens = jax.random.randint(jax.random.key(2), (BATCH, LENGTH), 0, VOCAB, jnp.int32)
    segments = jnp.asarray(np.arange(LENGTH) // 7 + 1, jnp.int32)[None].repeat(BATCH, 0)
    segments = segments.at[:, -1].set(0)
    targets = jnp.roll(tokens, -1, axis=1)
    return {"tokens": tokens, "targets": targets, "segment_ids": segments}


def make_step():
    return sl.make_train_step(
        lambda model, batch, rng: loss(model, batch, rng, train=True), batch_axes=AXES
    )


def make_state(config, mesh, rules, build=sl.init_state, optimizer=None):
    with sl.use(mesh, rules):
        return build(lambda rngs: make(config, DATA, rngs), optimizer or optax.sgd(1.0))


def one_step(config, mesh, rules=STANDARD):
    """The metrics of a step of gradient descent, and the parameters behind it."""
    state = make_state(config, mesh, rules)
    state, metrics = make_step()(state, batch_of())
    return jax.device_get((metrics, state.params))


@functools.cache
def on_one_device(name):
    return one_step(MODELS[name], make_mesh("data=1", devices=jax.devices()[:1]))


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=4)
@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    [
        ("plain", "data=2,context=2,tensor=2", SEQUENCE),
        ("grouped", "fsdp=2,tensor=4", SEQUENCE),
        ("learned", "context=2,tensor=4", STANDARD),
        ("experts", "expert=2,context=2,tensor=2", SEQUENCE),
        ("experts", "expert=4,fsdp=2", STANDARD),
        ("plain", "tensor=8", SEQUENCE),
        ("grouped", "tensor=8", STANDARD),
        ("grouped", "data=2,context=4", STANDARD),
        ("learned", "fsdp=2,tensor=4", SEQUENCE),
    ],
)
def test_a_step_is_that_of_one_device(name, mesh, rules):
    found = one_step(MODELS[name], make_mesh(mesh), rules)
    # Sums over devices in another order: some units of the last place of the largest entry.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6 * max(1.0, float(abs(b).max()))),
        found,
        on_one_device(name),
    )


def collectives_of(config, mesh, rules=STANDARD):
    mesh = make_mesh(mesh)
    state = make_state(config, mesh, rules, sl.abstract_state)
    compiled = make_step().lower(state, batch_of()).compile()
    return collectives(compiled, mesh)


@pytest.mark.mesh
def test_shared_key_value_heads_are_computed_where_they_are_read():
    config = TransformerConfig(**SMALL, num_kv_heads=2)
    found = collectives_of(config, "tensor=8")
    kernel_bytes = 4 * 2 * 32 * 2 * 4
    # The residual stream, and beyond it nothing but the gradients of the shared kernels.
    residual = f"f32[{BATCH},{LENGTH},{config.embed_dim}]"
    others = [c for c in found if residual not in c.shapes and c.in_loop]
    assert others
    assert all(c.bytes <= kernel_bytes and "transpose" in c.op_name for c in others)


@pytest.mark.mesh
def test_under_sequence_rules_branches_gather_what_they_read():
    config = MODELS["grouped"]
    found = collectives_of(TransformerConfig(**SMALL, num_kv_heads=8), "tensor=8", SEQUENCE)
    gathers = [c for c in found if c.kind == "all-gather" and c.in_loop]
    residual = f"f32[{BATCH},{LENGTH},{config.embed_dim}]"
    # Forward what enters attention and MLP, backward the gradients of what comes out of them.
    assert [c.shapes for c in gathers] == [(residual,)] * 4
    assert [("transpose" in c.op_name) for c in gathers].count(True) == 2


@pytest.mark.aot
def test_under_sequence_rules_a_gpu_sums_no_activation_whole():
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    mesh = make_mesh("fsdp=4,tensor=2", devices=devices_of(parse_cluster("8xh100")))
    config = TransformerConfig(**SMALL, num_kv_heads=8, attention="xla")
    state = make_state(config, mesh, SEQUENCE, sl.abstract_state)
    batch = jax.eval_shape(batch_of)
    found = collectives(make_step().lower(state, batch).compile(), mesh)
    # The residual stream of a device has 4,096 bytes, statistics of its positions 128.
    kinds = {c.kind for c in found if c.mesh_axes == ("tensor",) and c.bytes >= 4096}
    assert kinds == {"all-gather", "reduce-scatter"}


def test_a_length_that_sequence_rules_cannot_cut_is_refused():
    mesh = make_mesh("data=2,tensor=4")
    state = make_state(MODELS["plain"], mesh, SEQUENCE, sl.abstract_state)
    batch = {name: rows[:, :14] for name, rows in batch_of().items()}
    with pytest.raises(
        RuleError,
        match=r"'residual_length' .* context\+tensor=4 does not divide 14.*\n  Change the dim",
    ):
        make_step().lower(state, batch)


def test_a_vocabulary_that_does_not_divide_is_refused():
    mesh = make_mesh("data=2,tensor=4")
    with sl.use(mesh, STANDARD), pytest.raises(RuleError) as caught:
        sl.abstract_state(
            lambda rngs: make(MODELS["plain"], DataSpec(vocab_size=30), rngs), optax.sgd(1.0)
        )
    assert "logical axis 'vocab'" in str(caught.value)
    assert "tensor=4 does not divide 30." in str(caught.value)


@pytest.mark.mesh
def test_generation_under_sequence_rules_takes_prompts_of_any_length():
    config = TransformerConfig(**SMALL, num_kv_heads=2)
    prompt = jnp.asarray(np.arange(10).reshape(2, 5), jnp.int32)

    def continued(mesh):
        state = make_state(config, mesh, SEQUENCE)

        def generate(state):
            with sl.use(mesh, SEQUENCE):
                model = state.model
                return FAMILY.generate(model, prompt, length=4, temperature=0.0, rng=state.rng)

        return np.asarray(jax.jit(generate)(state))

    expected = continued(make_mesh("data=1", devices=jax.devices()[:1]))
    np.testing.assert_array_equal(continued(make_mesh("data=2,context=2,tensor=2")), expected)


def test_choices_are_said_with_their_reasons():
    config = TransformerConfig(**SMALL, num_kv_heads=2)

    def found(mesh):
        with sl.use(make_mesh(mesh), STANDARD):
            return FAMILY.choices(config, DATA, dtype=jnp.float32)

    assert found("data=2,tensor=4")["attention"] == "xla: the platform is cpu"
    assert found("data=2,tensor=4")["kv_heads"].startswith("each computed on 2 devices: ")
    assert list(found("data=2,context=4")) == ["context"]
    assert found("data=2,context=4")["context"].startswith("ring: ")
