"""The directory of a run and its layout."""

import os
import pathlib
import re
import tempfile
import uuid

from shardlib.config import load, to_yaml
from shardlib.data import Tokenizer, read_tokenizer
from shardlib.errors import ConfigError
from shardlib.run.config import RunConfig


class RunDirectory:
    """A directory that holds one run.

    On disk:

        run_id           identity of the run: 32 hex digits, made with the first config and kept
        run.lock         the process that is using the directory, if any: see `shardlib.run.lock`
        config.yaml      the resolved config
        tokenizer.json   the tokenizer, if the data is text
        metrics.jsonl    one object per step: see `shardlib.log.metrics`
        events.jsonl     one object per event of the run, from `start` to `end`
        tensorboard/     event files, if enabled
        wandb/           files of Weights & Biases, if enabled
        checkpoints/     one directory per step
        stacks-process<i>.txt  stacks of process i when the watchdog last found it hung

    An event has the keys `time` (ISO 8601, UTC), `kind` (such as `start`, `saved`, `rewind`, `end`)
    and `step`, the last finished step. It may have `text`, as shown on the terminal, `facts`, an
    object, and `spent`, the account of the run's time so far, as in the rows of metrics.jsonl.
    Non-finite numbers are written as they are there. A `saved` event names the step of a checkpoint
    that is complete in `checkpoints/`. Each attempt has a `start`, and an `end` unless its process
    was killed (`hung` if the watchdog ended the first process). The facts of an `end` are `how`, in
    words; `error` and `message`, if there was one; and `finished`, true once the run has taken all
    of its steps. Events of attempts whose steps are lost stay.
    `shardlib.log.events.read_events` reads them.

    Args:
        path: The directory, which need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self.identity_file = self.path / "run_id"
        self.config_file = self.path / "config.yaml"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.checkpoints = self.path / "checkpoints"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> str | None:
        """The unique id of the run; None if the file is missing or invalid."""
        try:
            text = self.identity_file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return text.decode().strip() if re.fullmatch(rb"[0-9a-f]{32}\n?", text) else None

    def check_writable(self) -> None:
        """Checks that the run can be written, and leaves nothing behind.

        Raises:
            ConfigError: If the directory cannot be made, or no file can be written there.
        """
        if "://" in str(self.path) or re.match(r"[a-z0-9]{2,}:/", str(self.path)):
            raise ConfigError(
                f"run_dir {self} is not on a file system.\n"
                "  Set run_dir to a directory, such as one where the remote storage is mounted."
            )
        # `os.path.exists` is False for a path without read access: its parent is tried then.
        existing = next(p for p in (self.path, *self.path.absolute().parents) if os.path.exists(p))
        if not existing.is_dir():
            raise ConfigError(
                f"run_dir {self} cannot be made: {existing} is a file.\n"
                "  Set run_dir to a directory."
            )
        try:
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            raise ConfigError(
                f"run_dir {self} cannot be written: {error.strerror}.\n"
                "  Set run_dir to a directory that this user may write."
            ) from None

    def read_config(self) -> RunConfig | None:
        """Returns the config of the run in the directory, or None without a run.

        Raises:
            ConfigError: If the file is damaged.
        """
        return load(RunConfig, self.config_file) if self.config_file.is_file() else None

    def check_exists(self) -> None:
        """Raises `ConfigError` if there is no directory."""
        if not self.path.is_dir():
            raise ConfigError(
                f"no such directory: {self}.\n  Pass a run directory created by `shardlib train`."
            )

    def config_of_run(self) -> RunConfig:
        """Returns the config of the run that the directory must hold.

        Raises:
            ConfigError: If the directory is missing or holds no run, or the file is damaged.
        """
        self.check_exists()
        config = self.read_config()
        if config is None:
            raise ConfigError(
                f"{self} does not hold a run: {self.config_file.name} is missing.\n"
                "  Pass a run directory created by `shardlib train`."
            )
        return config

    def read_tokenizer(self, config: RunConfig) -> Tokenizer | None:
        """Returns the tokenizer of the run, or None for data other than text.

        Raises:
            DataError: If the file is damaged.
        """
        if not self.tokenizer_file.is_file():
            return None
        return read_tokenizer(self.tokenizer_file, getattr(config.data, "end_of_text", None))

    def write(self, config: RunConfig, tokenizer: Tokenizer | None) -> None:
        """Makes the directory and writes the config, the tokenizer and, if absent, the run id."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.identity is None:  # Before the config, whose presence makes the directory a run.
            _replace(self.identity_file, f"{uuid.uuid4().hex}\n")
        _replace(self.config_file, to_yaml(config))
        if tokenizer is not None:
            _replace(self.tokenizer_file, tokenizer.to_json())


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically: readers and killed runs see all of it or nothing."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
