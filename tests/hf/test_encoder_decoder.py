"""T5: the logits, gradients and answers of transformers, the same bits back, on every mesh."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib as sl
from shardlib import hf
from shardlib.errors import ConfigError, ModelError
from shardlib.hf.architecture import find_architecture
from shardlib_models.t5 import FAMILY
from shardlib_models.t5_layers import buckets

pytestmark = pytest.mark.mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")

VOCAB, LENGTH, TARGET = 96, 40, 24
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}


def t5(**options):
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES, **options))
    # Small, so that layers decide the next token, and not the last token.
    model.shared.weight.data *= 0.1
    if not model.config.scale_decoder_outputs:
        # The published weights of v1.1 have a head of their own.
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
    return model.eval()


# The model of each version, and a change of config.json that its logits must tell.
CASES = {
    "v1.0": (t5, {"relative_attention_max_distance": 32}),
    "v1.1": (
        lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        {"layer_norm_epsilon": 1e-3},
    ),
}


def texts():
    """Inputs with padding at the end of one, and answers so far."""
    random = np.random.default_rng(0)
    tokens = random.integers(2, VOCAB, (2, LENGTH), dtype=np.int32)
    ids = (np.arange(LENGTH)[None] < np.array([[LENGTH], [LENGTH - 7]])).astype(np.int32)
    before = random.integers(2, VOCAB, (2, TARGET), dtype=np.int32)
    before[:, 0] = 0
    return {"tokens": tokens, "segment_ids": ids, "decoder_tokens": before}


def theirs(model, inputs):
    tensors = {name: torch.from_numpy(x.astype(np.int64)) for name, x in inputs.items()}
    return model(
        input_ids=tensors["tokens"],
        attention_mask=tensors["segment_ids"],
        decoder_input_ids=tensors["decoder_tokens"],
    ).logits


def oracle(model, inputs):
    with torch.no_grad():
        return theirs(model.eval(), inputs).numpy()


def from_folder(folder):
    return transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A folder that transformers wrote, with random weights, and its logits."""
    make, change = CASES[request.param]
    # With seed 0 an input of a ReLU is 0 up to rounding, and its gradient is that of either side.
    torch.manual_seed(1)
    model = make()
    with torch.no_grad():
        # Unit scales would hide a swap of two of them.
        for tensor in {x.data_ptr(): x for x in model.state_dict().values()}.values():
            tensor.add_(0.05 * torch.randn(tensor.shape))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, oracle(model, texts()), change


def error(loaded, expected):
    inputs = texts()
    actual = np.asarray(loaded.logits(inputs.pop("tokens"), **inputs))
    assert actual.shape == expected.shape
    return np.abs(actual - expected).max() / np.abs(expected).max()


@pytest.fixture(autouse=True)
def highest():
    with jax.default_matmul_precision("highest"):
        yield


TOLERANCE = 1e-5


