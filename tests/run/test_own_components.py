"""Components of one's own, named in a config by import path: a diffusion model, its data, loss and
optimizer, all defined here."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx

import shardlib as sl
from shardlib import run
from shardlib.config import configclass, json_schema, load
from shardlib.data import DataConfig, MapSource
from shardlib.errors import ConfigError
from shardlib.plan.request import Question
from shardlib.registry import BatchKind, DataSpec, ModelFamily
from shardlib.run.plans.planning import flops_per_step, plan_run, workload_of
from shardlib.run.setup import make_scope, setup

HERE = __name__


@dataclasses.dataclass(frozen=True)
class VectorSpec(DataSpec):
    size: int | None = None


class Vectors:
    """Points on a circle, repeated; any index has its own."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __getitem__(self, index):
        angle = np.random.default_rng((self.seed, index)).uniform(0, 2 * np.pi)
        waves = np.sin(angle + np.arange(self.size)).astype(np.float32)
        return {"x": waves, "weight": np.float32(1)}


@configclass
class VectorData(DataConfig):
    kind: str = f"{HERE}:VectorData"
    size: int = 8

    def spec(self):
        return VectorSpec(size=self.size)

    def padding(self):
        return {"x": np.zeros(self.size, np.float32), "weight": np.zeros((), np.float32)}

    def open(self, *, global_batch, seed, split):
        held_out = split == "eval"
        return MapSource(
            lambda: Vectors(self.size, 0 if held_out else seed + 1),
            spec=self.spec(),
            global_batch=global_batch,
            padding=self.padding(),
            num_examples=20 if held_out else None,
            fingerprint=f"vectors of {self.size}",
        )


@configclass
class DenoiserConfig:
    name: str = f"{HERE}:FAMILY"
    width: int = 32


class Denoiser(nnx.Module):
    def __init__(self, size, width, rngs):
        def linear(inputs, outputs, *axes):
            init = nnx.with_metadata(
                nnx.initializers.lecun_normal(), out_sharding=axes, eager_sharding=False
            )
            return nnx.Linear(inputs, outputs, kernel_init=init, use_bias=False, rngs=rngs)

        self.inner = linear(size + 1, width, None, "mlp")
        self.outer = linear(width, size, "mlp", None)

    def __call__(self, x, time):
        hidden = jnp.concatenate([x, time[:, None]], axis=1)
        return self.outer(nnx.gelu(self.inner(hidden)))


def denoising(model, batch, rng, *, train):
    """Ho et al. 2020, "Denoising Diffusion Probabilistic Models", equation 14."""
    x = batch["x"]
    at_time, at_noise = jax.random.split(rng)
    time = jax.random.uniform(at_time, x.shape[:1], x.dtype)
    noise = jax.random.normal(at_noise, x.shape, x.dtype)
    kept = jnp.cos(time * np.float32(np.pi / 2))[:, None]
    guess = model(kept * x + jnp.sqrt(1 - kept**2) * noise, time)
    errors = jnp.mean((guess - noise) ** 2, axis=1)
    total = sl.Mean(jnp.sum(errors * batch["weight"]), jnp.sum(batch["weight"]))
    return total, {"error": total}


def make(config, data, rngs):
    return Denoiser(data.size, config.width, rngs)


FAMILY = ModelFamily(config=DenoiserConfig, make=make, loss=denoising)


def doubled(model, batch, rng, *, train, z_loss=0.0):
    mean, metrics = denoising(model, batch, rng, train=train)
    return sl.Mean(2 * mean.total, mean.weight), metrics


def without_train(model, batch):
    return jnp.zeros(())


def make_optimizer(schedule):
    return optax.chain(optax.scale_by_rss(), optax.scale_by_learning_rate(schedule))


def not_an_optimizer(schedule):
    return schedule


