"""Notices that a machine is going away, other than by a signal: asked for in threads.

Signals need nothing from here: `StopRequest` takes SIGTERM (Kubernetes, Slurm's `scancel` and its
end of time), SIGINT, and SIGUSR1, which Slurm sends ahead of time when told to: with
`#SBATCH --signal=USR1@90` to what `srun` has started, 90 seconds before the limit; with
`--signal=B:USR1@90` to the batch script, which passes it on if it is `exec shardlib launch ...`.

Ray tells its workers of a node to be drained by `ray.train.get_preemption_info()` (alpha). It may
wait until all workers have asked, so it is not asked in a thread here but by the worker's own loop:
by `shardlib.run.train(config, after_step=...)`, whose function returns "preemption of a Ray node"
when Ray has said so, or by `StopRequest.request` in a loop of one's own. A worker that returns has
finished for Ray Train: to be started again after such a stop it must raise.
"""

import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping

Notice = Callable[[], str | None]
"""Returns why this machine is going away, as in "preemption of this machine", or None if it is not.
May wait for news, in a thread of its own."""

# Written by the firmware; what Google's own libraries go by.
_PRODUCT = pathlib.Path("/sys/class/dmi/id/product_name")
_HOST = "metadata.google.internal"


def notices() -> list[Notice]:
    """Returns the notices that this machine offers; none of them speaks to a network elsewhere than
    on a machine of Google's."""
    host = google_metadata_host(os.environ)
    return [] if host is None else google_notices(host)


def google_metadata_host(
    environment: Mapping[str, str], product: pathlib.Path = _PRODUCT
) -> str | None:
    """Returns where to ask for this machine's metadata, or None where it is not Google's.

    The variables are those of Google's libraries: GCE_METADATA_HOST (host, or host:port) and
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

    A machine that is only to move while it runs (MIGRATE_ON_HOST_MAINTENANCE) does not go away.
    Google says it 30 s before a preemption, and a minute (with GPUs, an hour) before maintenance.
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
    """One value of the metadata server, which answers when it changes.

    Args:
        host: Host, or host:port.
        key: Name under `instance/`.
        reasons: What values mean that the machine goes away, and in which words.
        wait_seconds: How long the server holds an answer back while nothing changes.
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
        if self._etag is not None:  # The first question is answered at once.
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
                raise OSError("the answer is not from a metadata server of Google's")
            self._etag = answer.headers.get("ETag")
            return self._reasons.get(answer.read(1000).decode().strip())

    def __str__(self) -> str:
        return self._url


class NoticeWatch:
    """Threads that ask for notices, until one of them has news.

    Args:
        notices: What to ask, each in a thread of its own.
        tell: Called with the reason, from such a thread.
        poll_seconds: Time between two questions.
    """

    def __init__(
        self, notices: Iterable[Notice], tell: Callable[[str], None], poll_seconds: float = 1.0
    ):
        self._tell, self._poll_seconds = tell, poll_seconds
        self._over = threading.Event()
        for notice in notices:
            threading.Thread(
                target=self._ask, args=(notice,), name="shardlib-notice", daemon=True
            ).start()

    def end(self) -> None:
        """Asks no more. A thread that waits for an answer is left behind, and tells nothing."""
        self._over.set()

    def _ask(self, notice: Notice) -> None:
        has_failed = False
        while not self._over.is_set():
            try:
                reason = notice()
            except Exception as error:
                # Training needs no notices: it goes on without, and says so.
                if not has_failed:
                    has_failed = True
                    said = f"notices cannot be read from {notice} ({error}); asking on"
                    os.write(2, f"\n{said}\n".encode())
                reason = None
            if reason and not self._over.is_set():
                self._tell(reason)
                return
            self._over.wait(self._poll_seconds)
