"""No source file reads data in a way that lets it execute, and no error shows credentials.

The first is checked on the syntax trees of all files. What is banned is looked up by full name,
whatever it was imported as.
"""

import ast
from pathlib import Path

import pytest

import shardlib
from shardlib.errors import ConfigError, MissingExtraError

ROOT = Path(shardlib.__file__).parents[1]
FILES = sorted([*ROOT.glob("shardlib/**/*.py"), *ROOT.glob("models/**/*.py")])

UNPICKLING = (
    "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve",
)  # fmt: skip
# Called with these they read no more than data.
SAFE_ONLY_WITH = {
    "numpy.load": {"allow_pickle": False},
    "numpy.lib.format.read_array": {"allow_pickle": False},
    "torch.load": {"weights_only": True},
    "yaml.compose": {"Loader": "yaml.SafeLoader"},
}
BANNED_CALLS = (
    "builtins.eval", "builtins.exec", "builtins.compile", "eval", "exec", "compile", "__import__",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "pandas.read_pickle", "code.interact", "runpy.run_path", "logging.config.fileConfig",
    # Even the safe one expands aliases without a limit: `shardlib.config.from_yaml` counts first.
    "yaml.load", "yaml.load_all", "yaml.safe_load", "yaml.safe_load_all", "yaml.full_load",
    "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.compose_all",
    # These unpickle what they are given.
    "jax.experimental.serialize_executable.deserialize_and_load",
    "multiprocessing.connection.Listener", "multiprocessing.connection.Client",
)  # fmt: skip
BANNED_LOADERS = tuple(
    f"yaml.{kind}"
    for name in ("Loader", "FullLoader", "UnsafeLoader")
    for kind in (name, f"C{name}")
)
EXTRACTIONS = ("extract", "extractall", "unpack_archive")


