"""The command line: what it prints, where, and how it exits."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from shardlib.cli.arguments import load_config
from shardlib.errors import CheckpointError


def python(*arguments, **environment):
    """Runs Python in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_help_lists_the_commands_without_importing_jax():
    code = (
        "import sys, shardlib.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "finally: print('heavy:', sorted({'jax', 'yaml', 'numpy'} & {*sys.modules}))"
    )
    done = python("-c", code)
    assert done.stderr == ""
    assert done.returncode == 0
    for command in ("train", "explain", "generate", "devices", "launch", "schema"):
        assert f"\n  {command} " in done.stdout
    assert done.stdout.endswith("heavy: []\n")


def test_a_misspelt_command_exits_2(shardlib):
    code, out, err = shardlib("trian")
    assert (code, out) == (2, "")
    assert "Did you mean 'train'?" in err


def test_a_config_error_exits_2_without_a_traceback(shardlib, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").write_text("train:\n  stepz: 3\n")
    for command in ("train", "explain"):
        code, out, err = shardlib(command, "quick.yaml", "train.steps=abc")
        assert (code, out) == (2, "")
        assert err.startswith("ConfigError: the configuration has ")
        assert "\n  quick.yaml:2: train.stepz: unknown key. Did you mean 'steps'?\n" in err
        assert "\n  command line: train.steps=abc: expected an integer, got 'abc'.\n" in err
        assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["quick.yaml"]


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--steps", "30"], "train.steps=30"),
        (["--learning-rate=1"], "optimizer.learning_rate=1"),
        (["--data.path"], "data.path=VALUE"),
    ],
)
def test_an_option_that_is_a_key_is_told_to_be_written_as_one(shardlib, tmp_path, words, setting):
    code, out, err = shardlib("train", str(tmp_path), *words)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: shardlib train [OPTIONS] CONFIG [KEY=VALUE]...\n")
    assert err.endswith(f": {words[0].partition('=')[0]}. Write {setting}.\n")


def test_a_machine_without_a_tpu_gives_no_errors_of_libtpu():
    pytest.importorskip("libtpu")
    machine = {name: x for name, x in os.environ.items() if not name.startswith(("TPU_", "JAX_"))}
    words = [sys.executable, "-m", "shardlib", "devices"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=machine)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.mesh
def test_debug_shows_the_traceback_and_exits_alike():
    for words in (["--debug", "train", "no.yaml"], ["train", "no.yaml", "--debug"]):
        done = python("-m", "shardlib", *words)
        assert done.returncode == 2
        assert done.stderr.startswith("Traceback")
        assert "ConfigError: no.yaml: no such config file.\n  Give a" in done.stderr


def test_other_failures_exit_1(shardlib, tmp_path):
    (tmp_path / "config.yaml").write_text("model: {name: transformer}\ndata: {kind: text}\n")
    code, out, err = shardlib("generate", str(tmp_path))
    assert (code, out) == (1, "")
    assert err.startswith(f"{CheckpointError.__name__}: ")
    assert str(tmp_path) in err


def test_a_directory_without_a_run_is_a_wrong_request(shardlib, tmp_path):
    fix = "\n  Pass a run directory created by `shardlib train`.\n"
    none = f"ConfigError: no such directory: {tmp_path}/none.{fix}"
    for command in (("generate",), ("checkpoint", "ls"), ("checkpoint", "verify")):
        assert shardlib(*command, str(tmp_path / "none")) == (2, "", none)
    empty = f"ConfigError: {tmp_path} does not hold a run: config.yaml is missing.{fix}"
    assert shardlib("train", tmp_path) == (2, "", empty)


@pytest.mark.mesh
def test_a_config_may_come_from_a_pipe(tmp_path):
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    words = [sys.executable, "-m", "shardlib", "explain", str(pipe)]
    found = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    pipe.write_text("trian: {}\n")
    assert f"{pipe}:1: trian: unknown key. Did you mean 'train'?" in found.communicate()[1]


