"""Preemption notices other than signals, polled in threads.

Signals do not need this module: `StopRequest` handles SIGTERM (Kubernetes, Slurm's `scancel` and
time limit), SIGINT, and SIGUSR1, Slurm's optional early warning. With `#SBATCH --signal=USR1@90`
Slurm sends SIGUSR1 to the processes of `srun` 90 seconds before the limit. With
`--signal=B:USR1@90` it goes to the batch script, which passes it on if it is
`exec shardlib launch ...`.

Ray reports a node that will be drained through `ray.train.get_preemption_info()` (alpha). This call
may block until all workers have made it, so the worker's own loop must make it, not a thread here:
either in the `after_step` of `shardlib.run.train(config, after_step=...)`, which then returns
"preemption of a Ray node", or in a custom loop with `StopRequest.request`. Ray Train treats a
worker that returns as finished: to be restarted after such a stop it must raise.
"""

import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping

Notice = Callable[[], str | None]
"""Callable that returns why this machine is going away, such as "preemption of this machine", or
None if it is not. It runs in a separate thread and may block until there is news."""

# Written by the firmware; Google's own libraries check it too.
_PRODUCT = pathlib.Path("/sys/class/dmi/id/product_name")
_HOST = "metadata.google.internal"


def notices() -> list[Notice]:
    """Returns the notices that this machine offers; only Google machines cause network access."""
    host = google_metadata_host(os.environ)
    return [] if host is None else google_notices(host)


def google_metadata_host(
    environment: Mapping[str, str], product: pathlib.Path = _PRODUCT
) -> str | None:
    """Returns the address of this machine's metadata server, or None outside of Google Cloud.

    It reads the same variables as Google's libraries: GCE_METADATA_HOST (host, or host:port) and
    NO_GCE_CHECK.
    """
    if environment.get("NO_GCE_CHECK", "").lower() == "true":
        return None
    if host := environment.get("GCE_METADATA_HOST"):
        return host
    try:
        return _HOST if product.read_text().startswith("Google") else None
    except OSError:
        return None


def google_notices(host: str) -> list[Notice]:
    """Returns the notices of a Compute Engine machine or TPU VM.

    A live migration (MIGRATE_ON_HOST_MAINTENANCE) does not count as going away. Google gives notice
    30 s before a preemption, and a minute (with GPUs, an hour) before maintenance.
    Source: Compute Engine documentation, "Preemptible VM instances" and "Query metadata server for
    maintenance event notices".
    """
    return [
        GoogleNotice(host, "preempted", {"TRUE": "preemption of this machine"}),
        GoogleNotice(
            host,
            "maintenance-event",
            {"TERMINATE_ON_HOST_MAINTENANCE": "maintenance of this machine"},
        ),
    ]


class GoogleNotice:
    """One value of the metadata server, which answers when the value changes.

    Args:
        host: Host, or host:port.
        key: Name under `instance/`.
        reasons: Values that mean that the machine goes away, with the reason in words.
        wait_seconds: Time after which the server answers without a change.
    """

    def __init__(self, host: str, key: str, reasons: Mapping[str, str], wait_seconds: int = 30):
        self._url = f"http://{host}/computeMetadata/v1/instance/{key}"
        self._reasons = reasons
        self._wait_seconds = wait_seconds
        self._etag: str | None = None
        import urllib.request  # Slow to import, and needed on few machines.

        # The metadata server is never behind a proxy.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def __call__(self) -> str | None:
        import urllib.parse
        import urllib.request

        query: dict[str, str | int] = {}
        if self._etag is not None:  # The first request is answered at once.
            query = {
                "wait_for_change": "true",
                "last_etag": self._etag,
                "timeout_sec": self._wait_seconds,
            }
        request = urllib.request.Request(
            f"{self._url}?{urllib.parse.urlencode(query)}", headers={"Metadata-Flavor": "Google"}
        )
        with self._open(request, timeout=self._wait_seconds + 10) as answer:
            if answer.headers.get("Metadata-Flavor") != "Google":
                raise OSError("the answer is not from a Google metadata server")
            self._etag = answer.headers.get("ETag")
            return self._reasons.get(answer.read(1000).decode().strip())

    def __str__(self) -> str:
        return self._url


class NoticeWatch:
    """Threads that poll for notices, until one of them has news. Each notice is polled in a thread
    of its own, which calls `tell` with the reason."""

    def __init__(
        self, notices: Iterable[Notice], tell: Callable[[str], None], poll_seconds: float = 1.0
    ):
        self._tell, self._poll_seconds = tell, poll_seconds
        self._over = threading.Event()
        for notice in notices:
            threading.Thread(
                target=self._poll, args=(notice,), name="shardlib-notice", daemon=True
            ).start()

    def end(self) -> None:
        """Stops polling. A thread that waits for an answer is left behind, and reports nothing."""
        self._over.set()

    def _poll(self, notice: Notice) -> None:
        has_failed = False
        while not self._over.is_set():
            try:
                reason = notice()
            except Exception as error:
                # Training continues without notices, and reports that once.
                if not has_failed:
                    has_failed = True
                    message = f"notices cannot be read from {notice} ({error}); trying again"
                    os.write(2, f"\n{message}\n".encode())
                reason = None
            if reason and not self._over.is_set():
                self._tell(reason)
                return
            self._over.wait(self._poll_seconds)
