"""Errors that users can act on: each names the cause, the expected value, and one fix."""

import difflib
import importlib
import os
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

# The user info before the host of a URL, with any number of slashes after the scheme, and the
# credentials in its query: signatures of object stores, tokens of hubs.
_CREDENTIALS = re.compile(
    r"(?P<before>\w:/{1,2})[^/\s'\"]+(?P<after>@)"
    r"|(?P<name>[?&][\w.-]*(?:token|key|secret|password|sig|signature)[\w.-]*=)[^&\s'\"]+",
    re.IGNORECASE,
)


class ShardlibError(Exception):
    """Base class of all deliberate shardlib errors; credentials in URLs are not shown."""

    def __str__(self) -> str:
        return without_credentials(super().__str__())


def without_credentials(text: str) -> str:
    """Returns a text with the user, the password and the tokens in its URLs as `***`."""
    return _CREDENTIALS.sub(
        lambda found: f"{found['before'] or found['name']}***{found['after'] or ''}", text
    )


class MeshError(ShardlibError):
    """A mesh cannot be built, or does not fit the devices or the batch."""


class RuleError(ShardlibError):
    """Sharding rules cannot be applied to a tensor, or contain unknown names."""


class ConfigError(ShardlibError):
    """A configuration is wrong; the message lists every fault with file and line."""


class DataError(ShardlibError):
    """Data is missing, empty or malformed."""


class ModelError(ShardlibError):
    """A model is unknown, or cannot be built or applied as requested."""


class PartitionError(ShardlibError):
    """A function holds an operation that shardlib cannot partition."""


class WrongProgramError(ShardlibError):
    """A compiled program computes different numbers than the traced one.

    `faults` holds one `Fault` for each wrong operation.
    """

    def __init__(self, message: str, faults: tuple[Any, ...] = ()):
        super().__init__(message)
        self.faults = faults


class CheckpointError(ShardlibError):
    """A checkpoint is missing, belongs to something else, or cannot be restored as requested."""


class WrongPlaceError(CheckpointError):
    """A named step has no checkpoint, or a named folder cannot take one; another must be named."""


class SaveFailedError(CheckpointError):
    """A checkpoint could not be written; a retry may succeed."""


class RunDirError(ShardlibError):
    """Another run holds the directory, or it cannot be written; a retry may succeed."""


class DistributedError(ShardlibError):
    """A group of processes could not start, agree or finish."""


class PeerLostError(DistributedError):
    """Another process of the group has gone or does not answer; a retry may succeed."""


class DivergedError(ShardlibError):
    """Training diverged for too long: values that are not finite, or spikes.

    `step` is the step at which training was stopped.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class DoesNotFitError(ShardlibError):
    """A step needs so much more memory than its devices have that it cannot be compiled.

    `needed_bytes` is the memory it needs on one device, according to the compiler's message.
    """

    def __init__(self, message: str, needed_bytes: int):
        super().__init__(message)
        self.needed_bytes = needed_bytes


class MissingExtraError(ShardlibError, ImportError):
    """An optional dependency is missing; the message names the extra that installs it."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the nearest candidate, or `""` if none is near.

    A candidate is near if it is spelt alike, or if the name is made of the first letters of its
    words, as `lr` is of `learning_rate`.
    """
    candidates = list(candidates)
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    near = near or [one for one in candidates if len(name) > 1 and name == _initials(one)]
    return f" Did you mean {near[0]!r}?" if near else ""


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def check_run(path: str | os.PathLike[str]) -> None:
    """Checks that a path may hold a run, before what takes seconds to import.

    Raises:
        ConfigError: If the path is not a directory.
    """
    if not os.path.isdir(path):
        what = f"{path} is a file" if os.path.exists(path) else f"no such directory: {path}"
        raise ConfigError(f"{what}.\n  Pass a run directory created by `shardlib train`.")


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional dependency.

    Args:
        module: Dotted module name, for example `"transformers"`.
        extra: The extra of shardlib that installs it, for example `"hf"`.
        purpose: The feature that needs it, as a noun phrase that starts the message.

    Raises:
        MissingExtraError: If the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{purpose} needs {module.split('.')[0]!r}, which is not installed: "
            f"pip install 'shardlib[{extra}]'"
        ) from None
