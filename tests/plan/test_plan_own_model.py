"""Plans for a module of the user's own: the lines of the docstring, the report, the refusals."""

import inspect
import re
import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.plan import Layout, trace_workload
from shardlib.plan.workloads.module import as_code


class Model(nnx.Module):
    """No transformer, and no logical names."""

    def __init__(self, rngs):
        self.wide = nnx.Linear(64, 256, rngs=rngs)
        self.back = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.back(jax.nn.gelu(self.wide(x)))


def make_model(rngs):
    return Model(rngs)


def loss(model, batch, rng):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


BATCH = dict.fromkeys("xy", jax.ShapeDtypeStruct((4096, 64), jnp.float32))
STEP = {"optimizer": optax.adam(1e-3), "loss": loss, "batch": BATCH}


def run(plans, plan=None):
    """Runs the code of a plan on the devices of the test, and a step of it."""
    code = as_code(plan or plans.best, plans.workload)
    names = {"sl": sl, "make_model": make_model, "optimizer": STEP["optimizer"], "loss": loss}
    exec(code, names)
    batch = {name: jax.random.normal(jax.random.key(0), (4096, 64)) for name in "xy"}
    state, metrics = names["step"](names["state"], batch)
    return code, state, metrics


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(64)(linen.relu(linen.Dense(256)(x)))


def test_a_linen_module_is_planned_from_its_inputs():
    inputs = (jax.ShapeDtypeStruct((8, 64), jnp.float32),)
    plans = sl.plan(LinenModel(), inputs=inputs, on="8xh100", **STEP)
    code = as_code(plans.best, plans.workload)
    assert "sl.init_state(make_model, optimizer, inputs=inputs, precision=" in code
    names = {"sl": sl, "make_model": LinenModel(), "inputs": inputs, "loss": loss}
    exec(code, names | {"optimizer": STEP["optimizer"]})
    alike = sl.plan(lambda rngs: LinenModel(), inputs=inputs, on="8xh100", **STEP)
    assert alike.best.layout == plans.best.layout
    assert str(plans).startswith("LinenModel on 8xh100")


def test_refuses_a_linen_module_without_inputs_and_others_with_them():
    with pytest.raises(sl.ShardlibError, match=r"LinenModel is a linen .*\n  Pass them: inputs="):
        sl.plan(LinenModel(), on="8xh100", **STEP)
    with pytest.raises(sl.ShardlibError, match=r"inputs can only be given with a module.*\n  Lea"):
        sl.plan("llama3-8b", on="8xh100", inputs=(1,))


def test_the_docstring_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(sl.plan), re.DOTALL)
    names = {"sl": sl, "jax": jax, "jnp": jnp, "optax": optax, "Model": Model, "loss_fn": loss}
    exec(textwrap.dedent(example), names)
    assert capsys.readouterr().out.startswith("Model on 8xh100 (8 H100 SXM), 4,096 ")


@pytest.mark.mesh
def test_the_report_shows_a_plan_as_code_that_runs():
    plans = sl.plan(make_model, on="8xh100", **STEP)
    code, state, metrics = run(plans)
    assert code == (
        'mesh = sl.make_mesh("data=8")\n'
        "with sl.use(mesh, sl.rules.STANDARD):\n"
        '    state = sl.init_state(make_model, optimizer, precision="bf16")\n'
        '    step = sl.make_train_step(loss, precision="bf16")'
    )
    assert float(metrics["loss"]) > 0
    assert state.params["wide"]["kernel"].sharding.mesh.shape["data"] == 8
    report = str(plans)
    assert "Plan 1, in code:\n  mesh = sl.make_mesh" in report
    assert set(plans.settings()) == {"mesh", "rules", "train.global_batch", "train.microbatches"}
    for key in ("for the config", "model:", "remat:", "loss_chunks", "momentum_dtype"):
        assert key not in report


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(fsdp=8, zero=1), "sl.rules.ZERO1"),
        (Layout(fsdp=8), "sl.rules.STANDARD"),
        (Layout(data=8, microbatches=4), 'make_train_step(loss, microbatches=4, precision="bf16")'),
    ],
)
def test_every_kind_of_plan_is_code_that_runs(layout, expected):
    plans = sl.plan(make_model, on="8xh100", **STEP)
    plan = plans.best.__class__(plans.cluster, layout, plans.best.choice, plans.best.time, None)
    code, _, metrics = run(plans, plan)
    assert expected in code
    assert float(metrics["loss"]) > 0


def test_rules_of_ones_own_are_kept():
    plans = sl.plan(make_model, on="8xh100", rules=sl.rules.FSDP, **STEP)
    assert "sl.rules.FSDP" in as_code(plans.best, plans.workload)
    assert {plan.layout.zero for plan in plans.found.plans} == {3}
    own = sl.rules.STANDARD.override(embed=None)
    plans = sl.plan(make_model, on="8xh100", rules=own, **STEP)
    assert "with sl.use(mesh, rules):" in as_code(plans.best, plans.workload)


def test_a_traced_workload_is_a_model_too():
    work = trace_workload(make_model, STEP["optimizer"], loss, BATCH, precision="bf16")
    found = sl.plan(work, on="8xh100", global_batch=1024)
    assert (found.name, found.workload.batch) == ("Model", 1024)
    assert str(found.best) == str(sl.plan(make_model, on="8xh100", global_batch=1024, **STEP).best)


WHERE = "traces its step, which lacks "


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (Model, {}, WHERE + r"optimizer, loss and batch\.\n  Write sl\.plan\("),
        (Model, {"loss": loss, "batch": BATCH}, WHERE + r"optimizer\.\n"),
        ("llama3-8b", {"loss": loss}, r"loss can only .* 'llama3-8b' is not a module\.\n  Leave"),
        (3, {}, r"int cannot be planned\.\n  Give"),
        ("configs/quickstart.yaml", {}, r"quickstart.yaml' is a file, .*\n  Give shardlib.config"),
    ],
)
def test_what_cannot_be_planned_is_named(model, options, match):
    with pytest.raises(ModelError, match=match):
        sl.plan(model, on="8xh100", **options)
