"""Errors a user can act on: each names the offending thing, what was expected, and one fix."""

import difflib
import importlib
import re
from collections.abc import Iterable
from types import ModuleType

# What stands before the host of a URL, however many slashes a path of it has kept, and what its
# query says to prove who asks: the signatures of object stores, tokens of hubs.
_CREDENTIALS = re.compile(
    r"(?P<before>\w:/{1,2})[^/\s'\"]+(?P<after>@)"
    r"|(?P<name>[?&][\w.-]*(?:token|key|secret|password|sig|signature)[\w.-]*=)[^&\s'\"]+",
    re.IGNORECASE,
)


class ShardlibError(Exception):
    """Base of every error that shardlib raises on purpose; credentials in URLs are not shown."""

    def __str__(self) -> str:
        return without_credentials(super().__str__())


def without_credentials(text: str) -> str:
    """Returns a text with the user, the password and the tokens of its URLs as `***`."""
    return _CREDENTIALS.sub(
        lambda found: f"{found['before'] or found['name']}***{found['after'] or ''}", text
    )


class MeshError(ShardlibError):
    """A mesh cannot be built, or does not fit the devices or the batch."""


class RuleError(ShardlibError):
    """Sharding rules cannot be applied to a tensor, or name what does not exist."""


class ConfigError(ShardlibError):
    """A configuration is wrong; the message lists every fault with file and line."""


class DataError(ShardlibError):
    """Data is missing, empty or malformed."""


class ModelError(ShardlibError):
    """A model is unknown, or cannot be built or applied as asked."""


class PartitionError(ShardlibError):
    """A function holds an operation that shardlib cannot partition."""


class CheckpointError(ShardlibError):
    """A checkpoint is missing, belongs to something else, or cannot be restored as asked."""


class SaveFailedError(CheckpointError):
    """A checkpoint could not be written: the same may work later."""


class RunDirError(ShardlibError):
    """Another run holds the directory, or it cannot be written now: the same may work later."""


class DistributedError(ShardlibError):
    """A group of processes could not start, agree or finish."""


class PeerLostError(DistributedError):
    """Another process of the group has gone, or does not answer: the same may work another time."""


class DivergedError(ShardlibError):
    """Training went wrong for too long: values that are not finite, or spikes.

    `step` is the step at which that was decided.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class DoesNotFitError(ShardlibError):
    """A step needs more memory than its devices have, so much more that it cannot be compiled.

    `needed_bytes` is what it needs on one device, by the message of the compiler.
    """

    def __init__(self, message: str, needed_bytes: int):
        super().__init__(message)
        self.needed_bytes = needed_bytes


class MissingExtraError(ShardlibError, ImportError):
    """An optional dependency is absent; the message names the extra that brings it."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the candidate nearest to `name`, or `""`."""
    near = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional dependency.

    Args:
        module: Dotted module name, for example `"transformers"`.
        extra: The extra of shardlib that installs it, for example `"hf"`.
        purpose: What needs it, as a noun phrase that starts the message.

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