def test_a_missing_config_or_run_is_reported_before_jax_is_imported():
    commands = "['train', 'none.yaml'], ['generate', 'none'], ['checkpoint', 'ls', 'none']"
    code = f"""
import sys
from shardlib.cli import main
for words in ({commands}, ['export', 'none', '--out', 'there']):
    try: main(words)
    except SystemExit as ended: assert ended.code == 2
    assert 'jax' not in sys.modules, words
"""
    found = python("-c", code)
    fix = (
        "  Give a YAML file, or the directory of a run. In a YAML file, `model: llama3-8b` names a "
        "published model.\n"
    )
    absent = "ConfigError: no such directory: none.\n  Pass a run directory created by `shardlib"
    absent += " train`.\n"
    assert found.stderr == f"ConfigError: none.yaml: no such config file.\n{fix}{3 * absent}"
    assert found.returncode == 0


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["llama3-8b"], "Write --model llama3-8b."),
        (["--model", "llama3-8b", "--why-not", "up fsdp"], "a rule as 'up: fsdp'."),
    ],
    ids=["model", "rule"],
)
def test_a_plan_is_told_how_to_name_what_it_asks_about(shardlib, words, fix):
    code, out, err = shardlib("plan", *words, "--on", "v5e-8")
    assert (code, out, err.startswith("ConfigError: ")) == (2, "", True)
    assert err.endswith(f"{fix}\n")


@pytest.mark.mesh
def test_python_m_shardlib_train_is_shardlib_train(tmp_path):
    (tmp_path / "quick.yaml").write_text("trian: {}\n")
    path = str(tmp_path / "quick.yaml")
    one = python("-m", "shardlib.train", path)
    other = python("-m", "shardlib", "train", path)
    assert one.stderr == other.stderr
    assert f"{path}:1: trian: unknown key. Did you mean 'train'?" in one.stderr
    assert (one.returncode, one.stdout) == (2, "")


def test_train_help_lists_every_key_with_type_default_and_meaning(shardlib):
    from shardlib.config import keys
    from shardlib.run.config import RunConfig

    code, out, err = shardlib("train", "--help")
    assert (code, err) == (0, "")
    assert "Usage: shardlib train" in out
    known = keys(RunConfig)
    roots = {key.path.split(".")[0] for key in known}
    assert roots >= {
        "run_dir", "seed", "model", "data", "optimizer", "train", "mesh", "rules", "precision",
        "checkpoint", "eval",
    }  # fmt: skip
    for key in known:
        assert f"\n  {key.path}  {key.type_text}, " in out
        assert key.doc, f"{key.path} has no description"


def test_usage_lines_name_arguments_without_braces(shardlib):
    from shardlib.cli import app

    commands = [[one.name or one.callback.__name__] for one in app.registered_commands]
    commands += [["checkpoint", name] for name in ("ls", "verify", "diff", "reshard")]
    assert len(commands) > 16
    for words in commands:
        usage = shardlib(*words, "--help")[1].splitlines()[0]
        assert re.fullmatch(rf"Usage: shardlib {' '.join(words)} \[OPTIONS\][^{{}}]*", usage), usage


def test_schema_is_the_json_schema_of_the_config(shardlib):
    jsonschema = pytest.importorskip("jsonschema")
    code, out, err = shardlib("schema")
    assert (code, err) == (0, "")
    jsonschema.Draft7Validator.check_schema(json.loads(out))


def test_devices_shows_devices_and_the_automatic_mesh(shardlib):
    code, out, err = shardlib("devices")
    assert (code, err) == (0, "")
    assert "mesh: auto gives\nfsdp=8 over 8 cpu devices\n" in out
    code, out, err = shardlib("devices", "--json")
    facts = json.loads(out)
    assert (code, err, facts["auto_mesh"]) == (0, "", {"fsdp": 8})
    assert [device["id"] for device in facts["devices"]] == list(range(8))
    unknown = ("memory_bytes", "chip", "bf16_flops_per_second", "memory_bytes_per_second")
    known = {"id": 0, "process": 0, "platform": "cpu", "kind": "cpu"}
    assert facts["devices"][0] == known | dict.fromkeys(unknown)


TINY = """
run_dir: {run_dir}
model: {{name: transformer, num_layers: 1, embed_dim: 16, num_heads: 2}}
data: {{path: {text}, tokenizer: bytes, sequence_length: 16, eval_fraction: 0}}
train: {{steps: 1, global_batch: 8}}
mesh: fsdp=8
eval: {{every_steps: 0}}
"""


@pytest.fixture
def tiny(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("all that is gold does not glitter\n" * 200)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.format(run_dir=tmp_path / "run", text=text))
    return str(path)


