"""What functions are called with: by keyword, numbers among arrays, modules; what jit was told."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from on_meshes import CPU, TPU, abstract_mesh, cpu_mesh, found, struct

import shardlib as sl
from shardlib.explain.aot.compile import compile_step

pytestmark = pytest.mark.usefixtures("own_cache")


def on(cluster):
    if cluster is TPU:
        pytest.importorskip("libtpu", reason="needs the extra tpu")
    return cluster


EVERYWHERE = pytest.mark.parametrize("cluster", [None, CPU, TPU], ids=["here", "cpu", "tpu"])


@EVERYWHERE
def test_numbers_among_arrays_are_arrays(cluster):
    mesh = cpu_mesh(data=8)

    def step(rate, state, x, *, scale):
        total = rate * state["lr"] * scale * jnp.sum(x, axis=0)
        return {"step": state["step"] + 1, "w": state["w"] - total, "lr": state["lr"]}

    state = {"step": 0, "w": struct(mesh, (4,)), "lr": 0.1}
    arguments = (0.5, state, struct(mesh, (16, 4), "data"))
    jitted = jax.jit(step, donate_argnums=1)
    made = compile_step(jitted, arguments, {"scale": 2.0}, on=on(cluster))
    # Those that stand by themselves may be static, and are none of them.
    state_paths = ["state/lr", "state/step", "state/w"]
    assert list(made.argument_names) == [*state_paths, "x"]
    assert made.donated == (True, True, True, False)
    assert [str(leaf.dtype) for leaf in jax.tree.leaves(made.arguments)] == [
        "float32",
        "int32",
        "float32",
        "float32",
    ]
    assert sorted(made.argument_paths().values()) == [*state_paths, "x"]
    assert found(made) == [("all-reduce", ("data",), 16)]
    report = sl.explain(jitted, *arguments, on=None if cluster is None else cluster.name, scale=2.0)
    assert report.step.donated == made.donated


@EVERYWHERE
def test_arguments_by_keyword(cluster):
    mesh = cpu_mesh(data=2, tensor=4)

    @jax.jit
    def step(params, batch, *, mask):
        return jnp.sum(batch @ params * mask, axis=0)

    params, batch = struct(mesh, (8, 4), None, "tensor"), struct(mesh, (16, 8), "data")
    keywords = {"mask": struct(mesh, (16, 1), "data"), "batch": batch}
    made = compile_step(step, (params,), keywords, on=on(cluster))
    assert made.argument_names == {"params": "params", "batch": "batch", "mask": "other"}
    assert sorted(made.argument_paths().values()) == ["batch", "mask", "params"]
    assert [leaf.shape for leaf in made.arguments] == [(8, 4), (16, 8), (16, 1)]
    # Of the 4 columns each device has one.
    assert found(made) == [("all-reduce", ("data",), 4)]


def test_an_argument_that_is_not_read_shifts_no_other():
    mesh = abstract_mesh(data=8)

    def step(params, ema, x):
        return ema["w"] + jnp.sum(x)

    params = {"w": struct(mesh, (8,), "data")}
    jitted = jax.jit(step, donate_argnums=1)
    made = compile_step(jitted, (params, params, struct(mesh, (8,), "data")), on=CPU)
    assert made.argument_paths() == {0: "ema/w", 1: "x"}
    assert made.argument_categories() == {0: "other", 1: "batch"}
    assert made.donated == (False, True, False)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("cluster", [None, TPU], ids=["here", "tpu"])
def test_options_for_the_compiler(cluster, static, own_cache):
    mesh = cpu_mesh(data=8)
    placed = NamedSharding(mesh, P("data"))
    # Of the two compilers each has its own.
    name = "xla_tpu_scoped_vmem_limit_kib" if cluster else "xla_cpu_enable_fast_min_max"

    def step(state, rate, x):
        return state - rate * jnp.sum(x, axis=0, keepdims=True)

    def made(value):
        jitted = jax.jit(
            step,
            donate_argnums=0,
            static_argnums=1 if static else None,
            in_shardings=(placed, placed) if static else (placed, None, placed),
            compiler_options={name: value},
        )
        plain = jax.ShapeDtypeStruct((16, 4), jnp.float32)
        return compile_step(jitted, (plain, 0.5, plain), on=on(cluster))

    one, other = (32768, 16384) if cluster else (True, False)
    first, *later = [made(value) for value in (one, other, one)]
    assert first.argument_names == {"state": "other", "x": "batch"}
    assert first.donated == (True, False)
    assert [leaf.sharding.spec for leaf in first.arguments] == [P("data"), P("data")]
    assert found(first) == [("all-reduce", ("data",), 16)]
    # Programs of other options are others.
    assert [step.compiled is None for step in later] == [False, True]


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, scale=1.0, *, shift=0.0):
        return self.dropout(self.layer(x)) * scale + shift

    def loss(self, batch):
        return jnp.mean(self(batch) ** 2)

    @nnx.jit
    def jitted_loss(self, batch):
        return self.loss(batch)


@pytest.mark.aot
@EVERYWHERE
def test_a_module_is_the_first_argument_of_its_call(cluster):
    model, x = Noisy(nnx.Rngs(0)), struct(cpu_mesh(data=8), (16, 16), "data")
    name = None if on(cluster) is None else cluster.name
    for report, first, last in (
        (sl.explain(model, x, 2.0, shift=1.0, on=name), "model", "x"),
        (sl.explain(model.loss, x, on=name), "model", "batch"),
        (sl.explain(model.jitted_loss, x, on=name), "self", "batch"),
    ):
        assert list(report.step.argument_names) == [
            f"{first}/dropout/rngs/count/value",
            f"{first}/dropout/rngs/key/value",
            f"{first}/layer/bias/value",
            f"{first}/layer/kernel/value",
            last,
        ]
        assert report.roofline.flops.total_model == 2 * 16 * 16 * 16
    # The model is what it was.
    assert model.dropout.rngs.count[...] == 0


def test_what_cannot_be_explained():
    for subject, named in ((3, "int"), (jnp.sum, "sum alone"), (Noisy(nnx.Rngs(0)), "Noisy alone")):
        with pytest.raises(TypeError, match=rf"not {named}\.\n  Write sl.explain\(state\) or"):
            sl.explain(subject)
    with sl.use(abstract_mesh(data=8), sl.rules.STANDARD):
        state = sl.abstract_state(Noisy, optax.sgd(0.1))
    for options in ({"on": "v5e-8"}, {"optimize": True}):
        with pytest.raises(TypeError, match=r"^on and optimize .*\n  Explain the step:"):
            sl.explain(state, **options)
