"""Objects of one's own that a config names by import path, such as `mypackage.mine:FAMILY`."""

import importlib
import importlib.util
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from shardlib.errors import ConfigError, did_you_mean

PATTERN = r"^[\w.]+:\w+$"
"""Form of an import path."""


def is_import_path(value: object) -> bool:
    """Whether a value of a config is meant as an import path; it may be malformed."""
    return isinstance(value, str) and ":" in value


def imported(path: str, expected: str, accepts: Callable[[Any], bool]) -> Any:
    """Returns the object that an import path `module:name` names, of a kind that is `expected`
    (with its article, for the message). The module is imported once per process.

    Raises:
        ConfigError: If the path is malformed, its module is missing or cannot be imported, or its
            name is missing there or belongs to an object of another kind.
    """
    if not re.match(PATTERN, path):
        raise ConfigError(
            f"{path!r} is not an import path.\n  Write module:name, as in mypackage.mine:FAMILY."
        )
    module_name, _, name = path.partition(":")
    module = _module(module_name)
    if not hasattr(module, name):
        near = did_you_mean(name, vars(module))
        raise ConfigError(
            f"the module {module_name} has no {name!r}.{near}\n"
            f"  Name {expected}, defined in {module.__file__ or module_name}."
        )
    value = getattr(module, name)
    if not accepts(value):
        raise ConfigError(
            f"{path} is of type {type(value).__name__}, not {expected}.\n"
            f"  Name {expected} in its place."
        )
    return value


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"there is no module {missing!r}.{did_you_mean(missing, _siblings(missing))}\n"
                "  Install its package, or run the command in the directory that holds it."
            ) from None
        raise ConfigError(
            f"the module {name} cannot be imported: {type(error).__name__}: {error}{_at(error)}.\n"
            "  Repair the module."
        ) from error


def _siblings(name: str) -> Iterator[str]:
    """Yields the modules that stand where one was looked for: in its package, or in the current
    directory."""
    package = name.rpartition(".")[0]
    spec = importlib.util.find_spec(package) if package else None
    places = spec.submodule_search_locations or () if spec else ["."]
    for module in pkgutil.iter_modules(places, f"{package}." if package else ""):
        yield module.name


def _at(error: Exception) -> str:
    """Returns the line of a module that raised, unless the error names it itself."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    is_known = frames and not isinstance(error, SyntaxError)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if is_known else ""
