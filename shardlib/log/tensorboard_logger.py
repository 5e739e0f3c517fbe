"""TensorBoard event files, written immediately in the calling thread.

tensorboardX provides the protocol buffers and checksums. Its own writer passes events to a thread.
A full disk ends that thread, and the training loop then waits for it forever.
"""

import importlib
import socket
import struct
import time
from collections.abc import Mapping

from shardlib.errors import require
from shardlib.log.durable_log import AppendFile
from shardlib.log.loggers import RunInfo

EVENTS_DIRECTORY = "tensorboard"


class TensorBoardLogger:
    """A metrics logger that writes event files to `tensorboard/` in the directory of the run.

    Raises:
        MissingExtraError: If tensorboardX is not installed.
    """

    def __init__(self) -> None:
        require("tensorboardX", "tensorboard", "TensorBoardLogger")
        self._proto = importlib.import_module("tensorboardX.proto.event_pb2")
        self._checksum = importlib.import_module("tensorboardX.record_writer").masked_crc32c

    def start(self, run: RunInfo) -> None:
        """Begins an event file, which hides the events of later steps in earlier files."""
        self._directory, self._warn = run.run_dir / EVENTS_DIRECTORY, run.warn
        self._directory.mkdir(exist_ok=True)
        self._begin(run.step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the scalars of a step."""
        summary = self._proto.Event().summary
        for name, value in metrics.items():
            summary.value.add(tag=name, simple_value=value)
        self._write(step=step, summary=summary)

    def rewind(self, step: int) -> None:
        """Begins an event file, which hides the events after `step`."""
        self._file.close()
        self._begin(step)

    def close(self, failed: bool) -> None:
        """Closes the file."""
        self._file.close()

    def _begin(self, step: int) -> None:
        """Opens a new file, for which TensorBoard hides later events of earlier files."""
        # TensorBoard reads files in name order, and two files may start within one second.
        number = len(list(self._directory.iterdir()))
        name = f"events.out.tfevents.{int(time.time()):010d}.{number:06d}.{socket.gethostname()}"
        self._file = AppendFile(self._directory / name, warn=self._warn)
        self._write(file_version="brain.Event:2")
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._write(step=step + 1, session_log=start)

    def _write(self, **entries: object) -> None:
        """Appends an event as a record: length, checksum of the length, data, checksum of the data.

        Source: TFRecords format details, https://www.tensorflow.org/tutorials/load_data/tfrecord.
        """
        data = self._proto.Event(wall_time=time.time(), **entries).SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = (struct.pack("<I", self._checksum(part)) for part in (length, data))
        self._file.write(b"".join((length, next(sums), data, next(sums))))
