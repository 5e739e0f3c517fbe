"""`shardlib checkpoint`: what a person sees of what is saved."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib import run
from shardlib.checkpoint import CheckpointConfig, LocalTier, RunCheckpoints
from shardlib.checkpoint.arrays import read_bound
from shardlib.checkpoint.read_plan import plan_reads
from shardlib.cli import main
from shardlib.config import load, to_yaml
from shardlib.run.directory import RunDirectory

CONFIG = """
run_dir: {run_dir}
model: {{name: transformer, num_layers: 1, embed_dim: 16, num_heads: 2, vocab_size: 264}}
data: {{path: {text}, tokenizer: bytes, sequence_length: 16, eval_fraction: 0}}
train: {{steps: 4, global_batch: 8, sample_length: 0, compilation_cache: null}}
mesh: fsdp=8
checkpoint: {{every_steps: 2}}
eval: {{every_steps: 0}}
"""
STEP = "train.steps=5"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    text = root / "text.txt"
    text.write_text("all that is gold does not glitter\n" * 200)
    config = root / "config.yaml"
    config.write_text(CONFIG.format(run_dir=root / "run", text=text))
    run.train(load(run.RunConfig, config))
    return root / "run"


@pytest.fixture
def shardlib(capfd):
    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", *map(str, words)])
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return run


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def largest_file(checkpoint):
    files = [path for path in (checkpoint / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_ls(trained, shardlib):
    code, out, err = shardlib("ls", trained)
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [row[0] for row in cells] == ["2", "4"]
    code, out, err = shardlib("ls", trained / "checkpoints", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert [(each["step"], each["samples_seen"]) for each in facts] == [(2, 16), (4, 32)]
    assert list(facts[0]["metrics"]) == ["loss"]


def test_places_without_checkpoints(trained, shardlib, tmp_path):
    missing = "config.yaml is missing.\n  Pass a run directory"
    for options in ((), ("--json",)):
        code, out, err = shardlib("ls", tmp_path, *options)
        assert (code, out) == (2, "")
        assert missing in err
    assert shardlib("verify", tmp_path) == (1, f"no checkpoint in {tmp_path}\n", "")
    code, _, err = shardlib("ls", tmp_path / "none")
    assert code == 2
    assert f"no such directory: {tmp_path}/none.\n  Pass a run directory" in err
    assert "\n  Name another run." in shardlib("diff", tmp_path, tmp_path)[2]
    assert missing in shardlib("reshard", tmp_path, "--mesh", "fsdp=2", "--dry-run")[2]
    (tmp_path / "new").mkdir()
    shutil.copy(trained / "config.yaml", tmp_path / "new")
    assert shardlib("ls", tmp_path / "new") == (0, f"no checkpoint in {tmp_path}/new\n", "")


def test_verify_names_what_was_changed(trained, shardlib, tmp_path):
    code, out, err = shardlib("verify", trained)
    assert (code, err) == (0, "")
    assert [line.split(":")[0] for line in out.splitlines()] == ["step 2", "step 4"]
    assert out.count(" files and 40 arrays are as saved\n") == 2
    damaged = tmp_path / "run"
    shutil.copytree(trained, damaged)
    place = damaged / "checkpoints" / "00000002"
    file = largest_file(place)
    flip_a_bit(file)
    code, out, err = shardlib("verify", damaged)
    assert (code, err) == (1, "")
    assert f"  {file.relative_to(place)}: checksum mismatch\n  Restore another step.\n" in out
    code, out, _ = shardlib("verify", damaged, "--step", 4, "--json")
    assert (code, json.loads(out)) == (0, [{"step": 4, "in": "run", "fault": None}])


def test_diff(trained, shardlib):
    code, out, err = shardlib("diff", f"{trained}@2", trained)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "1 array is equal, 39 are not:"  # The key of all randomness.
    assert "  params/head/kernel: different values" in lines
    assert lines[-2:] == ["  and 19 more (--json lists all)", "data.samples_seen: 16 and 32"]
    code, out, _ = shardlib("diff", trained, trained, "--json")
    assert (code, json.loads(out)) == (
        0,
        {"shapes": [], "values": [], "unknown": [], "same": 40, "run": [], "libraries": []},
    )


def test_one_checkpoint_is_named_by_its_step_or_its_directory(trained, shardlib, tmp_path):
    for name in (f"{trained}@2", trained / "checkpoints" / "00000002"):
        code, out, err = shardlib("verify", name)
        assert (code, err) == (0, "")
        assert [line.split(":")[0] for line in out.splitlines()] == ["step 2"]
        code, out, _ = shardlib("reshard", name, "--mesh", "fsdp=2", "--dry-run", "--json")
        assert (code, json.loads(out)["step"]) == (0, 2)
        code, _, err = shardlib("verify", name, "--step", 4)
        assert (code, "\n  Leave one of them out" in err) == (2, True)
        code, _, err = shardlib("ls", name)
        assert (code, f"shardlib checkpoint verify {trained} --step 2" in err) == (2, True)
        assert shardlib("diff", name, f"{trained}@2")[1] == "40 arrays are equal\n"
    code, _, err = shardlib("verify", f"{trained}@3")
    assert (code, "step 3 has no checkpoint in" in err) == (2, True)
    code, _, err = shardlib("verify", f"{trained}@last")
    assert (code, "the step 'last' is not a number.\n  Write RUN@STEP" in err) == (2, True)
    # A run may have such a name itself.
    odd = shutil.copytree(trained, tmp_path / "run@2")
    code, out, _ = shardlib("verify", odd)
    assert (code, out.count("are as saved")) == (0, 2)


def test_checkpoints_that_are_all_damaged_are_not_nothing(trained, shardlib, tmp_path):
    damaged = shutil.copytree(trained, tmp_path / "run")
    for step in (2, 4):
        flip_a_bit(damaged / "checkpoints" / f"0000000{step}" / "manifest.json")
    for words in ("ls",), ("ls", "--json"), ("diff", trained):
        code, out, err = shardlib(*words, damaged)
        assert (code, json.loads(out or "[]")) == (1, [])
        assert f"2 are damaged.\n  See what is wrong: shardlib checkpoint verify {damaged}" in err
    code, out, _ = shardlib("verify", damaged)
    assert (code, out.count("is damaged")) == (1, 2)
    _, _, err = shardlib("reshard", damaged, "--mesh", "fsdp=2", "--dry-run")
    assert "(steps 2, 4).\n  See what is wrong with each: shardlib checkpoint verify" in err


def test_reshard_says_what_a_restore_takes(trained, shardlib):
    words = ("reshard", trained, "--mesh", "fsdp=4,tensor=2", "--dry-run")
    code, out, err = shardlib(*words, "--on", "2x4xh100")
    assert (code, err) == (0, "")
    assert out.splitlines()[1] == "onto fsdp=4,tensor=2 on 2 hosts"
    code, out, _ = shardlib(*words, "--step", 2, "--json")
    plan = json.loads(out)
    assert (plan["step"], plan["saved_on"], plan["mesh"]) == (2, "fsdp=8", "fsdp=4,tensor=2")
    assert len(plan["hosts"]) == 1
    assert plan["hosts"][0]["read_bytes"] >= plan["state_bytes"]
    code, _, err = shardlib("reshard", trained, "--mesh", "fsdp=-1", "--dry-run")
    assert (code, "'fsdp=-1' leaves a size open" in err) == (2, True)


@pytest.mark.mesh
def test_reshard_copies_a_run(trained, shardlib, tmp_path):
    copy = tmp_path / "copy"
    code, out, err = shardlib("reshard", trained, "--mesh", "data=4,tensor=2", "--to", copy)
    assert (code, err) == (0, "")
    assert out == f"step 4 is now in {copy}\n  train on  shardlib train {copy}/config.yaml\n"
    code, out, _ = shardlib("diff", trained, copy, "--json")
    found = json.loads(out)
    assert (found["same"], found["shapes"], found["values"]) == (40, [], [])
    assert {each["name"] for each in found["run"]} == {
        *("config.mesh", "config.run_dir", "id", "mesh")
    }
    identities = {RunDirectory(place).identity for place in (trained, copy)}
    assert len(identities) == 2
    assert {each["second"] for each in found["run"] if each["name"] == "id"} <= identities
    result = run.train(load(run.RunConfig, copy / "config.yaml", ["train.steps=5"]))
    assert result.step == 5
    code, _, err = shardlib("reshard", trained, "--mesh", "fsdp=8", "--to", copy)
    assert (code, f"{copy} already holds a run.\n  Name a directory" in err) == (2, True)


@pytest.mark.mesh
@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_reshard_takes_guards_that_have_changed_since_the_last_save(
    trained, shardlib, tmp_path, capfd, is_on
):
    directory = RunDirectory(shutil.copytree(trained, tmp_path / "run"))
    here, spikes = f"run_dir={directory}", ["train.guards.spike.warmup=8"]
    now = load(run.RunConfig, directory.config_file, [here, *spikes * is_on])
    if not is_on:  # What is saved has a window.
        run.train(load(run.RunConfig, directory.config_file, [here, *spikes, STEP]))
        capfd.readouterr()
    directory.config_file.write_text(to_yaml(now))
    words = ("reshard", directory, "--mesh", "data=8")
    code, out, err = shardlib(*words, "--dry-run", "--json")
    assert (code, err, json.loads(out)["num_leaves"]) == (0, "", 40 if is_on else 42)
    # A copy of a copy, too.
    copies = [tmp_path / "copy", tmp_path / "another"]
    assert shardlib(*words, "--to", copies[0])[0] == 0
    assert shardlib("reshard", copies[0], "--mesh", "fsdp=8", "--to", copies[1])[0] == 0
    config = load(run.RunConfig, copies[1] / "config.yaml", ["train.steps=7"])
    assert config.train.guards == now.train.guards
    assert run.train(config).step == 7


@pytest.fixture
def in_two_places(trained, tmp_path):
    """A run whose newest checkpoint is on the local disk."""
    directory = RunDirectory(shutil.copytree(trained, tmp_path / "run"))
    shutil.move(directory.checkpoints / "00000004", tmp_path / "local" / "00000004")
    config = load(run.RunConfig, directory.config_file)
    local = LocalTier(directory=str(tmp_path / "local"), every_steps=1)
    own = dataclasses.replace(config.checkpoint, local=local)
    directory.config_file.write_text(to_yaml(dataclasses.replace(config, checkpoint=own)))
    return directory.path


def test_both_places_of_a_run_are_seen(in_two_places, trained, shardlib, tmp_path):
    code, out, err = shardlib("ls", in_two_places)
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [row[:2] for row in cells] == [["2", "run"], ["4", "local"]]
    code, out, _ = shardlib("ls", in_two_places, "--json")
    assert [(each["step"], each["in"]) for each in json.loads(out)] == [(2, "run"), (4, "local")]
    # A directory of checkpoints alone says nothing of another.
    code, out, err = shardlib("ls", tmp_path / "local", "--json")
    assert (code, err) == (0, "")
    assert [(each["step"], each["in"]) for each in json.loads(out)] == [(4, "run")]

    (tmp_path / "local" / "00000004" / "state" / "_METADATA").unlink()
    code, out, err = shardlib("verify", in_two_places)
    assert (code, err) == (1, "")
    assert out.startswith("step 2 in run: ")
    assert "\nstep 4 in local: " in out
    assert "  state/_METADATA: missing\n" in out
    code, out, _ = shardlib("diff", trained, in_two_places, "--json")
    assert (code, json.loads(out)["same"]) == (0, 40)


def test_reshard_takes_the_newest_of_both_places(in_two_places, shardlib, tmp_path):
    words = ("reshard", in_two_places, "--mesh", "data=8")
    code, out, err = shardlib(*words, "--dry-run", "--json")
    assert (code, err, json.loads(out)["step"]) == (0, "", 4)
    copy = tmp_path / "copy"
    code, out, err = shardlib(*words, "--to", copy)
    assert (code, err) == (0, "")
    assert f"step 4 is now in {copy}" in out
    assert "checkpoint.local is left out of its config" in out
    assert load(run.RunConfig, copy / "config.yaml").checkpoint.local is None
    saved = RunCheckpoints(copy / "checkpoints").metadata(4)
    assert saved["config"]["checkpoint"]["local"] is None
    assert saved["id"] == RunDirectory(copy).identity
    assert saved["id"] != RunDirectory(in_two_places).identity


def test_a_local_place_that_cannot_be_read_is_told_of(in_two_places, shardlib, tmp_path):
    (tmp_path / "local").rename(tmp_path / "lost")
    code, out, err = shardlib("ls", in_two_places, "--json")
    assert (code, [each["step"] for each in json.loads(out)]) == (0, [2])
    assert err == f"checkpoint.local.directory does not exist, skipped: {tmp_path}/local\n"
    config = in_two_places / "config.yaml"
    config.write_text("mesh: {")
    code, out, err = shardlib("ls", in_two_places, "--json")
    assert (code, [each["step"] for each in json.loads(out)]) == (0, [2])
    assert err.startswith("checkpoint.local is unknown and ignored: ")


def test_a_restore_reads_what_was_planned(tmp_path):
    saved_on, mesh = sl.make_mesh("fsdp=8"), sl.make_mesh("data=2,fsdp=2,tensor=2")
    values = jnp.arange(2**21, dtype=jnp.float32).reshape(2048, 1024)
    state = {
        "a": jax.device_put(values, NamedSharding(saved_on, P("fsdp"))),
        "b": jax.device_put(values, NamedSharding(saved_on, P(None, "fsdp"))),
    }
    target = {
        "a": jax.ShapeDtypeStruct(values.shape, jnp.float32, sharding=NamedSharding(mesh, P())),
        "b": jax.ShapeDtypeStruct(
            values.shape, jnp.float32, sharding=NamedSharding(mesh, P(("tensor", "fsdp")))
        ),
    }
    with RunCheckpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, {}, wait=True)
        targets, chunks = checkpoints.stored(1, target)
        plan = plan_reads(targets, chunks, num_hosts=1, read_bound=read_bound)
        checkpoints.restore(1, target)
        before = read_so_far()
        restored = checkpoints.restore(1, target)
        read = read_so_far() - before
    np.testing.assert_array_equal(restored["b"], values)
    # Each of the four shards of `b` is a part of every one of the eight chunks it was saved in.
    assert plan[0].read_bytes == values.nbytes + 4 * values.nbytes
    assert plan[0].held_bytes == 8 * values.nbytes + 2 * values.nbytes
    # Indices and manifests are read besides.
    assert plan[0].read_bytes <= read <= plan[0].read_bytes + 2**20


def read_so_far():
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar: "))
