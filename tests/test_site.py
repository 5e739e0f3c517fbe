"""The site builds without a warning, and its reference holds every public name."""

import ast
import importlib
import os
import pathlib
import subprocess
import sys
import types
import zlib

import pytest

import shardlib

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PACKAGES = ("checkpoint", "config", "data", "explain", "hardware", "losses", "mesh", "nn.attention")
PACKAGES += ("nn.moe", "plan", "rules", "run", "testing")
pytestmark = [
    pytest.mark.docs,
    pytest.mark.skipif(not DOCS.exists(), reason="runs in the repository"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module, reason="needs the extra docs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", str(out / "read")]
    # All but the pages with the source of every module, which take half of the time.
    extensions = ("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_site")
    command += ["-D", f"extensions={','.join(extensions)}"]
    run = subprocess.run(
        [*command, str(DOCS), str(out / "html")],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return out / "html"


@pytest.fixture(scope="module")
def documented(site):
    """The Python names that the reference describes."""
    listed = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    return {line.split()[0] for line in listed.splitlines() if " py:" in line}


def test_every_name_of_the_package_is_in_the_reference(documented):
    values = {name: getattr(shardlib, name) for name in shardlib.__all__}
    wanted = {
        value.__name__ if isinstance(value, types.ModuleType) else f"shardlib.{name}"
        for name, value in values.items()
    }
    assert not wanted - documented


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_is_in_the_reference(package, documented):
    """A name may be described where it is defined, or as a name of `shardlib`."""
    missing = [
        name
        for name, homes in offered(f"shardlib.{package}").items()
        if f"shardlib.{name}" not in documented
        and not any(
            f".{name}" == found[-len(name) - 1 :] and found.startswith(homes)
            for found in documented
        )
    ]
    assert not missing


def offered(package):
    """Returns the names that the `__init__.py` of a package offers (`import name as name`), with
    the modules that they may be described in."""
    source = pathlib.Path(str(importlib.import_module(package).__file__)).read_text()
    return {
        alias.name: (f"{package}.", f"{node.module}.")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }


def test_keys_and_commands_are_in_the_reference(site):
    assert "train.global_batch" in (site / "reference" / "config_keys.html").read_text()
    commands = (site / "reference" / "command_line.html").read_text()
    assert "shardlib checkpoint reshard" in commands
    assert "--why-not MESH" in commands


def test_files_of_the_repository_are_pages(site):
    assert "Ways to split" in (site / "pages" / "readme.html").read_text()
    guide = (site / "meshes_and_rules.html").read_text()
    assert 'href="pages/readme.html#ways-to-split"' in guide
    assert 'href="pages/02_parallelism.html"' in guide
