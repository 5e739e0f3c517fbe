"""`rules: auto`: rules are found once, written into the run, and kept when it resumes."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import pytest
import yaml
from flax import nnx
from test_own_components import VectorData

import shardlib as sl
from shardlib import run
from shardlib.cli import main
from shardlib.config import configclass, from_dict, load
from shardlib.errors import ConfigError, DoesNotFitError, MeshError, RuleError
from shardlib.hardware import parse_cluster
from shardlib.nn import remat
from shardlib.plan.request import Question
from shardlib.registry import ModelFamily, families
from shardlib.rules import RulesConfig
from shardlib.run.plans.comparing import FoundOrPlan
from shardlib.run.plans.finding import find_for_run, rules_for_plan
from shardlib.run.plans.planning import plan_run, policies_of
from shardlib.run.reports.proving import prove
from shardlib.run.resolve_auto import resolve
from shardlib.run.restore_model import restore_model

HERE = __name__
H100 = parse_cluster("8xh100")
CLIP = pathlib.Path(__file__).parents[2] / "configs/clip.yaml"


@configclass
class PlainConfig:
    name: str = f"{HERE}:FAMILY"
    width: int = 64


class Plain(nnx.Module):
    """Names no axes."""

    def __init__(self, size, width, rngs):
        self.up = nnx.Linear(size, width, rngs=rngs)
        self.down = nnx.Linear(width, size, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


def error(model, batch, rng, *, train):
    lost = jnp.mean((model(batch["x"]) - batch["x"]) ** 2, axis=1)
    return sl.Mean(jnp.sum(lost * batch["weight"]), jnp.sum(batch["weight"])), {}


FAMILY = ModelFamily(
    config=PlainConfig, make=lambda c, data, rngs: Plain(data.size, c.width, rngs), loss=error
)


def error_and_chain(model, batch, rng, *, train):
    """A loss with a reduction of one MiB by a function that no rule can cut."""
    mean, outputs = error(model, batch, rng, train=train)
    pairs = jax.lax.stop_gradient(batch["x"].T @ batch["x"]).astype(jnp.float32)
    chained = jax.lax.reduce(pairs, jnp.float32(1), lambda a, b: jnp.sin(a * b), (0, 1))
    return sl.Mean(mean.total + chained, mean.weight), outputs


@configclass
class DeepConfig:
    name: str = f"{HERE}:DEEP"
    width: int = 64
    remat: str = "none"
    remat_tags: ClassVar = ()


class Deep(nnx.Module):
    """Eight layers under a policy."""

    def __init__(self, size, config, rngs):
        self.layers = nnx.List([Plain(size, config.width, rngs) for _ in range(8)])
        self.remat = config.remat

    def __call__(self, x):
        for layer in self.layers:
            x = self.recomputed(layer, x)
        return x

    def recomputed(self, layer, x):
        graph, state = nnx.split(layer)
        return remat.apply(self.remat, lambda held, x: nnx.merge(graph, held)(x))(state, x)


DEEP = ModelFamily(
    config=DeepConfig, make=lambda c, data, rngs: Deep(data.size, c, rngs), loss=error
)


class Stacked(nnx.Module):
    """Four layers in one stack."""

    def __init__(self, size, width, rngs):
        self.layers = sl.stack_layers(lambda rngs: Plain(size, width, rngs), 4, rngs)

    def __call__(self, x):
        return sl.scan_layers(lambda layer, x, _: (layer(x), None), self.layers, x)[0]


STACKED = dataclasses.replace(
    FAMILY, make=lambda c, data, rngs: Stacked(data.size, c.width, rngs), config=DeepConfig
)


@configclass
class ChoiceConfig(DeepConfig):
    name: str = f"{HERE}:OF_CHOICES"
    remat: Literal["none", "full"] = "none"


@configclass
class RefusingConfig(DeepConfig):
    name: str = f"{HERE}:REFUSING"

    @staticmethod
    def faults_of_fields(values):
        return ["remat is dots"] if values.get("remat") == "dots" else []


@configclass
class OtherConfig(PlainConfig):
    """Its `remat` is not a policy of shardlib."""

    name: str = f"{HERE}:OTHER"
    remat: str = "never"


OF_CHOICES = dataclasses.replace(DEEP, config=ChoiceConfig)
REFUSING = dataclasses.replace(DEEP, config=RefusingConfig)
VALIDATING = dataclasses.replace(DEEP, validate=lambda c, data: ["dots"] * (c.remat == "dots"))
COUPLED = dataclasses.replace(FAMILY, couples_rows=True)
OTHER = dataclasses.replace(FAMILY, config=OtherConfig)
WITH_CHAIN = dataclasses.replace(FAMILY, loss=error_and_chain)
CONFIG = {
    "model": {"name": f"{HERE}:FAMILY", "width": 16384},
    "data": {"kind": f"{VectorData.__module__}:VectorData", "size": 512},
    "optimizer": {"warmup_steps": 0},
    "train": {"steps": 1, "global_batch": 64, "cpu_devices": 8, "compilation_cache": None},
    "mesh": "fsdp=4,tensor=2",
    "rules": "auto",
    "eval": {"every_steps": 0},
    "checkpoint": {"every_steps": 1},
}


@pytest.fixture
def config(tmp_path):
    def of(*overrides):
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(tmp_path / "run")}))
        return load(run.RunConfig, file, list(overrides))

    return of


def test_rules_are_found_for_the_mesh_and_kept_with_it(config, capsys):
    began = resolve(config(), H100)
    table = began.recorded.rules
    assert isinstance(table, RulesConfig)
    assert table.found_for == "fsdp=4,tensor=2"
    assert "tensor" in dict(table.build().params)["up"][0]
    assert began.choices["auto rules"].startswith("found for fsdp=4,tensor=2: ")
    assert capsys.readouterr().err == "finding rules for fsdp=4,tensor=2 of 8xh100\n"
    again = resolve(config(), H100, began=began.recorded)
    assert again.recorded == began.recorded
    assert again.choices == {"rules": "as the run began"}
    assert not capsys.readouterr().err
    other = resolve(config("mesh=fsdp=8"), H100, began=began.recorded)
    assert other.recorded.rules.found_for == "fsdp=8"


def test_the_mesh_is_found_with_the_rules(config):
    """A step of so small a model takes least time where nothing but gradients is summed."""
    found = resolve(config("mesh=auto", "model.width=16"), H100)
    assert found.config.mesh in ("data=8", "fsdp=8")
    assert found.recorded.mesh == "auto"
    again = resolve(config("mesh=auto", "model.width=16"), H100, began=found.recorded)
    assert again.config == found.config


def test_microbatches_are_as_few_as_fit(config):
    """The activations of one microbatch do not fit."""
    config = config("train.microbatches=auto", "train.global_batch=33554432", "mesh=fsdp=8")
    with pytest.raises(DoesNotFitError):
        find_for_run(_with(config, 1), H100, lambda text: None)
    assert "found for fsdp=8, 16 microbatches: " in resolve(config, H100).choices["auto rules"]


def test_a_pipeline_has_the_microbatches_that_were_found(config):
    """The fewest that fit would leave stages idle for longest."""
    words = f"model.name={HERE}:STACKED", "mesh=stage=4,data=2", "train.global_batch=65536"
    began = resolve(config(*words, "train.microbatches=auto"), H100)
    parts = began.config.train.microbatches
    assert parts > 4
    assert f", {parts} microbatches" in began.choices["auto rules"]
    again = resolve(config(*words, "train.microbatches=auto"), H100, began=began.recorded)
    assert again.config.train.microbatches == parts
    with pytest.raises(MeshError, match=r"1 microbatches leave some of stage=4 without work"):
        resolve(config(*words, "train.microbatches=1"), H100)
    with pytest.raises(ConfigError, match=r"schedule is interleaved.*1f1b.*\n  Set"):
        resolve(config(*words, "train.pipeline.schedule=interleaved"), H100)


def _with(config, microbatches):
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, microbatches=microbatches)
    )


@pytest.mark.mesh
def test_the_policy_of_layers_is_found_with_the_rules(config):
    """It is chosen among all that the model takes, and kept with the rules for the same batch.
    Another policy gets other rules."""
    rows = 2**24
    words = f"model.name={HERE}:DEEP", "model.remat=auto", "model.width=1024", "mesh=fsdp=8"
    small = resolve(config(*words), H100)
    assert small.recorded.model.remat == "none"
    large = config(*words, f"train.global_batch={rows}")
    began = resolve(large, H100, began=small.recorded)
    assert began.recorded.model.remat == "full"
    assert ", remat full: " in began.choices["auto rules"]
    assert resolve(large, H100, began=began.recorded).recorded == began.recorded
    with pytest.raises(DoesNotFitError, match=r"a device needs"):
        resolve(large.with_remat("none"), H100, began=began.recorded)
    with pytest.raises(DoesNotFitError, match=r"any remat \(none, dots, full\)"):
        resolve(config(*words, f"train.global_batch={8 * rows}"), H100)


@pytest.mark.parametrize("name", ["OF_CHOICES", "REFUSING", "VALIDATING"])
def test_what_the_model_refuses_is_not_tried(config, name):
    run = config(f"model.name={HERE}:{name}")
    assert policies_of(run, run.data.spec()) == ("none", "full")


@pytest.mark.parametrize("name", families())
def test_built_in_models_name_what_a_policy_may_keep(name):
    model = families()[name].config()
    if hasattr(model, "remat"):
        assert remat.check("save:query,key,value,attention_out", model.remat_tags) == []
    else:
        assert name in ("clip", "resnet")


def found_by_plan(config):
    return rules_for_plan(config, plan_run(config, Question(on=H100)), lambda text: None)


def test_a_plan_keeps_the_policy_of_a_model_without_tags(config):
    """Its `remat` may mean something else."""
    found = found_by_plan(config(f"model.name={HERE}:OTHER", "model.width=16", "rules=fsdp"))
    assert found.remat is None


def test_a_plan_keeps_rows_together_that_depend_on_each_other(config):
    found = found_by_plan(config(f"model.name={HERE}:COUPLED", "model.width=16"))
    assert found.microbatches == 1


def test_a_policy_is_found_with_rules_alone(config):
    deep = f"model.name={HERE}:DEEP"
    fault = r"line: model\.remat=auto: auto is chosen together with rules\.\n.*Set rules: auto"
    with pytest.raises(ConfigError, match=fault):
        config(deep, "model.remat=auto", "rules=fsdp")
    fault = r"'auto' is only for model\.remat.*\n.*such as none"
    with pytest.raises(ConfigError, match=fault):
        remat.apply("auto", jnp.sin)
    for encoder in ("text", "image"):
        clip = load(run.RunConfig, CLIP, [f"model.{encoder}.remat=auto"])
        with pytest.raises(ConfigError, match=f"model: {encoder}: remat policy {fault}"):
            resolve(dataclasses.replace(clip, mesh="fsdp=8", rules="auto"), H100)


def test_adapters_and_what_they_adapt_get_rules(config):
    adapted = resolve(config("finetune.targets=['**/up']"), H100).config.rules
    assert {"up/base/kernel", "up/lora_a", "up/lora_b"} <= adapted.paths.keys()


def test_wrong_configs(config):
    with pytest.raises(ConfigError, match=r"called 'atuo'\. Did you mean 'auto'"):
        config("rules=atuo")


def test_an_axis_that_found_rules_leave_idle_is_told(config, capsys):
    """The search leaves an axis idle for a small model. Hand-written rules may not."""
    warning = (
        "warning: the rules found for fsdp=4,tensor=2 leave the mesh axis 'tensor' idle: groups of "
        "2 devices hold and compute the same.\n"
        "  Name a mesh without it, or set mesh=auto.\n"
    )
    small = config("model.width=16")
    report = run.explain(small, "8xh100")
    assert report.choices["idle"] == "mesh axis 'tensor': groups of 2 devices compute the same"
    assert warning in capsys.readouterr().err
    found = resolve(small, H100)
    again = resolve(small, H100, began=found.recorded)
    assert capsys.readouterr().err.count(warning) == 2
    by_hand = dataclasses.replace(again.config.rules, found_for=None)
    with pytest.raises(RuleError, match=r"no rule names the mesh axis 'tensor'"):
        run.explain(dataclasses.replace(small, rules=by_hand), "8xh100")


def test_rules_of_another_mesh_count_as_open(config, capsys):
    """A directory of a run has the table that was found. It says for which mesh."""
    found = resolve(config("mesh=fsdp=8", "model.width=16"), H100).recorded
    capsys.readouterr()
    same = resolve(found.with_mesh("data=1,fsdp=-1"), H100, began=found)
    assert (same.recorded.rules, same.choices) == (found.rules, {"rules": "as the run began"})
    assert resolve(found, H100).choices == {"rules": "found for fsdp=8"}
    assert not capsys.readouterr().err
    moved = resolve(found.with_mesh("data=8"), H100, began=found)
    assert moved.recorded.rules.found_for == "data=8"
    assert moved.choices["auto rules"].startswith("found for data=8: ")
    opened = resolve(found.with_mesh("auto"), H100, began=found)
    assert opened.choices["auto rules"].startswith("found for ")
    again = resolve(opened.recorded, H100, began=opened.recorded)
    assert again.config == opened.config


def test_a_mesh_that_cannot_be_filled_is_told_with_other_faults(config):
    found = resolve(config("mesh=fsdp=8", "model.width=16"), H100).recorded
    warm = dataclasses.replace(found.optimizer, warmup_steps=10**6)
    wrong = dataclasses.replace(found.with_mesh("fsdp=3,data=-1"), optimizer=warm)
    with pytest.raises(ConfigError, match=r"2 faults[\s\S]*mesh[\s\S]*warmup_steps"):
        run.explain(wrong, "8xh100")


def test_more_stages_than_microbatches_are_counted_anew(config):
    words = f"model.name={HERE}:STACKED", "model.width=16", "train.microbatches=auto"
    began = resolve(config(*words, "mesh=fsdp=8"), H100).recorded
    moved = resolve(config(*words, "mesh=stage=2,data=4"), H100, began=began)
    assert began.train.microbatches == 1
    assert moved.config.train.microbatches >= 2


def test_a_table_names_the_mesh_that_it_was_found_for():
    with pytest.raises(ConfigError, match=r"rules.*found_for: mesh 'foo' cannot be read"):
        from_dict(RulesConfig, {"found_for": "foo"}, "rules")
    assert from_dict(RulesConfig, {"found_for": ""}, "rules").found_for == ""


def test_a_plan_chooses_rules_in_place_of_those_that_a_run_found(config):
    began = resolve(config("mesh=fsdp=8", "model.width=2048"), H100).recorded
    question = Question(on="8xh100")
    plans = plan_run(began, question), plan_run(config("model.width=2048"), question)
    assert plans[0].found.layouts == plans[1].found.layouts > 1
    assert plans[0].best.layout == plans[1].best.layout


def test_groups_of_one_mesh_leave_no_choice_of_a_mesh(config):
    grouped = config("train.reduction.group_microbatches=[1,1]", "mesh=data=2,fsdp=4")
    with pytest.raises(ConfigError, match="group_microbatches divide the batch"):
        rules_for_plan(grouped, plan_run(config(), Question(on="8xh100")), lambda text: None)


@pytest.mark.mesh
def test_a_model_is_restored_on_the_mesh_that_was_found(config, tmp_path):
    run.train(config("mesh=auto", "model.width=2048", "data.size=8"))
    trained = load(run.RunConfig, tmp_path / "run/config.yaml")
    restored = restore_model(str(tmp_path / "run"))
    assert trained.mesh == "auto"
    assert restored.parts.config.mesh == trained.found_for


def test_rules_of_another_policy_count_as_open(config):
    deep = f"model.name={HERE}:DEEP", "mesh=fsdp=8", "model.width=16"
    found = resolve(config(*deep), H100).recorded
    other = resolve(found.with_remat("full"), H100, began=found)
    assert "auto rules" in other.choices
    assert "auto rules" not in resolve(found, H100, began=found).choices


def test_a_mesh_is_found_for_devices_of_unknown_speed(config):
    found = resolve(config("mesh=auto", "model.width=16"), parse_cluster("cpu:8"))
    alike = resolve(config("mesh=auto", "model.width=16"), H100)
    assert (found.config.mesh, found.recorded.rules) == (alike.config.mesh, alike.recorded.rules)
    assert "which stands for devices of unknown speed" in found.choices["auto rules"]
    assert "auto mesh" not in found.choices


@pytest.mark.mesh
def test_a_mesh_is_found_for_layers_that_too_few_microbatches_leave_without_stages(config):
    words = f"model.name={HERE}:STACKED", "model.width=16", "mesh=auto"
    assert "stage" not in resolve(config(*words), H100).config.mesh


@pytest.fixture
def planned(config, tmp_path, capsys):
    """Returns a function that plans for 8xh100, and returns the exit code, output and errors."""

    def of(*words, file=None):
        config()
        path = file or tmp_path / "run.yaml"
        with pytest.raises(SystemExit) as ended:
            main(["plan", str(path), "--on", "8xh100", *words])
        return ended.value.code, *capsys.readouterr()

    return of


DEEP_PLAN = f"model.name={HERE}:DEEP", "model.width=2048", "data.size=2048", "model.remat=full"


@pytest.mark.mesh
def test_a_plan_finds_rules_beside_its_own(planned):
    code, out, _ = planned(*DEEP_PLAN, "--rules", "auto", "--json")
    facts = json.loads(out)
    found, best = facts["found"], facts["plans"][0]
    assert code == 0
    assert found["prices"][0]["seconds"] <= 1.02 * best["seconds"]
    assert from_dict(RulesConfig, found["rules"], "found").build().names.fingerprint
    assert found["gap"] <= 1e-3
    assert found["remat"] == "none"
    assert (found["comparison"]["quicker"], found["comparison"]["reason"]) == ("found", "")
    assert found["comparison"]["plan_model"] == found["comparison"]["found_model"]
    code, out, _ = planned(*DEEP_PLAN, "--rules", "auto")
    settings = f"mesh={found['mesh']} train.microbatches=1 model.remat=none rules=auto"
    assert (code, out.splitlines()[-2:]) == (0, ["Train under found rules:", f"  {settings}"])
    code, _, fault = planned(*DEEP_PLAN, "--rules", "standard")
    assert (code, "Write --rules auto to find rules" in fault) == (2, True)


@pytest.mark.mesh
def test_a_question_without_an_answer_leaves_the_report(planned):
    asked = "--why-not", "up: fsdp", "--why-not", "nope: fsdp"
    small = "model.width=16", "--rules", "auto"
    code, out, _ = planned(*small, *asked)
    assert code == 2
    assert "a step by the cost model" in out
    assert "params.up: fsdp: " in out
    assert "nope: fsdp: the rules have no axis 'nope'." in out
    assert "rules=auto" in out.splitlines()[-1]
    code, out, _ = planned(*small, *asked, "--json")
    answered, not_answered = json.loads(out)["found"]["why_not"]
    assert (code, answered["rule"]) == (2, "params.up: fsdp")
    assert not_answered["rule"] == "nope: fsdp"
    assert not_answered["error"].startswith("the rules have no axis 'nope'.")


def test_a_mesh_that_is_written_like_a_rule_is_refused_at_once(planned):
    for asked, mesh in (("fsdp:8", "fsdp=8"), ("fsdp: 4,tensor=2", "fsdp=4,tensor=2")):
        code, out, fault = planned("--rules", "auto", "--why-not", asked)
        assert (code, out) == (2, "")
        assert f"Write the mesh as {mesh}." in fault


NUMBERS = {
    "found_mesh": "fsdp=8",
    "plan_mesh": "data=8",
    "found_seconds": 2e-3,
    "plan_seconds": 1e-3,
    "found_model": "the cost model of traced programs",
    "plan_model": "the cost model of traced programs",
    "plan_fits": True,
    "reason": "",
    "found_settings": ("mesh=fsdp=8", "rules=auto"),
    "plan_settings": ("mesh=data=8", "rules={preset: zero1}"),
}


def test_a_plan_is_advised_where_one_cost_model_says_that_it_is_quicker():
    quicker = FoundOrPlan(**NUMBERS)
    assert str(quicker) == (
        "found rules on fsdp=8: 2 ms a step; the first plan, data=8: 1 ms; both by the cost model "
        "of traced programs.\nTrain under the first plan:"
    )
    assert quicker.command == "mesh=data=8 'rules={preset: zero1}'"
    too_large = dataclasses.replace(quicker, plan_fits=False)
    assert too_large.quicker == "found"
    assert "data=8: 1 ms, and does not fit;" in str(too_large)
    by_two = dataclasses.replace(quicker, plan_model="the planner's formulas", reason="why")
    assert by_two.quicker is None
    assert str(by_two).endswith("not comparable: why.\nSettings of the found rules:")
    assert by_two.command == "mesh=fsdp=8 rules=auto"


@pytest.mark.mesh
def test_a_transformer_and_its_plan_are_priced_by_one_cost_model(planned, tmp_path):
    """The formulas of the planner for a model of known dims do not count what small steps take."""
    sizes = {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "mlp_dim": 128}
    data = {"path": "builtin:python", "tokenizer": "bytes", "sequence_length": 64}
    train = {"global_batch": 16}
    file = tmp_path / "transformer.yaml"
    file.write_text(yaml.safe_dump({"model": sizes, "data": data, "train": train}))
    code, out, told = planned("--rules", "auto", "--json", "--top", "1", file=file)
    facts = json.loads(out)
    comparison = facts["found"]["comparison"]
    assert (code, comparison["reason"]) == (0, "")
    assert comparison["plan_seconds"] > 2 * facts["plans"][0]["seconds"]
    assert comparison["plan_seconds"] == pytest.approx(comparison["found_seconds"], rel=0.25)
    assert f"pricing the first plan, {comparison['plan_mesh']}, by the cost model" in told


@pytest.mark.mesh
def test_a_run_trains_and_resumes_with_one_table_and_policy(config, tmp_path, capsys):
    deep = f"model.name={HERE}:DEEP", "model.remat=auto", "model.width=16"
    small = ("mesh=fsdp=8", "data.size=8", *deep)
    run.train(config(*small))
    text = (tmp_path / "run/config.yaml").read_text()
    assert "found_for: fsdp=8" in text
    assert "remat: 'none'" in text
    assert capsys.readouterr().err == "finding rules for fsdp=8 of 8xh100\n"
    resumed = run.train(config(*small, "train.steps=2"))
    assert (resumed.step, capsys.readouterr().err) == (2, "")
    after = (tmp_path / "run/config.yaml").read_text()
    assert after == text.replace("steps: 1", "steps: 2", 1)
    assert prove(load(run.RunConfig, tmp_path / "run/config.yaml")).is_right


@pytest.mark.mesh
def test_a_run_goes_on_by_its_directory_on_another_mesh(config, tmp_path, capsys):
    """Its config holds the rules that were found, with an axis that they leave idle."""
    config()

    def trains(path, *words):
        with pytest.raises(SystemExit) as ended:
            main(["train", str(path), *words])
        assert ended.value.code == 0
        table = load(run.RunConfig, tmp_path / "run/config.yaml").rules
        return table, capsys.readouterr().err

    began, told = trains(tmp_path / "run.yaml", "model.width=16", "data.size=8")
    assert began.found_for == "fsdp=4,tensor=2"
    assert "leave the mesh axis 'tensor' idle" in told
    same, told = trains(tmp_path / "run", "train.steps=2")
    assert same == began
    assert "finding" not in told
    assert "leave the mesh axis 'tensor' idle" in told
    moved, told = trains(tmp_path / "run", "train.steps=3", "mesh=data=2,fsdp=4")
    assert moved.found_for == "data=2,fsdp=4"
    assert told == "finding rules for data=2,fsdp=4 of 8xh100\n"


@pytest.mark.soak
def test_the_first_process_finds_rules_for_both(tmp_path):
    """It alone says that it searches."""
    file = tmp_path / "run.yaml"
    small = {"mesh": "fsdp=8", "run_dir": str(tmp_path / "run")}
    file.write_text(yaml.safe_dump(CONFIG | small))
    words = (
        "-m",
        "shardlib",
        "launch",
        "--processes",
        "2",
        "--",
        "train",
        str(file),
        "model.width=16",
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, *words, "model.width=16"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finding rules for") == 1
    assert "finished at step 1" in done.stdout


def test_explain_lists_what_every_device_computes_whole(config):
    words = "rules.preset=standard", "model.width=64"
    assert "whole on every device" not in run.explain(config(*words), "cpu:8").choices
    choices = run.explain(config(*words, f"model.name={HERE}:WITH_CHAIN"), "cpu:8").choices
    assert choices["partition"] == "shardlib: the model constrains no activation"
    assert "reduce at " in choices["whole on every device"]
    assert "test_found_rules.py" in choices["whole on every device"]
