"""A file imports its own package and those above it in the table of CONTRIBUTING.md."""

import ast
import collections
import functools
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import shardlib

PACKAGE = Path(shardlib.__file__).parent
MODELS = PACKAGE.parent / "models" / "shardlib_models"
SECTION = (
    (PACKAGE.parent / "CONTRIBUTING.md").read_text().partition("## How the code is laid out")[2]
)
TABLE = re.findall(r"^\| (`[^|]*`) \|", SECTION.partition("\n## ")[0], re.MULTILINE)
ROWS = [re.findall(r"`(\w+)`", row) for row in TABLE]
PACKAGES = [
    row for row in ROWS if (PACKAGE / row[0]).exists() or (PACKAGE / f"{row[0]}.py").exists()
]
FLOOR = {name: floor for floor, names in enumerate(PACKAGES) for name in names}
# Imported where they are used only: slow, or absent where the sharding core must still run.
NOT_AT_IMPORT = ("grain", "typer", "tokenizers", "orbax.checkpoint")
NOT_AT_IMPORT += ("tensorboardX", "wandb", "mlflow", "scipy")


def name_of(file: Path) -> str:
    """`shardlib/train/step.py` -> `train.step`; a package's `__init__` is the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int:
    """Row of a module's package in the table; -1 for `shardlib` itself, which holds the version."""
    top = module.split(".")[0]
    if top == "__init__":
        return -1
    if top not in FLOOR:
        raise KeyError(f"{top} is not in the table of CONTRIBUTING.md")
    return FLOOR[top]


@functools.cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_text())))


@pytest.fixture(scope="module", autouse=True)
def trees_are_dropped():
    """They are many objects, which garbage collection would go through in later files."""
    yield
    nodes.cache_clear()


@functools.cache
def imports(file: Path) -> list[tuple[int, str]]:
    """All absolute imports of a file with their lines, those inside functions included."""
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = file.relative_to(PACKAGE.parent).parent.parts
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, *([module] if module else [])])
            # `from shardlib import mesh` may import a module or a name of the package.
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            found += [(node.lineno, name) for name in names if isinstance(name, str)]
    return found


