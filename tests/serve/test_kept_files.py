"""Files and batches of a server, as the official client uses them."""

import contextlib
import json
import resource
import time

import openai
import pytest
from byte_decoder import LONG, SPEAKER, Served, Slow, Small, client, new_engine, serving, wait_until

from shardlib.errors import ConfigError
from shardlib.serve import batch_jobs
from shardlib.serve.app import Service
from shardlib.serve.engine_thread import EngineThread
from shardlib.serve.file_store import FileStore

ROWS = [
    {
        "custom_id": f"r{n}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"number {n}", "max_tokens": 30, "ignore_eos": True},
    }
    for n in range(30)
]

BATCH = {
    "object": "batch",
    "endpoint": "/v1/completions",
    "input_file_id": "file-0",
    "completion_window": "24h",
}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@contextlib.contextmanager
def official(folder, engine=None):
    with contextlib.ExitStack() as stack:
        service, address = stack.enter_context(serving(engine, files=folder))
        options = {"base_url": f"{address}/v1", "api_key": "none", "max_retries": 0}
        yield stack.enter_context(openai.OpenAI(**options)), service, address


@contextlib.contextmanager
def full_disk():
    """No file of this process grows beyond 3,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def ended(one, batch):
    wait_until(
        lambda: one.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled")
    )
    return one.batches.retrieve(batch.id)


def batched(one, rows, endpoint="/v1/completions"):
    file = one.files.create(file=("in.jsonl", lines(rows)), purpose="batch")
    return one.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


@pytest.mark.process
def test_prompts_of_clients_take_the_slots_of_a_batch(tmp_path):
    """Rows of a batch that fill all slots count for nothing."""
    with contextlib.ExitStack() as open_:
        engine = Slow(Served(), slots=1, context=128, chunk=64)
        service, address = open_.enter_context(serving(engine, queue=1, files=tmp_path))
        http = open_.enter_context(client(address))
        one = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        row = ROWS[0] | {"body": ROWS[0]["body"] | {"max_tokens": 110}}
        batch = batched(one, [row])
        wait_until(lambda: service.thread.stats.answer_tokens > 3)
        asked = LONG | {"max_tokens": 20}
        streams = [
            open_.enter_context(http.stream("POST", "/v1/completions", json=asked)) for _ in "ab"
        ]
        assert [stream.status_code for stream in streams] == [200, 200]
        assert http.post("/v1/completions", json=asked).status_code == 429
        for stream in streams:
            assert stream.read().endswith(b"[DONE]\n\n")
        assert one.batches.retrieve(batch.id).status == "in_progress"
        assert ended(one, batch).status == "completed"
        assert service.thread.stats.num_preemptions == 1


def test_what_a_kill_has_left_is_removed_at_the_next_start(tmp_path):
    store = FileStore(tmp_path)
    kept = store.new_id("file")
    batch = store.put(BATCH | {"id": store.new_id("batch"), "created_at": 1, "status": "completed"})
    contents = [kept, batch["id"].replace("batch", "file"), store.new_id("file")]
    for identity in contents:
        store.content(identity).write_text("{}")
    store.add_file("a.jsonl", "batch", kept)
    (tmp_path / f"{store.new_id('batch')}.part").write_text("{")
    store.remove_remains()
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{kept}.json",
        f"{batch['id']}.json",
        *(store.content(identity).name for identity in contents[:2]),
    }


@pytest.mark.process
def test_rows_of_a_batch_are_written_as_they_are_complete(tmp_path, monkeypatch):
    """Also if answers are so short that no request ever waits for a slot."""
    monkeypatch.setattr(batch_jobs, "_REPORT_SECONDS", 0.0)
    bad = ROWS[0] | {"custom_id": "bad", "body": {"temprature": 1}}
    short = {"prompt": "a", "max_tokens": 1}
    rows = [bad, *(ROWS[0] | {"custom_id": f"s{n}", "body": short} for n in range(200))]
    with official(tmp_path, Slow(Served(), slots=4, context=128)) as (one, service, _):
        start = service.thread.stats.num_steps
        batch = batched(one, rows)
        content, most = tmp_path / f"{batch.id.replace('batch', 'file')}.content", 0

        def is_written():
            nonlocal most
            stats = service.thread.stats
            most = max(most, stats.num_waiting + stats.num_running)
            return content.exists() and content.read_bytes().count(b"\n") > 20

        wait_until(is_written)
        answered = service.thread.stats.answer_tokens
        counts = one.batches.retrieve(batch.id).request_counts
        assert answered < 100
        assert most <= 12, "4 slots, and 8 requests ahead"
        assert (counts.total, counts.failed) == (201, 1)
        assert 15 < counts.completed < 150
        ended_counts = ended(one, batch).request_counts
        assert (ended_counts.completed, ended_counts.failed) == (200, 1)
        assert service.thread.stats.num_steps - start < 150, "several slots are used"


@pytest.mark.process
def test_a_row_that_the_queue_refuses_is_refused_alone(tmp_path):
    large = ROWS[0] | {"custom_id": "large", "body": {"prompt": ["a", "a" * 100], "n": 2}}
    with official(tmp_path, Small(Served(), slots=4, context=128)) as (one, service, _):
        found = ended(one, batched(one, [large, *ROWS[:2]]))
        assert (found.status, found.request_counts.failed) == ("completed", 1)
        answered = map(json.loads, one.files.content(found.output_file_id).text.splitlines())
        said = {row["custom_id"]: row["response"]["body"] for row in answered}
        assert "pages" in said["large"]["error"]["message"]
        assert service.thread.stats.pages_used == 0


@pytest.mark.process
def test_one_server_uses_a_folder(tmp_path):
    with serving(files=tmp_path):
        part = tmp_path / "file-1.part"
        part.write_text("of an upload")
        thread = EngineThread(new_engine(), most_waiting=1)
        jobs = batch_jobs.BatchJobs(FileStore(tmp_path), thread, SPEAKER)
        other = Service(thread, SPEAKER, jobs=jobs)
        with pytest.raises(ConfigError) as refused:
            other.start()
        assert str(refused.value).startswith(f"another server uses the folder {tmp_path}: process ")
        assert "\n  End it" in str(refused.value)
        assert part.exists()
        other.stop()
        with pytest.raises(ConfigError, match="another server"):
            FileStore(tmp_path).hold()
    store = FileStore(tmp_path)
    store.hold()
    store.hold()
    store.release()


@pytest.mark.process
def test_a_batch_goes_on_after_a_restart(tmp_path):
    bad = ROWS[0] | {"custom_id": "bad", "body": {"temprature": 1}}
    with official(tmp_path) as (one, service, _):
        batch = batched(one, [bad, *ROWS])
        wait_until(lambda: service.thread.stats.answer_tokens > 100)
        # A client that asks now is answered before the rows that wait.
        assert one.completions.create(model="tiny", prompt="now", max_tokens=2).usage
        assert one.batches.retrieve(batch.id).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="a batch reads"):
            one.files.delete(batch.input_file_id)
    content = tmp_path / f"{batch.id.replace('batch', 'file')}.content"
    before = content.read_bytes()
    with official(tmp_path) as (one, service, _):
        found = ended(one, batch)
        assert found.status == "completed"
        counts = found.request_counts
        assert (counts.total, counts.completed, counts.failed) == (31, 30, 1)
        written = one.files.content(found.output_file_id).content
        assert written.startswith(before[: before.rfind(b"\n") + 1])
        answered = [json.loads(line) for line in written.splitlines()]
        assert {row["custom_id"] for row in answered} == {"bad", *(r["custom_id"] for r in ROWS)}
        assert len(answered) == 31
        assert [one.id for one in one.batches.list()] == [batch.id]
        assert service.thread.stats.pages_used == 0
        one.files.delete(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            one.files.retrieve(batch.input_file_id)
        assert [file.id for file in one.files.list()] == [found.output_file_id]


@pytest.mark.process
def test_batches_that_end_otherwise(tmp_path):
    with official(tmp_path) as (one, service, address):
        other = [*ROWS[:1], ROWS[1] | {"url": "/v1/chat/completions"}]
        failed = ended(one, batched(one, other))
        assert failed.status == "failed"
        assert "'r1' has the url" in failed.errors.data[0].message
        failed = ended(one, batched(one, ROWS[:1] * 2))
        message = failed.errors.data[0].message
        assert message.startswith(f"rows of {failed.input_file_id} share the custom_id")
        vector = {"custom_id": "v", "url": "/v1/embeddings", "body": {"input": "one"}}
        assert ended(one, batched(one, [vector], "/v1/embeddings")).status == "completed"
        batch = batched(one, ROWS)
        one.batches.cancel(batch.id)
        cancelled = ended(one, batch)
        assert cancelled.status == "cancelled"
        time.sleep(0.1)
        assert service.thread.stats.num_running == 0
        with client(address) as http:
            for body in ({"endpoint": "/v1/other"}, {"endpoint": {}}, {"input": 1}, []):
                assert http.post("/v1/batches", json=body).status_code == 400
            for path in ("files/file-1", "files/..%2fsecret/content", "batches/batch-1"):
                assert http.get(f"/v1/{path}").status_code == 404
            assert http.post("/v1/files", data={"purpose": "batch"}).status_code == 400


@pytest.mark.process
def test_a_batch_goes_on_once_a_full_disk_has_room(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(batch_jobs, "_RETRY_SECONDS", 0.2)
    with official(tmp_path) as (one, service, _):
        with full_disk():
            batch = batched(one, ROWS[:20])
            wait_until(lambda: caplog.text.count("goes on in") >= 2)
            assert one.batches.retrieve(batch.id).status == "in_progress"
        found = ended(one, batch)
        assert found.status == "completed"
        written = one.files.content(found.output_file_id).text
        answered = [json.loads(line) for line in written.splitlines()]
        assert len({row["custom_id"] for row in answered}) == len(answered) == 20
        assert service.thread.stats.pages_used == 0


@pytest.mark.process
def test_an_upload_that_fails_leaves_nothing(tmp_path):
    both = {"content-length": "5", "transfer-encoding": "chunked"}
    with official(tmp_path) as (_, _, address):
        with client(address) as http:
            assert http.post("/v1/files", headers=both, content=b"12345678").status_code == 411
        with full_disk(), client(address) as http:
            file = {"file": ("in.jsonl", lines(ROWS))}
            sent = http.post("/v1/files", files=file, data={"purpose": "batch"})
            assert sent.status_code == 500
        assert [path.name for path in tmp_path.iterdir()] == ["server.lock"]


def listed(pages):
    """Returns the ids of a list, which the client reads page by page, and the lengths of pages."""
    every = [[one.id for one in page.data] for page in pages.iter_pages()]
    return [one for page in every for one in page], [len(page) for page in every]


@pytest.mark.process
def test_lists_come_in_pages(tmp_path):
    store = FileStore(tmp_path)
    for n in range(23):
        time_and_state = {"created_at": n, "status": "completed"}
        store.put(BATCH | time_and_state | {"id": store.new_id("batch")})
    for n in range(5):
        content = store.new_id("file")
        store.content(content).write_text("{}")
        store.put(
            store.add_file("a", "fine-tune" if n == 3 else "batch", content) | {"created_at": n}
        )
    batches = [one["id"] for one in store.all("batch")]
    files = [one["id"] for one in store.all("file")]
    with official(tmp_path) as (one, _, address):
        assert listed(one.batches.list()) == (batches, [20, 3])
        assert listed(one.batches.list(limit=10)) == (batches, [10, 10, 3])
        assert listed(one.batches.list(limit=5, after=batches[12])) == (batches[13:], [5, 5])
        assert listed(one.files.list()) == (files, [5])
        assert listed(one.files.list(limit=2, order="asc")) == (files[::-1], [2, 2, 1])
        assert listed(one.files.list(purpose="fine-tune")) == ([files[1]], [1])
        with client(address) as http:
            page = http.get("/v1/batches?limit=2").json()
            assert (page["first_id"], page["last_id"]) == (batches[0], batches[1])
            assert page["has_more"] is True
            page = http.get(f"/v1/batches?after={batches[-1]}").json()
            none = {"data": [], "first_id": None, "last_id": None, "has_more": False}
            assert page == {"object": "list", **none}
            for path, fault in {
                "batches?limit=0": "limit is '0'",
                "batches?limit=101": "limit is '101'",
                "files?limit=10001": "limit is '10001'",
                "files?limit=many": "limit is 'many'",
                "files?order=up": "order is 'up'",
                "files?before=a": "before is 'a'",
                f"batches?after={files[0]}": f"after is '{files[0]}'",
                "files?after=file-1&purpose=batch": "after is 'file-1'",
            }.items():
                refused = http.get(f"/v1/{path}")
                assert refused.status_code == 400, path
                assert refused.json()["error"]["message"].startswith(fault)
                assert "\n  " in refused.json()["error"]["message"]


@pytest.mark.process
def test_the_schema_of_the_api_describes_what_routes_take_and_give(tmp_path):
    with official(tmp_path) as (_, _, address), client(address) as http:
        paths = http.get("/openapi.json").json()["paths"]
        completion = {"prompt": "a", "max_tokens": 1, "stream": True}
        streamed = http.post("/v1/completions", json=completion).headers["content-type"]
        page = http.get("/").headers["content-type"]

    def types(path, method, part):
        found = paths[path][method]
        return {*(found["requestBody"] if part == "body" else found["responses"][part])["content"]}

    assert types("/v1/batches", "post", "body") == {"application/json"}
    assert types("/v1/files", "post", "body") == {"multipart/form-data"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert types(path, "post", "200") == {"application/json", "text/event-stream"}
    assert streamed.partition(";")[0] in types("/v1/completions", "post", "200")
    assert page.partition(";")[0] in types("/", "get", "200")
    assert "404" in paths["/v1/models/{name}"]["get"]["responses"]
    assert "400" in paths["/v1/files"]["get"]["responses"]
    assert "422" not in paths["/v1/files"]["get"]["responses"]
