"""Notices by a real server on loopback, which behaves as Google documents its metadata server."""

import http.server
import itertools
import os
import signal
import threading
import time
import urllib.parse

import pytest

from shardlib.runtime import preemption
from shardlib.runtime.preemption import NoticeWatch, google_metadata_host, google_notices
from shardlib.runtime.stopping import StopRequest

PREEMPTED, MAINTENANCE = "preempted", "maintenance-event"


class MetadataServer(http.server.ThreadingHTTPServer):
    """Values under `instance/`, each with an ETag; holds answers back until a value changes."""

    daemon_threads = True

    def __init__(self, flavor="Google"):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.flavor = flavor
        self.values = {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}
        self.changed = threading.Condition()
        self.queries = []
        self.host = f"127.0.0.1:{self.server_address[1]}"

    def change(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()


class _Answer(http.server.BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        key = url.path.removeprefix("/computeMetadata/v1/instance/")
        query = dict(urllib.parse.parse_qsl(url.query))
        server = self.server
        server.queries.append((key, query))
        if self.headers["Metadata-Flavor"] != "Google" or key not in server.values:
            self.send_error(403 if key in server.values else 404)
            return
        with server.changed:
            if query.get("wait_for_change") == "true":
                server.changed.wait_for(
                    lambda: server.values[key] != query["last_etag"], float(query["timeout_sec"])
                )
            value = server.values[key]
        self.send_response(200)
        self.send_header("Metadata-Flavor", server.flavor)
        self.send_header("ETag", value)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, format, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def serve(**options):
        servers.append(MetadataServer(**options))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("key", "harmless", "value", "reason"),
    [
        (PREEMPTED, "FALSE ", "TRUE", "preemption of this machine"),
        (
            MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE",
            "maintenance of this machine",
        ),
    ],
)  # fmt: skip
def test_google_says_that_a_machine_goes_away(
    serve, monkeypatch, capfd, key, harmless, value, reason
):
    server = serve()
    monkeypatch.setenv("GCE_METADATA_HOST", server.host)
    # A proxy is none of the metadata server's: with it nothing would be reached.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with StopRequest() as stop:
        until(lambda: len(server.queries) >= 4)
        server.change(key, harmless)
        until(lambda: len(server.queries) >= 5)
        assert not stop.agreed(0)
        asked = time.monotonic()
        server.change(key, value)
        until(lambda: stop.requested)
        assert time.monotonic() - asked < 5
        assert stop.agreed(1)
        assert stop.reason == reason
    assert capfd.readouterr().err == f"\n{reason}: stopping after this step.\n"
    # At once the first time, then held back until something changes.
    first, later = ([query for name, query in server.queries if name == key][i] for i in (0, 1))
    assert first == {}
    was = "FALSE" if key == PREEMPTED else "NONE"
    assert later == {"wait_for_change": "true", "last_etag": was, "timeout_sec": "30"}


def test_a_server_that_fails_is_asked_again(serve, capfd):
    server = serve()
    values = server.values
    server.values = {}
    asking = google_notices(server.host)[:1]
    told = []
    watch = NoticeWatch(asking, told.append, poll_seconds=0.02)
    until(lambda: len(server.queries) >= 3)
    server.values = values
    server.change(PREEMPTED, "TRUE")
    until(lambda: told)
    assert told == ["preemption of this machine"]
    watch.end()
    url = f"http://{server.host}/computeMetadata/v1/instance/preempted"
    assert capfd.readouterr().err == (
        f"\nnotices cannot be read from {url} (HTTP Error 404: Not Found); trying again\n"
    )


def test_an_answer_that_is_not_googles_says_nothing(serve):
    server = serve(flavor="Else")
    server.change(PREEMPTED, "TRUE")
    with pytest.raises(OSError, match=r"^the answer is not from a Google metadata server$"):
        google_notices(server.host)[0]()


def test_only_a_machine_of_googles_is_asked(tmp_path, monkeypatch):
    product = tmp_path / "product_name"
    assert google_metadata_host({}, product) is None
    product.write_text("Standard PC (i440FX + PIIX, 1996)\n")
    assert google_metadata_host({}, product) is None
    product.write_text("Google Compute Engine\n")
    assert google_metadata_host({}, product) == "metadata.google.internal"
    assert google_metadata_host({"NO_GCE_CHECK": "True"}, product) is None
    given = {"GCE_METADATA_HOST": "10.0.0.1:80"}
    assert google_metadata_host(given, tmp_path / "none") == "10.0.0.1:80"
    assert google_metadata_host(given | {"NO_GCE_CHECK": "true"}, product) is None
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    assert preemption.notices() == []


@pytest.mark.mesh
def test_a_notice_of_ones_own():
    answers = itertools.chain([None, None], itertools.repeat("a power cut"))
    with StopRequest(notices=[lambda: next(answers)]) as stop:
        until(lambda: stop.requested)
        assert stop.reason == "a power cut"


def test_nobody_asks_after_the_end():
    asked = []
    release = threading.Event()

    def wait():
        asked.append(None)
        release.wait(20)
        return "too late"

    with StopRequest(notices=[wait]) as stop:
        until(lambda: asked)
    release.set()
    time.sleep(0.1)
    assert (len(asked), stop.requested, stop.reason) == (1, False, None)


def test_the_first_reason_stays(capfd):
    with StopRequest(notices=[]) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        stop.request("something else")
        assert stop.reason == "SIGUSR1"
    assert capfd.readouterr().err == "\nSIGUSR1: stopping after this step.\n"