def test_the_config_of_a_run_is_for_where_the_run_is(tiny, tmp_path, monkeypatch):
    place = tmp_path / "moved" / "run"
    place.mkdir(parents=True)
    shutil.copy(tiny, place / "config.yaml")
    shutil.copy(tiny, place / "other.yaml")

    def run_dir(path, *overrides):
        return load_config(str(path), list(overrides)).run_dir

    written = str(tmp_path / "run")
    assert run_dir(place) == run_dir(place / "config.yaml") == written  # No run has been there.
    (place / "run_id").write_text(f"{'0' * 32}\n")
    assert run_dir(place) == run_dir(f"{place}/") == run_dir(place / "config.yaml") == str(place)
    assert run_dir(place / "other.yaml") == run_dir(tiny) == written
    assert run_dir(place, "train.steps=2", "run_dir=there") == "there"
    monkeypatch.chdir(tmp_path)
    assert run_dir("moved/run") == "moved/run"
    monkeypatch.chdir(place)
    assert run_dir("../run") == run_dir("../run/config.yaml") == "../run"
    assert run_dir(".") == run_dir("config.yaml") == "."


@pytest.mark.mesh
def test_explain_prints_a_table_or_json_and_writes_nothing(shardlib, tiny, tmp_path):
    code, out, err = shardlib("explain", tiny)
    assert (code, err) == (0, "")
    assert "parameters on mesh fsdp=8" in out
    assert "\nattention: xla: the platform is cpu\n" in out
    words = ["--json", "--abstract", "--on", "cpu:4", "mesh=data=4"]
    code, out, err = shardlib("explain", tiny, *words)
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["mesh"] == {"data": 4}
    assert facts["choices"] == {
        "attention": "xla: the platform is cpu",
        "partition": "XLA: the constraints of the model decide where each product lies",
        "gradients": "summed over data by the compiler: the step has one microbatch",
    }
    assert not (tmp_path / "run").exists()


def test_explain_strict_exits_1_for_what_is_replicated_by_accident(shardlib, tiny):
    code, _, err = shardlib("explain", tiny, "--strict")
    assert (code, err) == (0, "")
    indivisible = ["model.embed_dim=12", "model.vocab_size=30000"]
    optional = ["rules.params.embed=[fsdp, null]", "rules.params.vocab=null"]
    code, out, err = shardlib("explain", tiny, "--strict", *indivisible, *optional)
    assert code == 1
    assert "parameters on mesh fsdp=8" in out
    reason = "(1.4 MiB) is replicated: embed: not fsdp: fsdp=8 does not divide 12"
    assert err == f"head/kernel {reason}\ntoken_embedding/embedding {reason}\n"


@pytest.mark.mesh
def test_explain_on_a_cluster_compiles_the_step(shardlib, tiny, tmp_path):
    page = tmp_path / "page.html"
    code, out, err = shardlib("explain", tiny, "--on", "cpu:8", "--html", str(page))
    assert (code, err) == (0, "")
    assert out.startswith("step on mesh fsdp=8 of cpu:8\na device needs ")
    assert "\nattention: xla: the platform is cpu\n" in out
    assert out.endswith("no faults found\n")
    assert page.read_text().startswith("<!doctype html>")
    code, out, _ = shardlib("explain", tiny, "--on", "cpu:8", "--json", "--strict")
    facts = json.loads(out)
    assert (code, facts["mesh"], facts["findings"]) == (0, {"fsdp": 8}, [])
    assert {c["kind"] for c in facts["collectives"]} == {"all-gather", "all-reduce"}
    # Of what a loop over layers gathers, compilers since jax 0.12 name the loop alone.
    assert any(c["model_path"].startswith("layers") for c in facts["collectives"])
    assert not (tmp_path / "run").exists()


@pytest.mark.mesh
def test_explain_compares_two_steps(shardlib, tiny):
    code, out, err = shardlib("explain", "--diff", tiny, "mesh=data=8", "--on", "cpu:8")
    assert (code, err) == (0, "")
    assert out.startswith(
        f"before: {tiny}: step on mesh fsdp=8 of cpu:8\n"
        f"after:  {tiny} mesh=data=8: step on mesh data=8 of cpu:8\n"
    )
    assert "sent: all-gather over fsdp" in out


