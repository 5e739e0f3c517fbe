"""What other rules would cost, and what binds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from unannotated_lm import LM, loss, shapes

import shardlib as sl
from shardlib.cost.costs import RUNTIME_BYTES
from shardlib.errors import RuleError
from shardlib.humanize import duration

pytestmark = pytest.mark.mesh

ADAM = optax.adamw(1e-3)


def find(dim=4096, shape=(16, 512), mesh="fsdp=4,tensor=2", **options):
    return sl.find_rules(
        lambda rngs: LM(rngs, dim=dim, heads=32),
        loss=loss,
        batch=shapes(*shape),
        optimizer=ADAM,
        on="8xh100",
        mesh=mesh,
        **options,
    )


@pytest.fixture(scope="module")
def found():
    return find()


def test_another_rule_costs_what_its_own_solution_costs(found):
    """The answer is the best of all layouts with the rule: a layout found under the rule alone is
    not quicker, and the rule that was found costs nothing."""
    other = found.why_not("up: fsdp")
    assert other.rule == "params.up: fsdp"
    assert 0 < other.slower_seconds < found.seconds
    assert f"{other.slower_seconds / found.solution.seconds:.1%} of a step" in other.reasons[0]
    assert "more of exposed" in str(other)
    same = found.why_not("params.up: tensor")
    assert same.reasons == ("as quick",)
    whole = found.why_not("activations.up: null")
    assert whole.slower_seconds == pytest.approx(
        found.questions.saved_seconds("activations", "up"), rel=1e-3
    )


def test_what_cannot_be_says_why(found):
    assert "does not divide" not in str(found.why_not("embed: fsdp+tensor"))
    assert found.why_not("batch: null").slower_seconds is None
    assert "the search always cuts it over fsdp" in str(found.why_not("batch: null"))


WRONG = {
    "up": "'up' is not a rule.*\n.*'up: fsdp'",
    "upp: fsdp": "no axis 'upp'. Did you mean 'up'?",
    "up: tensr": "the mesh has no axis 'tensr'. Did you mean 'tensor'?",
    "up: data": "this mesh has data=1",
    "params.batch: fsdp": "for params have no axis 'batch'.*\n.*activations: batch",
    "opt_state.up: fsdp": "have no axis 'opt_state.up'",
    "up: fsdp+fsdp": "each once",
    "up: fsdp+": "each once",
}


def test_axes_are_joined_as_in_a_table(found):
    joined = found.why_not("params.up: [tensor, fsdp]")
    assert joined.rule == "params.up: tensor+fsdp"
    assert joined == found.why_not("up: tensor+fsdp")


@pytest.mark.parametrize("rule", WRONG)
def test_wrong_rules(found, rule):
    with pytest.raises(RuleError, match=WRONG[rule].replace("?", r"\?")):
        found.why_not(rule)


def test_the_report_prices_each_rule(found):
    priced = found.priced()
    assert priced.binds.startswith("products bind: ")
    cuts = {
        f"{t}.{n}" for t in ("params", "activations") for n, cut in found.rules.table(t) if cut[0]
    }
    assert priced.saved.keys() == cuts - {"activations.batch"}  # always cut over fsdp
    assert min(s for s in priced.saved.values() if s is not None) >= 0
    assert yaml.safe_load(yaml.safe_dump(priced.to_dict())) == priced.to_dict()
    assert "a step without a rule" in str(priced)
    assert json.loads(json.dumps(priced.to_dict()))["saved"] == priced.saved


def test_memory_binds_where_less_of_it_makes_a_step_slower():
    """With many microbatches a model is replicated, unless that does not fit."""
    options = {"dim": 2048, "shape": (64, 32), "mesh": "fsdp=8", "microbatches": 8}
    free = find(**options)
    assert not free.questions.binding().startswith("memory")
    memory = 0.8 * free.solution.memory_bytes + RUNTIME_BYTES["gpu"]
    tight = find(**options, memory_bytes=memory)
    less = duration(tight.solution.seconds - free.solution.seconds)
    assert tight.questions.binding() == (
        f"memory binds: with more of it a step would take {less} less"
    )


def test_rules_are_compared_with_others(found):
    hand = sl.rules.STANDARD.override(paths={"**/up/kernel": ("embed", "mlp")})
    compared = found.compared_with(hand, "by hand")
    rows = {pattern: (own, other) for pattern, own, other in compared.differences}
    assert "blocks/*/up/kernel" not in rows
    assert rows["blocks/*/down/kernel"] == ("tensor, fsdp", "fsdp, -")
    assert compared.prices[-1].name == "by hand"
    assert compared.prices[-1].seconds > found.prices[0].seconds
    assert "by hand" in str(compared)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(512, 2048, rngs=rngs)
        self.down = nnx.Linear(2048, 512, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class Pictures(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(3, 64, (3, 3), rngs=rngs)
        self.second = nnx.Conv(64, 64, (3, 3), rngs=rngs)
        self.out = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.second(jax.nn.relu(self.first(x))))
        return self.out(x.mean((1, 2)))


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def find_small(make, x=(64, 512), y=512, on="8xh100", **options):
    batch = {"x": jax.ShapeDtypeStruct(x, jnp.float32), "y": jax.ShapeDtypeStruct((64, y), "f4")}
    return sl.find_rules(make, loss=squared, batch=batch, optimizer=ADAM, on=on, **options)


def test_the_preset_is_an_answer_where_it_is_quicker():
    """With 64 rows a device sends less of them than of gradients, which takes longer."""
    found = find_small(Mlp, mesh="fsdp=8")
    preset = next(price for price in found.prices if price.name == "fsdp=8")
    assert found.prices[0].name == "fsdp alone, fsdp=8"
    assert found.prices[0].rank == pytest.approx(preset.rank)
    assert found.why_not("up: null").slower_seconds > 0
    assert found.priced().saved["params.up"] is not None
    assert "for answers of this kind" in str(found)
    other = find_small(Mlp, mesh="fsdp=8", forbidden=[found])
    assert other.rules != found.rules
    rules = sl.rules.from_yaml(sl.rules.to_yaml(found.rules))
    x, y = np.random.default_rng(0).normal(size=(2, 64, 512)).astype(np.float32)
    batch = {"x": x, "y": y}
    with sl.use(found.mesh, rules):
        step = sl.make_train_step(squared)
        assert step.partition(sl.abstract_state(Mlp, ADAM), batch).by == "shardlib"
    sl.testing.assert_equivalent(Mlp, squared, batch, "fsdp=8", rules=rules, optimizer=ADAM)


def test_idle_devices_are_told_of(caplog):
    found = find_small(Mlp, on="7xh100")
    assert found.idle == {"tensor": 7}
    assert found.to_dict()["idle"] == {"tensor": 7}
    assert "no rule names tensor=7: these 7 devices compute the same" in str(found)
    with sl.use(sl.make_mesh("data=8"), find_small(Mlp, mesh="fsdp=8").rules):
        sl.init_state(Mlp, ADAM)
    assert "name no mesh axis 'data': its 8 devices hold and compute the same" in caplog.text


def test_a_mesh_axis_that_stays_idle_can_be_asked_about():
    found = find_small(Pictures, (64, 32, 32, 3), 16, mesh="fsdp=4,tensor=2")
    assert found.prices[0].name.startswith("without tensor")
    answer = found.why_not("second: tensor")
    assert answer.slower_seconds < 0
    assert "quicker by the integer program, but the cost model" in str(answer)


def test_auto_is_every_mesh():
    assert find_small(Mlp, mesh="auto").sizes == find_small(Mlp).sizes
