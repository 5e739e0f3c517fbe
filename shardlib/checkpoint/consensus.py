"""Agreement of processes on file operations: a failure on one process is raised on all.

It uses the key-value store of JAX's coordination service, which lives on the hosts. No device is
involved, so background threads can agree while the devices train. Each process sends one text, the
first process decides from all of them, and every process gets the decision. A failed process sends
its error, so that nobody waits for it. A dead process ends the others through the coordination
service. A hung process is left to the watchdog: waiting here has no time limit.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import jax

from shardlib.checkpoint.errors import DamageError, first_line
from shardlib.errors import CheckpointError
from shardlib.runtime.stopping import coordination_client

T = TypeVar("T")

_MILLISECONDS = 7 * 24 * 3600 * 1000
_instances = itertools.count()


class Peers:
    """The processes of a run, as seen by one of them.

    All processes must make the first decision of their instances in the same order. An instance
    that never decides may exist on some processes only. All processes must run the rounds of each
    name in the same order; rounds of different names may run in different threads.
    """

    def __init__(self) -> None:
        self._prefix: str | None = None
        self._rounds: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Number of processes; 1 without `jax.distributed`, without starting a backend."""
        return jax.process_count() if jax.distributed.is_initialized() else 1

    @property
    def is_first(self) -> bool:
        """Whether this process does the work that is done once."""
        return self.count == 1 or jax.process_index() == 0

    def decide(self, name: str, mine: str, decide: Callable[[list[str]], str]) -> str:
        """Returns, on every process, the result of `decide` on the texts of all processes in order.

        Only the first process runs `decide`. An error in it is raised on all processes.

        Raises:
            CheckpointError: If `decide` raised an error, or the coordinator is gone.
        """
        if self.count == 1:
            return decide([mine])
        try:
            outcome = self._exchange(name, mine, decide)
        except jax.errors.JaxRuntimeError as error:
            raise CheckpointError(
                f"the processes could not agree on a checkpoint: {first_line(error)}\n"
                "  The coordinator (process 0) has gone; start all processes again."
            ) from error
        return _opened(outcome)

    def all_or_none(self, name: str, work: Callable[[], T]) -> T:
        """Returns the result of `work` if it succeeds on every process.

        Raises:
            CheckpointError: If `work` failed on a process; all processes raise the first failure.
        """
        try:
            result, mine = work(), ""
        except Exception as error:
            if self.count == 1:
                raise
            result, mine = None, _sealed_error(error)
        self.decide(name, mine, _first_failure)
        return result  # type: ignore[return-value]

    def _exchange(self, name: str, mine: str, decide: Callable[[list[str]], str]) -> str:
        client, index = coordination_client(), jax.process_index()
        if self._prefix is None:
            self._prefix = f"shardlib/checkpoint/{next(_instances)}"
        self._rounds[name] += 1
        place = f"{self._prefix}/{name}/{self._rounds[name]}"
        if index:
            client.key_value_set(f"{place}/{index}", mine)
            return client.blocking_key_value_get(f"{place}/decision", _MILLISECONDS)
        texts = [mine] + [
            client.blocking_key_value_get(f"{place}/{other}", _MILLISECONDS)
            for other in range(1, self.count)
        ]
        try:
            outcome = json.dumps({"decision": decide(texts)})
        except Exception as error:
            outcome = _sealed_error(error)
        client.key_value_set(f"{place}/decision", outcome)
        # All processes have reached this round, so they have read the previous decision.
        client.key_value_delete(f"{self._prefix}/{name}/{self._rounds[name] - 1}/")
        return outcome


def one_step(texts: list[str]) -> str:
    """Returns the common step of all processes, as a decision.

    Raises:
        CheckpointError: If the steps differ: the checkpoint would mix several steps.
    """
    givers = {text: [i for i, other in enumerate(texts) if other == text] for text in texts}
    if len(givers) > 1:
        raise CheckpointError(
            "the processes save different steps:\n"
            + "".join(
                f"  step {step}: {len(them)} of {len(texts)}, such as process {them[0]}\n"
                for step, them in sorted(givers.items(), key=lambda each: int(each[0]))
            )
            + "  Call save on every process after the same step."
        )
    return texts[0]


def one_checkpoint(texts: list[str]) -> str:
    """Returns an empty decision if every process gave the same step and identity.

    Raises:
        CheckpointError: If they differ: the restored state would mix several checkpoints.
    """
    if len(set(texts)) > 1:
        steps = [text.split()[0] for text in texts]
        seen = ", ".join(f"process {i}: step {step}" for i, step in enumerate(steps))
        raise CheckpointError(
            f"the processes would restore different checkpoints ({seen}).\n"
            "  Ask for the same step on every process, of a directory that all of them share."
        )
    return ""


def _sealed_error(error: Exception) -> str:
    text = str(error) if isinstance(error, CheckpointError) else first_line(error)
    where = "" if isinstance(error, CheckpointError) else f"process {jax.process_index()}: "
    return json.dumps({"damage": isinstance(error, DamageError), "error": where + text})


def _opened(outcome: str) -> str:
    content = json.loads(outcome)
    if "error" in content:
        raise (DamageError if content["damage"] else CheckpointError)(content["error"])
    return content["decision"]


def _first_failure(texts: list[str]) -> str:
    for text in texts:
        if text:
            _opened(text)
    return ""