@pytest.mark.mesh
def test_explain_strict_fails_for_faults_that_no_baseline_accepts(shardlib, tiny, tmp_path):
    wide = ["model.embed_dim=12", "model.vocab_size=30000"]
    wide += ["rules.params.embed=[fsdp, null]", "rules.params.vocab=null"]
    words = ["explain", tiny, *wide, "--on", "cpu:8", "--strict"]
    code, out, _ = shardlib(*words)
    assert code == 1
    assert "SL101 head/kernel" in out
    accepted = str(tmp_path / "faults.yaml")
    code, out, err = shardlib(*words, "--baseline", accepted, "--accept")
    assert code == 0
    assert out.endswith("no new faults, 2 accepted\n")
    assert err == f"{accepted}: 2 accepted faults written\n"
    code, out, _ = shardlib(*words, "--baseline", accepted, "--json")
    facts = json.loads(out)
    assert (code, len(facts["findings"]), len(facts["accepted"])) == (0, 0, 2)
    # What was mended is said, and no fault.
    code, _, err = shardlib("explain", tiny, "--on", "cpu:8", "--baseline", accepted)
    assert code == 0
    assert "SL101" in err
    assert err.endswith("is accepted and was not found\n")


@pytest.mark.mesh
def test_explain_strict_fails_for_faults_that_only_the_second_step_has(shardlib, tiny):
    faulty = ["model.embed_dim=12", "model.vocab_size=30000"]
    faulty += ["rules.params.vocab=null", "rules.params.embed=[fsdp, null]"]
    words = ["explain", "--strict", "--on", "cpu:8", "--diff", tiny]
    code, out, _ = shardlib(*words, *faulty)
    assert (code, "new fault: SL101 head/kernel" in out) == (1, True)
    # Faults that both have are no change, nor are keys that change both.
    code, out, _ = shardlib(*words, tiny, *faulty)
    assert (code, out.endswith("the steps do not differ\n")) == (0, True)


@pytest.mark.parametrize(
    ("words", "option", "fix"),
    [
        ("--html page.html --optimize", "--optimize, --html", "Name a cluster"),
        ("--diff --abstract --on cpu:8 mesh=data=8", "--diff", "Leave --abstract out"),
        ("--on cpu:8 --accept", "--accept", "Name it: --baseline"),
        ("--diff --on cpu:8", "--diff", "explain --diff CONFIG mesh=fsdp=-1 --on cpu:8"),
        (
            "--diff --on cpu:8 mesh=data=8 --html a.html --baseline b.json --accept",
            "--html, --baseline, --accept",
            "Explain the steps one by one",
        ),
        ("--on 8xh100 --optimize", "--optimize", "Leave it out"),
        ("--on cpu:8 --baseline nowhere.json", "nowhere.json", "with --accept"),
    ],
)
def test_explain_refuses_options_that_do_not_fit_each_other(shardlib, tiny, words, option, fix):
    code, out, err = shardlib("explain", tiny, *words.split())
    fault, action = err.split("\n  ")
    assert (code, out, fault.startswith("ConfigError: ")) == (2, "", True)
    assert option in fault
    assert fix.replace("CONFIG", tiny) in " ".join(action.split())


@pytest.mark.parametrize(
    ("option", "more"), [("--html", []), ("--baseline", ["--accept"])], ids=["html", "accept"]
)
def test_explain_refuses_what_it_could_not_write_before_it_compiles(
    shardlib, tiny, tmp_path, option, more
):
    missing = str(tmp_path / "no" / "file.json")
    fault = f"the directory {tmp_path / 'no'} does not exist"
    for path, why in ((missing, fault), (str(tmp_path), "it is a directory")):
        # The config is not read before: it has no such key.
        words = ["--on", "cpu:8", "nonsense=1", option, path, *more]
        message = f"{option} {path} cannot be written: {why}.\n  Name another file.\n"
        assert shardlib("explain", tiny, *words) == (2, "", f"ConfigError: {message}")


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("", 160), ("0", 160)])
def test_reports_are_as_wide_as_columns_says_and_160_in_a_pipe(
    shardlib, tiny, monkeypatch, columns, widest
):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, err = shardlib("explain", tiny)
    assert (code, err) == (0, "")
    assert 0.6 * widest < max(len(line.rstrip()) for line in out.splitlines()) <= widest


@pytest.mark.mesh
def test_a_plan_fits_a_terminal_of_80_columns(shardlib, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = shardlib("plan", "--model", "llama3-8b", "--on", "v5e-16", "--top", "2")
    assert (code, max(map(len, out.splitlines())) <= 80) == (0, True)
    assert "\n1  mesh fsdp=16, rules standard, micro 16, remat\n    0-30:offload:" in out


def test_launch_runs_the_command_in_every_process():
    done = python("-m", "shardlib", "launch", "--processes", "2", "--", "shardlib", "--version")
    assert done.returncode == 0
    assert done.stdout.count("shardlib 0.1.0") == 2
