"""Which lines are the user's, and what of a place stays the same after an edit elsewhere."""

import contextlib
import importlib
from pathlib import Path

import flax
import jax
import optax
import pytest

import shardlib
from shardlib.explain.hlo import places
from shardlib.explain.hlo.places import Where, is_library, short_name, where_of, where_of_equation
from shardlib.explain.hlo.text import parse


@pytest.mark.parametrize("module", [jax, flax, optax, shardlib, contextlib, importlib])
def test_the_files_of_libraries_and_of_python_are_not_the_users(module):
    assert is_library(module.__file__)


def test_a_library_is_one_wherever_it_lies(tmp_path, monkeypatch):
    folder = tmp_path / "dist-packages" / "haiku"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "dist-packages")
    places._directories.cache_clear()
    is_library.cache_clear()
    try:
        assert is_library(str(folder / "linear.py"))
        assert not is_library(str(tmp_path / "dist-packages" / "models" / "llama.py"))
        assert not is_library(str(tmp_path / "dist-packages" / "haiku_models.py"))
    finally:
        places._directories.cache_clear()
        is_library.cache_clear()


def test_names_of_operations():
    assert short_name("jit(step)/jvp()/while/body/closed_call/dot_general") == "jvp()/dot_general"
    assert short_name("") == ""


class Model:
    def __call__(self, x):
        def inner(y):
            return jax.nn.softmax(y)  # inner

        return inner(x)


def test_an_operation_is_placed_by_its_function_and_not_by_its_line():
    lines = Path(__file__).read_text().splitlines()
    line = 1 + lines.index("            return jax.nn.softmax(y)  # inner")
    expected = Where(
        "jit(__call__)/exp", f"{__file__}:{line}", "test_places.py:Model.__call__.inner"
    )
    traced = jax.jit(Model().__call__).trace(jax.numpy.ones(4))
    (equation,) = [e for e in traced.jaxpr.eqns if e.primitive.name == "exp"]
    assert where_of_equation(equation, "jit(__call__)/exp") == expected
    module = parse(traced.lower().compile().as_text())
    found = [i for each in module.computations.values() for i in each if i.opcode == "exponential"]
    assert where_of(module, found[0]) == expected
    assert expected.place() == "exp in test_places.py:Model.__call__.inner"


def test_a_program_without_stacks_tells_the_file():
    text = """HloModule m

ENTRY %main (p: f32[4]) -> f32[4] {
  ROOT %e = f32[4]{0} exponential(%p), metadata={op_name="jit(f)/exp" source_file="a/model.py" \
source_line=3}
}
"""
    module = parse(text)
    (instruction,) = module.computations["main"]
    where = where_of(module, instruction)
    assert where == Where("jit(f)/exp", "a/model.py:3", "model.py")
    assert where.place() == "exp in model.py"
    assert Where().place("all-reduce") == "all-reduce"
