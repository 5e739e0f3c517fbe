"""Agreement of processes about files: what one of them cannot do, all of them learn.

It goes over the key-value store of JAX's coordination service, which lives on the hosts: no device
takes part, so that threads in the background may agree while the devices train. Each process says
one text, the first one decides from all of them, and every process gets its decision. A process
that failed says so instead of staying away; nobody waits for it. One that has died ends the others
through the coordination service, one that hangs is for the watchdog to end: waiting here has no
limit of its own.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import jax

from shardlib.checkpoint.damage import DamageError, first_line
from shardlib.errors import CheckpointError
from shardlib.stopping import coordination_client

T = TypeVar("T")

_MILLISECONDS = 7 * 24 * 3600 * 1000
_instances = itertools.count()


class Peers:
    """The processes of a run, as seen by one of them.

    Every process first decides something with its instances in the same order (one that never does
    may be there on some processes only), and takes part in the same rounds of each name in the same
    order; rounds of different names may run in different threads.
    """

    def __init__(self) -> None:
        self._prefix: str | None = None
        self._rounds: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Number of processes; 1 without a group, and then no backend is started for it."""
        return jax.process_count() if jax.distributed.is_initialized() else 1

    @property
    def is_first(self) -> bool:
        """Whether this process does what is done once."""
        return self.count == 1 or jax.process_index() == 0

    def decide(self, name: str, mine: str, decide: Callable[[list[str]], str]) -> str:
        """Returns, on every process, what `decide` makes of the texts of all, in order.

        Only the first process runs `decide`. What it raises is raised on all.

        Raises:
            CheckpointError: What `decide` raised, or that the coordinator has gone.
        """
        if self.count == 1:
            return decide([mine])
        try:
            outcome = self._exchange(name, mine, decide)
        except jax.errors.JaxRuntimeError as error:
            raise CheckpointError(
                f"the processes could not agree about a checkpoint: {first_line(error)}\n"
                "  The coordinator (process 0) has gone; start all processes again."
            ) from error
        return _opened(outcome)

    def all_or_none(self, name: str, work: Callable[[], T]) -> T:
        """Returns what `work` returns, if it does so on every process.

        Raises:
            CheckpointError: What `work` raised on the first process where it failed, on all.
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
        # All have read the decision of the round before: they have come to this one.
        client.key_value_delete(f"{self._prefix}/{name}/{self._rounds[name] - 1}/")
        return outcome


def one_step(texts: list[str]) -> str:
    """Returns the step that every process gave, as a decision.

    Raises:
        CheckpointError: If they gave different ones: what each wrote would be mixed.
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
    """Returns nothing, as a decision, where every process gave the same step and identity.

    Raises:
        CheckpointError: If they did not: parts of several states would make up one.
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