def modules() -> dict[str, Path]:
    return {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def resolve(name: str, known: dict[str, Path]) -> str:
    """The module of the package behind an imported dotted name, without `shardlib.`."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts) or "__init__"


def test_a_file_imports_its_own_package_or_those_above_it():
    known = modules()
    faults = []
    for module, file in known.items():
        if module.rpartition(".")[2] in ("__init__", "__main__"):  # It offers, or starts, anything.
            continue
        for line, name in imports(file):
            if name.split(".")[0] == "shardlib":
                imported = resolve(name, known)
                if floor_of(imported) > floor_of(module):
                    faults.append(
                        f"{file.relative_to(PACKAGE.parent)}:{line}: {module} imports {imported}, "
                        "which is below it in the table"
                    )
    assert not faults, "\n".join(faults)


def test_no_file_or_folder_is_in_a_circle():
    """Within each folder: its files and subfolders, with imports in functions and for types."""
    known = modules()
    edges = collections.defaultdict(set)
    for module, file in known.items():
        for _, name in imports(file):
            if name.split(".")[0] != "shardlib":
                continue
            here, there = module.split("."), resolve(name, known).split(".")
            depth = 0
            while depth < min(len(here), len(there)) and here[depth] == there[depth]:
                depth += 1
            if 0 < depth < min(len(here), len(there)):
                edges[".".join(here[: depth + 1])].add(".".join(there[: depth + 1]))
    circular = {name for name in known if name in reached(name, edges)}
    assert not circular


def test_no_circle_is_hidden_by_a_package():
    """`run.config` alone calls what is built on it, as the planner cannot import `run`: a config
    answers how its run is planned and served."""
    known = modules()
    hidden = {
        module
        for module, file in known.items()
        for _, name in imports(file)
        if name.split(".")[0] == "shardlib"
        and not file.name.startswith("__")
        and module.startswith(f"{resolve(name, known)}.")
    }
    assert hidden == {"run.config"}


def reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    """Returns the modules that imports lead to from a module, in one step or more."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in edges[todo.pop()] - seen:
            seen.add(name)
            todo.append(name)
    return seen


def test_the_library_does_not_know_its_models():
    for file in modules().values():
        names = [name for _, name in imports(file) if name.split(".")[0] == "shardlib_models"]
        assert not names, f"{file} imports {names}: models are found by entry point"


def test_models_use_what_stands_above_the_cost_model():
    known = modules()
    for file in sorted(MODELS.rglob("*.py")):
        for line, name in imports_of_model(file):
            imported = resolve(name, known)
            assert floor_of(imported) < FLOOR["cost"], f"{file.name}:{line} imports {imported}"


def imports_of_model(file: Path) -> list[tuple[int, str]]:
    """Imports of shardlib in a model's file; relative ones stay within the models."""
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return [(line, name) for line, name in found if name.split(".")[0] == "shardlib"]


def test_a_library_file_does_not_import_the_whole_package():
    for module, file in modules().items():
        if module != "__init__":
            whole = [line for line, name in imports(file) if name == "shardlib"]
            assert not whole, f"{file}:{whole}: import the module that holds the name"


def test_no_two_classes_share_a_name():
    names = collections.Counter(
        node.name
        for file in modules().values()
        for node in nodes(file)
        if isinstance(node, ast.ClassDef)
    )
    # A choice of rules and a choice of a plan are public names of their packages.
    assert {name for name, count in names.items() if count > 1} == {"Choice"}


def test_no_file_is_called_utils():
    names = {file.name for root in (PACKAGE, MODELS) for file in root.rglob("*.py")}
    assert not names & {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


def test_files_are_of_a_size_to_read():
    long = {
        f"{file.name}: {lines} lines"
        for root in (PACKAGE, MODELS)
        for file in root.rglob("*.py")
        if (lines := len(file.read_text().splitlines())) > 600
    }
    assert not long


def test_functions_are_of_a_size_to_read():
    long = {
        f"{file.name}: {node.name} has {lines} lines"
        for root in (PACKAGE, MODELS)
        for file in root.rglob("*.py")
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - node.lineno + 1) > 60
    }
    assert not long


def test_the_median_file_holds_one_idea():
    """One idea a file: neither many small files for one idea, nor files of several."""
    lines = [
        len(file.read_text().splitlines())
        for file in PACKAGE.rglob("*.py")
        if not file.name.startswith("__")
    ]
    assert 150 <= statistics.median(lines) <= 250


def test_nothing_asks_for_auto_once_a_config_is_resolved():
    """`run.resolve_auto` decides, and what it calls reads it; `check` takes devices before, and the
    compilation cache has its own place."""
    before = {"config", "resolve_auto", "plans.planning", "plans.finding", "reports.proving"}
    before.add("devices")
    asking = {
        module
        for module, file in modules().items()
        if module.split(".")[0] in ("run", "train", "data", "checkpoint", "log", "runtime")
        for node in nodes(file)
        if isinstance(node, ast.Compare)
        and any(ast.unparse(side) in ("AUTO", "'auto'") for side in (node.left, *node.comparators))
    }
    assert asking <= {"train.config", *(f"run.{name}" for name in before)}


def test_few_parameters_are_of_any_type():
    arguments = [
        argument
        for root in (PACKAGE, MODELS)
        for file in root.rglob("*.py")
        for node in nodes(file)
        if isinstance(node, ast.arguments)
        for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs)
        if argument.arg not in ("self", "cls") and argument.annotation is not None
    ]
    is_any = sum(ast.unparse(argument.annotation) == "Any" for argument in arguments)
    assert is_any <= 0.04 * len(arguments)


def test_every_module_is_in_the_table():
    assert set(FLOOR) == {module.split(".")[0] for module in modules()} - {"__init__", "__main__"}


def test_import_is_light():
    """No backend starts, and nothing heavy loads that jax, flax and optax have not loaded."""
    code = f"""
import sys
import flax, jax, optax
from flax import nnx
before = set(sys.modules)
import shardlib, shardlib.mesh, shardlib.run.config, shardlib.runtime.distributed
heavy = [name for name in {NOT_AT_IMPORT!r} if name in sys.modules and name not in before]
assert not heavy, heavy
# JAX refuses this once a backend is up.
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