CONFIG = f"""
run_dir: {{run_dir}}
model: {{{{name: "{HERE}:FAMILY"}}}}
data: {{{{kind: "{HERE}:VectorData"}}}}
optimizer: {{{{name: "{HERE}:make_optimizer", learning_rate: 0.05, schedule: constant}}}}
train: {{{{steps: 4, global_batch: 16, cpu_devices: 8, compilation_cache: null}}}}
mesh: data=2,fsdp=2,tensor=2
checkpoint: {{{{every_steps: 2}}}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIG.format(run_dir=tmp_path / "run"))
    return path


@pytest.mark.mesh
def test_it_trains_and_evaluates(file, tmp_path, rows, shardlib):
    code, out, err = shardlib("train", file)
    assert code == 0, err
    assert "16 examples" in out
    *_, last = rows(tmp_path / "run")
    assert {"examples_per_second", "eval/loss", "eval/error"} <= last.keys()


@pytest.mark.mesh
def test_it_resumes_by_the_paths_of_its_directory(file, tmp_path, rows, shardlib):
    run.train(load(run.RunConfig, file))
    first = rows(tmp_path / "run")
    saved = load(run.RunConfig, tmp_path / "run" / "config.yaml")
    assert saved == load(run.RunConfig, file)
    assert (saved.model.name, saved.data.kind) == (f"{HERE}:FAMILY", f"{HERE}:VectorData")
    code, out, err = shardlib("train", tmp_path / "run", "train.steps=6")
    assert code == 0, err
    assert "from step 4" in out
    both = rows(tmp_path / "run")
    assert both[: len(first) - 1] == first[:-1]
    assert [row["step"] for row in both] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match=r"train\.loss: None in the run, '.*:doubled' now"):
        run.train(load(run.RunConfig, file, [f"train.loss={HERE}:doubled"]))


def test_it_is_explained_and_planned(file, shardlib):
    code, out, err = shardlib("explain", file, "--json")
    assert code == 0, err
    assert "inner/kernel" in out
    config = load(run.RunConfig, file)
    _, workload = workload_of(config)
    assert (workload.unit, workload.tokens) == ("examples", 16)
    plans = plan_run(config, Question(on="v5e-8"))
    assert plans.found.plans


@pytest.mark.mesh
def test_it_is_checked_with_its_own_data(file, shardlib):
    code, out, err = shardlib("check", file, "--json")
    assert code == 0, out + err
    (facts,) = json.loads(out)
    assert facts["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert facts["compared"] >= 8
    assert facts["right"]


def test_flops_are_counted_where_no_formula_is_given(file):
    config = load(run.RunConfig, file)
    # Two matmuls of (8 + 1) x 32 and 32 x 8; the first one's input needs no gradient.
    products = 2 * 16 * ((8 + 1) * 32 * 2 + 32 * 8 * 3)
    assert flops_per_step(config, config.data.spec()) == products


@pytest.mark.mesh
def test_a_loss_of_ones_own(file, tmp_path):
    words = ["eval.every_steps=0", "train.steps=1", "checkpoint.enabled=false"]

    def loss(name, *more):
        run_dir = tmp_path / name
        config = load(run.RunConfig, file, [f"run_dir={run_dir}", *words, *more])
        run.train(config)
        row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
        return row["loss"], row["error"]

    plain, other = loss("plain"), loss("other", f"train.loss={HERE}:doubled", "train.z_loss=0.1")
    assert other[0] == pytest.approx(2 * plain[0], rel=1e-6)
    assert other[1] == pytest.approx(plain[1], rel=1e-6)


@pytest.mark.parametrize(("name", "num_bytes"), [("adamw", 8), ("sgd", 0), ("lion", 4)])
def test_any_optimizer_of_optax_is_planned_with_its_moments(name, num_bytes):
    words = [f"optimizer.name=optax:{name}", "model.name=transformer", "data.tokenizer=bytes"]
    config = load(run.RunConfig, None, words)
    _, workload = workload_of(config)
    assert workload.job.moment_bytes == num_bytes


def test_an_editor_takes_import_paths(file):
    jsonschema = pytest.importorskip("jsonschema")
    config = yaml.safe_load(file.read_text())
    jsonschema.validate(config, json_schema(run.RunConfig))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config | {"model": {"name": "transformr"}}, json_schema(run.RunConfig))


def test_a_family_may_name_the_axes_and_the_unit_of_its_batch(file, monkeypatch):
    kind = BatchKind(
        "examples",
        axes={"x": ("batch", "length")},
        unit="points",
        units_per_example=lambda data: data.size,
    )
    monkeypatch.setattr(sys.modules[HERE], "FAMILY", dataclasses.replace(FAMILY, inputs=kind))
    config = load(run.RunConfig, file)
    parts = setup(config, config.data.spec(), make_scope(config, jax.devices()))
    assert (parts.units_per_step(), parts.inputs.unit) == (16 * 8, "points")
    assert parts.train_step().batch_axes == {"x": ("batch", "length")}


@configclass
class Nameless:
    width: int = 8


class NotOpened(DataConfig):
    kind = f"{HERE}:NotOpened"


NAMELESS = ModelFamily(config=Nameless, make=make, loss=denoising)


@pytest.mark.parametrize(
    ("key", "path", "fault"),
    [
        ("model.name", "no_such_module.mine:FAMILY", "there is no module 'no_such_module'"),
        ("model.name", "shardlib.registri:FAMILY", "Did you mean 'shardlib.registry'?"),
        ("train.loss", "optax.losses:cosine_distanse", "Did you mean 'cosine_distance'?"),
        ("model.name", f"{HERE}:make", "of type function, not a shardlib.registry.ModelFamily"),
        ("optimizer.name", "math:pi", "of type float, not a function of the schedule"),
        ("data.kind", f"{HERE}:FAMILY", "of type ModelFamily, not a configclass that inherits"),
        ("data.kind", f"{HERE}:NotOpened", "lacks what a run calls: open, padding"),
        ("model.name", f"{HERE}:NAMELESS", f"Declare `name: str = '{HERE}:NAMELESS'` in it"),
        ("train.loss", "a:b:c", "Write module:name, as in mypackage.mine:FAMILY"),
        ("train.loss", "mse", "expected an import path (module:name) or null, got 'mse'"),
    ],
    ids=lambda value: value.removeprefix(f"{HERE}:") if ":" in value and " " not in value else "",
)
def test_a_wrong_path_is_a_fault_of_its_key(file, key, path, fault):
    with pytest.raises(ConfigError) as refused:
        load(run.RunConfig, file, [f"{key}={path}"])
    assert str(refused.value).startswith(f"command line: {key}={path}: ")
    assert fault in str(refused.value)


def test_a_module_that_fails_is_named_with_the_line(file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "faulty_module.py").write_text("import optax\nimport not_installed_here\n")
    fault = r"train.loss=.*'not_installed_here' \(.*/faulty_module.py:2\)\.\n    Repair the module"
    with pytest.raises(ConfigError, match=fault):
        load(run.RunConfig, file, ["train.loss=faulty_module:loss"])


def test_what_does_not_fit_is_told_before_anything_is_allocated(file, shardlib):
    for override, fault in {
        f"train.loss={HERE}:without_train": "cannot be called as loss(model, batch, rng",
        "train.label_smoothing=0.1": "got an unexpected keyword argument 'label_smoothing'",
        f"optimizer.name={HERE}:not_an_optimizer": "returned a function, not an optax",
        "optimizer.weight_decay=0.1": "weight_decay does nothing with name=",
        "model={name: resnet}": "Set data.kind=images, or choose another model",
        "data={kind: images}": "Set data.kind to a source that gives examples",
    }.items():
        code, _, err = shardlib("explain", file, override)
        assert (code, err.startswith("ConfigError: "), fault in err) == (2, True, True), err


def test_the_current_directory_is_looked_in(file, tmp_path, monkeypatch, shardlib):
    (tmp_path / "beside_the_config.py").write_text(
        "def make(schedule):\n    import optax\n    return optax.sgd(schedule)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    code, _, err = shardlib("explain", file, "optimizer.name=beside_the_config:make")
    assert code == 0, err