class Names(ast.NodeVisitor):
    """What each name of a file was imported as: `np` -> `numpy`."""

    def __init__(self):
        self.full: dict[str, str] = {}

    def visit_Import(self, node):
        for alias in node.names:
            bound = alias.asname or alias.name.split(".")[0]
            self.full[bound] = alias.name if alias.asname else bound

    def visit_ImportFrom(self, node):
        for alias in node.names:
            self.full[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def of(self, node):
        """The full name of `a.b.c`; None of anything else."""
        if isinstance(node, ast.Attribute):
            before = self.of(node.value)
            return before and f"{before}.{node.attr}"
        return self.full.get(node.id, node.id) if isinstance(node, ast.Name) else None


def imported(node):
    """The modules that a statement or `import_module("x")` names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func).split(".")[-1]
        if called in ("import_module", "require", "__import__"):
            return [str(node.args[0].value)]
    return []


def call_fault(call, names):
    """What is wrong with a call, or None."""
    called = names.of(call.func)
    given = {word.arg: word.value for word in call.keywords}
    if called in BANNED_CALLS:
        return called
    for word, wanted in SAFE_ONLY_WITH.get(called, {}).items():
        value = given.get(word)
        found = value.value if isinstance(value, ast.Constant) else value and names.of(value)
        if found is not wanted and found != wanted:
            return f"{called} without {word}={wanted}"
    for word, value in given.items():
        is_off = isinstance(value, ast.Constant) and not value.value
        if word in ("shell", "allow_pickle") and not is_off:
            return f"{word}={ast.unparse(value)}"
    if isinstance(call.func, ast.Attribute) and call.func.attr in EXTRACTIONS:
        value = given.get("filter")
        if not (isinstance(value, ast.Constant) and value.value == "data"):
            return f"{call.func.attr} without filter='data'"
    return None


def uses(source):
    """Every banned thing in a source file: (line, what)."""
    tree, names, found = ast.parse(source), Names(), set()
    names.visit(tree)
    for node in ast.walk(tree):
        for module in imported(node):
            if module.split(".")[0] in UNPICKLING:
                found.add((node.lineno, module.split(".")[0]))
        if isinstance(node, ast.Call) and (fault := call_fault(node, names)):
            found.add((node.lineno, fault))
        # Named without being called: handed on, or a base class.
        if isinstance(node, ast.Attribute | ast.Name):
            name = names.of(node)
            if name in BANNED_LOADERS or ("." in (name or "") and name in BANNED_CALLS):
                found.add((node.lineno, name))
    return sorted(found)


@pytest.mark.mesh
def test_nothing_that_reads_can_execute():
    assert len(FILES) > 200
    found = {file: uses(file.read_text(encoding="utf-8")) for file in FILES}
    # An unpickler that knows ten names and refuses all others, as tests/hf/test_torch_files.py
    # tries.
    closed = next(file for file in FILES if file.parts[-2:] == ("hf", "torch_files.py"))
    assert [what for _, what in found.pop(closed)] == ["pickle"]
    assert found == {file: [] for file in found}


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import pickle", "pickle"),
        ("import dill as d", "dill"),
        ("from pickle import loads", "pickle"),
        ("def f():\n    import cloudpickle", "cloudpickle"),
        ("import marshal", "marshal"),
        ("from joblib import load", "joblib"),
        ("import shelve, os", "shelve"),
        ("import importlib\nimportlib.import_module('pickle')", "pickle"),
        ("require('joblib', 'x', 'y')", "joblib"),
        ("import numpy as np\nnp.load(f)", "numpy.load without allow_pickle=False"),
        ("from numpy import load\nload(f)", "numpy.load without allow_pickle=False"),
        ("import numpy\nnumpy.load(f, allow_pickle=x)", "numpy.load without allow_pickle=False"),
        ("import numpy\nnumpy.lib.npyio.NpzFile(f, allow_pickle=True)", "allow_pickle=True"),
        ("import torch\ntorch.load(f)", "torch.load without weights_only=True"),
        (
            "import torch as t\nt.load(f, weights_only=False)",
            "torch.load without weights_only=True",
        ),
        ("eval(x)", "eval"),
        ("exec(x)", "exec"),
        ("compile(x, 'f', 'exec')", "compile"),
        ("import builtins\nbuiltins.eval(x)", "builtins.eval"),
        ("__import__(x)", "__import__"),
        ("import yaml\nyaml.load(f, Loader=yaml.SafeLoader)", "yaml.load"),
        ("import yaml\nread = yaml.unsafe_load", "yaml.unsafe_load"),
        ("from yaml import safe_load\nsafe_load(f)", "yaml.safe_load"),
        ("import yaml\nyaml.compose(f)", "yaml.compose without Loader=yaml.SafeLoader"),
        ("import yaml\nyaml.compose(f, Loader=yaml.FullLoader)", "yaml.FullLoader"),
        ("import yaml\nclass Mine(yaml.UnsafeLoader): pass", "yaml.UnsafeLoader"),
        ("import os\nos.system(x)", "os.system"),
        ("import subprocess\nsubprocess.run(x, shell=True)", "shell=True"),
        ("from subprocess import Popen\nPopen(x, shell=y)", "shell=y"),
        ("archive.extractall(path)", "extractall without filter='data'"),
        ("tar.extract(m, filter='fully_trusted')", "extract without filter='data'"),
        ("import shutil\nshutil.unpack_archive(f)", "unpack_archive without filter='data'"),
    ],
)
def test_the_check_finds_what_is_planted(source, fault):
    assert fault in [what for _, what in uses(source)]


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.load(f, allow_pickle=False)",
        "import torch\ntorch.load(f, weights_only=True)",
        "import yaml\nyaml.compose(f, Loader=yaml.SafeLoader)",
        "import re\nre.compile(x)\nmodel.eval()\nlowered.compile()",
        "import subprocess\nsubprocess.run([x], shell=False)",
        "tar.extractall(path, filter='data')",
        "import json\njson.loads(x)",
        "load(f)\nnp.load(f)",  # Of something else: neither name is imported.
    ],
)
def test_the_check_finds_nothing_else(source):
    assert uses(source) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at 'https://me:pw@host/a'", "at 'https://***@host/a'"),
        ("at https://token@host/a, s3://b", "at https://***@host/a, s3://b"),
        ("at 'https:/me:p@ss@host/a'", "at 'https:/***@host/a'"),
        ("gs://b/x?X-Goog-Signature=abc&y=1 z", "gs://b/x?X-Goog-Signature=***&y=1 z"),
        ("https://h/?y=1&sig=a%2Fb", "https://h/?y=1&sig=***"),
        ("mail me@host, or see https://host/a@b?page=2", None),
        ("/data/run:1/a@b: there is nothing", None),
    ],
)
def test_errors_show_no_credentials(text, shown):
    for kind in (ConfigError, MissingExtraError):
        assert str(kind(text)) == (shown or text)
