"""What a step may be given as a batch, and from where."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardlib as sl
from shardlib.errors import DataError, ModelError
from shardlib.train.batches import moved

X = np.random.default_rng(0).standard_normal((16, 4), dtype=np.float32)
BATCH = {"x": X, "y": np.arange(16, dtype=np.int32)}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


def loss_fn(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"].astype(jnp.float32)[:, None]))


def start(make=Model, mesh="data=2,fsdp=2,tensor=2", **options):
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        return sl.init_state(make, optax.sgd(0.1), seed=0, **options)


def first_loss(batch, loss_fn=loss_fn):
    return float(sl.make_train_step(loss_fn)(start(), batch)[1]["loss"])


def mesh_sharding(*spec):
    return jax.NamedSharding(start().definition.scope.mesh, jax.P(*spec))


ELSEWHERE = {
    "one device": lambda x: jax.device_put(x, jax.devices()[5]),
    "not committed": jnp.asarray,
    "replicated": lambda x: jax.device_put(x, mesh_sharding()),
    "over another axis": lambda x: jax.device_put(x, mesh_sharding("tensor")),
    "another mesh": lambda x: jax.device_put(
        x, jax.NamedSharding(sl.make_mesh("data=4", devices=jax.devices()[:4]), jax.P("data"))
    ),
    "torch": lambda x: pytest.importorskip("torch").from_numpy(x),
}


@pytest.mark.mesh
@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_batch_is_taken_from_wherever_it_lies(place):
    batch = {"x": ELSEWHERE[place](X), "y": BATCH["y"]}
    expected = first_loss(BATCH)
    assert first_loss(batch) == expected
    sums = sl.make_eval_step(loss_fn)(start(), batch)
    assert float(sums["loss"].value) == pytest.approx(expected, rel=1e-6)
    local = sl.make_local_sgd(sl.make_train_step(loss_fn), sl.LocalSGDConfig())
    local(local.init(start()), batch)


def test_a_batch_without_rows_is_refused():
    batch = {name: array[:0] for name, array in BATCH.items()}
    for step in (sl.make_train_step(loss_fn), sl.make_eval_step(loss_fn)):
        with pytest.raises(DataError) as error:
            step(start(), batch)
        assert str(error.value) == "no leaf of the batch has a row.\n  Leave out empty batches."


def test_leaves_may_differ_in_their_rows():
    """As nodes and edges of graphs do."""

    def with_edges(model, batch):
        return loss_fn(model, batch) + jnp.mean(batch["edges"])

    batch = {**BATCH, "edges": np.ones(32, np.float32)}
    assert first_loss(batch, with_edges) == pytest.approx(first_loss(BATCH) + 1, rel=1e-6)


def test_later_batches_are_moved_without_a_refusal_or_a_compilation(compilations):
    step, state = sl.make_train_step(loss_fn), start()
    first, last = (
        jax.tree.map(lambda x, d=d: jax.device_put(x, d), BATCH) for d in jax.devices()[1:3]
    )
    for batch in (first, first, last, jax.device_put(first, mesh_sharding())):
        state, _ = step(state, batch)
    assert sum("train_step" in message for message in compilations()) == 1
    (program,) = step._programs.values()
    assert program.moves
    assert moved((BATCH,), program.placed) is None


@pytest.mark.mesh
def test_torch_tensors_keep_their_bits():
    torch = pytest.importorskip("torch")
    narrow = torch.from_numpy(X).to(torch.bfloat16).requires_grad_()
    wide = narrow.detach().to(torch.float32).numpy()
    batch = {"x": narrow, "y": torch.from_numpy(BATCH["y"])}
    assert first_loss(batch) == first_loss({"x": wide, "y": BATCH["y"]})
    with pytest.raises(DataError, match=r"(?s)on meta cannot be read.*Give tensors on the CPU"):
        first_loss({"x": torch.empty(16, 4, device="meta"), "y": BATCH["y"]})


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"step": np.float32(3), "scale": 2.0, "list": [1, 2]},
            "(?s)list is a Python list.*scale is a Python float.*step is a scalar.*numpy.asarray",
        ),
        (
            {"name": "cat", "any": np.array([None] * 16)},
            "(?s)any is text or an object.*name is text.*Remove everything that is not a number",
        ),
    ],
)
def test_what_a_batch_may_not_hold(more, text):
    for step in (sl.make_train_step(loss_fn), sl.make_eval_step(loss_fn)):
        with pytest.raises(DataError, match=text):
            step(start(), {**BATCH, **more})


@pytest.mark.mesh
def test_losses_of_two_to_many_arguments():
    def with_key(model, batch, rng):
        assert jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        return loss_fn(model, batch)

    class Loss:
        def __call__(self, model, batch):
            return loss_fn(model, batch)

    expected = first_loss(BATCH)
    for fn in (with_key, Loss(), lambda *args: loss_fn(*args[:2])):
        assert first_loss(BATCH, fn) == expected
    for fn in (lambda model: 0.0, lambda: 0.0, None, 3):
        for make in (sl.make_train_step, sl.make_eval_step):
            with pytest.raises(ModelError, match=r"cannot be called as .*\n  Let it take \(model"):
                make(fn)


@pytest.mark.mesh
def test_a_loss_may_name_its_metrics_in_nested_dicts():
    def loss(model, batch):
        return loss_fn(model, batch), {"a": {"b": 1.0, "c": {"d": sl.Mean(2.0, 4.0)}}}

    _, metrics = sl.make_train_step(loss, microbatches=2)(start(), BATCH)
    assert float(metrics["a/b"]) == 1.0
    assert float(metrics["a/c/d"]) == 0.5


@pytest.mark.mesh
def test_integers_are_not_parameters():
    class Table(nnx.Module):
        def __init__(self, rngs):
            self.index = nnx.Param(jnp.arange(4))
            self.dense = nnx.Linear(4, 8, rngs=rngs)

    class LinenTable(linen.Module):
        @linen.compact
        def __call__(self, x):
            self.param("index", lambda key: jnp.arange(4))
            return linen.Dense(8)(x)

    for make, options in ((Table, {}), (LinenTable(), {"inputs": (X,)})):
        with pytest.raises(ModelError, match=r"no gradient: index \(int32\).\n  Hold them in"):
            sl.make_train_step(loss_fn)(start(make, "fsdp=8", **options), BATCH)
