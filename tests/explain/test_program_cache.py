"""Compiled programs kept as text: read back whole, or made anew."""

import dataclasses
import gzip
import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from on_meshes import cpu_mesh, struct

from shardlib.explain.aot.cache import Program, cached, program_key
from shardlib.explain.aot.compile import compile_step

PROGRAM = Program("HloModule m, é\n", {"peak": 3}, "W1121 careful\n", "v5p-32")
SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
KEY = program_key("hash", ["v5e-8"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path))
    return tmp_path / "programs"


def never():
    raise AssertionError("it is kept already")


def changed(**fields):
    def change(entry):
        facts = json.loads(gzip.decompress(entry))
        return gzip.compress(json.dumps(facts | fields).encode())

    return change


BROKEN = {
    "empty": lambda entry: b"",
    "not gzip": lambda entry: b"not gzip",
    "not JSON": lambda entry: gzip.compress(b"not JSON"),
    "a list": lambda entry: gzip.compress(b"[1, 2]"),
    "keys missing": lambda entry: gzip.compress(b'{"text": "HloModule"}'),
    "cut short": lambda entry: entry[:-9],
    "key": changed(key="another"),
    "text": changed(text=1),
    "memory": changed(memory={"peak": "x"}),
    "warnings": changed(warnings=None),
    "compiled_for": changed(compiled_for=3),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_read_is_made_anew(folder, damage):
    cached(KEY, lambda: PROGRAM)
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    other = dataclasses.replace(PROGRAM, text="made anew")
    assert cached(KEY, lambda: other) == other
    assert cached(KEY, never) == other


def test_a_directory_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path / "file"))
    assert cached(KEY, lambda: PROGRAM) == PROGRAM
    with pytest.raises(AssertionError, match="kept already"):
        cached(KEY, never)


def test_a_program_whose_warnings_are_not_known_is_not_kept(folder):
    hidden = dataclasses.replace(PROGRAM, warnings=None)
    assert cached(KEY, lambda: hidden) == hidden
    assert not folder.exists()
    assert cached(KEY, lambda: PROGRAM) == PROGRAM
    assert cached(KEY, never) == PROGRAM


def test_whatever_changes_the_program_changes_the_key(monkeypatch):
    keys = {KEY, program_key("other", ["v5e-8"]), program_key("hash", ["v5e-16"])}
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "--another")
        keys.add(program_key("hash", ["v5e-8"]))
    assert len(keys) == 5


@pytest.fixture
def jax_cache(tmp_path):
    """JAX's own cache, which keeps every program."""
    settings = SETTINGS | {"jax_compilation_cache_dir": str(tmp_path / "jax")}
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "jax"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_source_lines_are_not_those_of_an_equal_program_in_jaxs_cache(jax_cache):
    def text(file):
        found = {"jnp": jnp}
        source = "def total(x):\n  return jnp.sum(x, axis=0)\n"
        exec(compile(source, file, "exec"), found)
        x = struct(cpu_mesh(data=8), (16, 4), "data")
        return compile_step(found["total"], (x,), keep=False).text

    assert "/one.py" in text("/one.py")
    assert list(jax_cache.iterdir())
    assert "/two.py" in text("/two.py")