def test_logits_are_those_of_transformers_and_an_export_has_the_same_bits(case, tmp_path):
    folder, expected, _ = case
    loaded = hf.load(folder)
    assert error(loaded, expected) < TOLERANCE
    hf.save(loaded, tmp_path / "out")
    before, after = (
        safetensors.load_file(place / "model.safetensors") for place in (folder, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    np.testing.assert_array_equal(oracle(from_folder(tmp_path / "out"), texts()), expected)


def test_a_field_read_wrongly_would_be_told(case, edited):
    folder, expected, change = case
    assert error(hf.load(edited(folder, change)), expected) > 10 * TOLERANCE


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=4,tensor=2", "data=2,tensor=2,context=2"])
def test_on_every_mesh(case, tmp_path, mesh):
    folder, expected, _ = case
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        loaded = hf.load(folder)
        assert error(loaded, expected) < TOLERANCE
        hf.save(loaded, tmp_path / "out", max_file_bytes=10_000)
    params = jax.tree.leaves(nnx.state(loaded.model, nnx.Param))
    assert not all(x.sharding.is_fully_replicated for x in params)
    np.testing.assert_array_equal(oracle(from_folder(tmp_path / "out"), texts()), expected)


def test_gradients_are_those_of_transformers(case, tmp_path):
    """Gradients go into the place of weights, and are compared by the names on disk."""
    folder, expected, _ = case
    inputs = texts()
    weights = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    model = from_folder(folder).eval()
    torch.sum(theirs(model, inputs) * torch.from_numpy(weights)).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(tmp_path / "theirs")

    loaded = hf.load(folder, dtype=jnp.float32)
    graphdef, params, rest = nnx.split(loaded.model, nnx.Param, ...)
    arrays = jax.tree.map(jnp.asarray, inputs)

    @jax.jit
    def loss(params):
        return jnp.sum(nnx.merge(graphdef, params, rest)(**arrays) * weights)

    nnx.update(loaded.model, jax.grad(loss)(params))
    hf.save(loaded, tmp_path / "ours")

    found = [
        safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")
    ]
    assert found[0].keys() == found[1].keys()
    largest = max(np.abs(x).max() for x in found[0].values())
    for name, expected in found[0].items():
        # Sums of terms that cancel: relative to the gradients of the largest tensors too.
        size = max(np.abs(expected).max(), 1e-3 * largest)
        assert np.abs(found[1][name] - expected).max() <= 1e-4 * size, name


def answers(loaded, inputs):
    options = {"length": 12, "temperature": 0.0, "rng": jax.random.key(0)}
    tokens, ids = jnp.asarray(inputs["tokens"]), jnp.asarray(inputs["segment_ids"])

    def run(model):
        return FAMILY.generate(model, tokens, segment_ids=ids, **options)

    return np.asarray(nnx.jit(run)(loaded.model))[:, LENGTH:]


@pytest.mark.parametrize("mesh", ["data=1", "fsdp=4,tensor=2", "data=2,tensor=2,context=2"])
def test_answers_are_those_of_transformers(case, mesh):
    inputs = {name: np.tile(x, (4, 1)) for name, x in texts().items()}
    inputs["tokens"] = (inputs["tokens"] + np.arange(8, dtype=np.int32)[:, None]) % VOCAB
    tensors = {name: torch.from_numpy(x.astype(np.int64)) for name, x in inputs.items()}
    # Without an end of text: what follows it has no meaning.
    settings = transformers.GenerationConfig(
        max_new_tokens=12, do_sample=False, decoder_start_token_id=0, pad_token_id=0
    )
    model = from_folder(case[0]).eval()
    model.generation_config = settings
    expected = model.generate(
        tensors["tokens"], attention_mask=tensors["segment_ids"], generation_config=settings
    ).numpy()
    devices = jax.devices()[: 1 if mesh == "data=1" else 8]
    with sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD):
        found = answers(hf.load(case[0]), inputs)
    np.testing.assert_array_equal(found, expected[:, 1:])
    assert len(np.unique(found)) > 5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num", "longest"), [(32, 128), (8, 20), (16, 64)])
def test_every_distance_has_the_bucket_of_transformers(bidirectional, num, longest):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-2 * longest, 2 * longest)
    options = {"bidirectional": bidirectional, "num_buckets": num, "max_distance": longest}
    expected = T5Attention._relative_position_bucket(torch.from_numpy(distance), **options)
    actual = buckets(jnp.asarray(distance, jnp.int32), **options)
    np.testing.assert_array_equal(actual, expected.numpy())


def test_logits_need_an_answer_to_begin_with(case):
    loaded = hf.load(case[0])
    with pytest.raises(ModelError, match=r"T5 has no decoder_tokens.*\n  Give decoder_tokens"):
        loaded.logits(texts()["tokens"])


WRONG = {
    "an encoder alone": ({"is_encoder_decoder": False}, "is_encoder_decoder is False"),
    "another activation": (
        {"feed_forward_proj": "gated-silu"},
        "feed_forward_proj is 'gated-silu'; supported: 'relu', 'gated-gelu'",
    ),
}


@pytest.mark.parametrize(("change", "fault"), WRONG.values(), ids=WRONG)
def test_configs_that_no_model_has_are_refused(change, fault):
    with pytest.raises(ConfigError, match=fault):
        find_architecture("T5ForConditionalGeneration")[1].read({**SIZES, **change})
