"""Files and batches of a server, as the official client uses them."""

import contextlib
import json
import time

import openai
import pytest
from byte_decoder import client, serving, wait_until

ROWS = [
    {
        "custom_id": f"r{n}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"number {n}", "max_tokens": 30, "ignore_eos": True},
    }
    for n in range(30)
]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@contextlib.contextmanager
def official(folder):
    with contextlib.ExitStack() as stack:
        service, address = stack.enter_context(serving(files=folder))
        options = {"base_url": f"{address}/v1", "api_key": "none", "max_retries": 0}
        yield stack.enter_context(openai.OpenAI(**options)), service, address


def ended(one, batch):
    wait_until(
        lambda: one.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled")
    )
    return one.batches.retrieve(batch.id)


def batched(one, rows, endpoint="/v1/completions"):
    file = one.files.create(file=("in.jsonl", lines(rows)), purpose="batch")
    return one.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


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
