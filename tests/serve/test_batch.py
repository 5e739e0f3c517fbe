"""`shardlib batch`: each row has one response, whatever stops it on the way."""

import fcntl
import json
import os
import re
import resource
import sys

import pytest
from byte_decoder import SPEAKER, Served, Small, new_engine

from shardlib.errors import DataError
from shardlib.serve import answer_batch


@pytest.fixture(scope="module")
def engine():
    return new_engine()


def row(name, body, url="/v1/completions"):
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


ROWS = [row(f"r{n}", {"prompt": f"number {n}", "max_tokens": 4 + n % 5}) for n in range(12)]
ROWS += [
    row(
        "chat",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
        "/v1/chat/completions",
    ),
    row("many", {"prompt": ["a", [98, 99]], "n": 2, "seed": 3, "logprobs": 2, "max_tokens": 3}),
    row("vector", {"input": "one"}, "/v1/embeddings"),
    row("foreign", {"prompt": "a", "temprature": 0.5}),
    row("long", {"prompt": "a" * 200}),
    row("no url", {"prompt": "a"}, url=["/v1/completions"]),
]


def written(path, rows=ROWS):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def responses(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one["response"] for one in found}


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    card = answer_batch(written(folder / "in.jsonl"), folder / "out.jsonl", engine, SPEAKER)
    assert (card.rows, card.answered, card.refused) == (18, 18, 3)
    return responses(folder / "out.jsonl")


def test_responses_have_the_format_of_openai(whole, engine):
    body = whole["r3"]["body"]
    (answer,) = engine.generate("number 3", max_tokens=7, temperature=1.0, seed=0)
    assert body["object"] == "text_completion"
    assert body["usage"]["prompt_tokens"] == len(answer.prompt)
    assert body["usage"]["completion_tokens"] == 7
    many = whole["many"]["body"]["choices"]
    assert [one["index"] for one in many] == [0, 1, 2, 3]
    drawn = [
        engine.generate(p, max_tokens=3, temperature=1.0, seed=s)[0]
        for p in ("a", [98, 99])
        for s in (3, 4)
    ]
    assert [one["text"] for one in many] == [one.text for one in drawn]
    assert [one["logprobs"]["token_logprobs"] for one in many] == [
        pytest.approx([token.logprob for token in one.tokens], abs=1e-5) for one in drawn
    ]
    message = whole["chat"]["body"]["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert whole["chat"]["body"]["object"] == "chat.completion"
    (vector,) = whole["vector"]["body"]["data"]
    assert vector["embedding"] == pytest.approx(engine.embed("one")[0].tolist(), abs=1e-6)


def test_rows_that_cannot_be_answered_say_why(whole):
    refused = {
        name: one["body"]["error"]["message"]
        for name, one in whole.items()
        if one["status_code"] == 400
    }
    assert refused.keys() == {"foreign", "long", "no url"}
    assert "'temprature' Did you mean 'temperature'" in refused["foreign"].replace("?", "")
    assert "200 tokens" in refused["long"]


def test_a_batch_goes_on_where_it_stopped(engine, whole, tmp_path):
    source, out = written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"

    class Stop(Exception):
        pass

    def stop(done, every):
        if done >= 5:
            raise Stop

    with pytest.raises(Stop):
        answer_batch(source, out, engine, SPEAKER, progress=stop)
    assert engine.stats().num_running == 0
    lines = out.read_bytes()
    out.write_bytes(lines + b'{"id": "batch_req_r9", "custom_')
    before = len(lines.splitlines())
    card = answer_batch(source, out, engine, SPEAKER)
    assert card.answered == 18 - before
    assert out.read_bytes().startswith(lines)
    assert responses(out).keys() == whole.keys()
    assert answer_batch(source, out, engine, SPEAKER).answered == 0


def test_files_that_are_refused_before_anything_is_computed(engine, tmp_path):
    out = tmp_path / "out.jsonl"
    cases = {
        "share the custom_id 'a'": [row("a", {}), row("a", {})],
        "line 1 of .* has no url, body": [{"custom_id": "a"}],
    }
    for message, rows in cases.items():
        with pytest.raises(DataError, match=message):
            answer_batch(written(tmp_path / "in.jsonl", rows), out, engine, SPEAKER)
        assert not out.exists()
    source = written(tmp_path / "in.jsonl")
    out.write_text(json.dumps({"custom_id": "other", "response": {"status_code": 200}}) + "\n")
    with pytest.raises(DataError, match="answers 'other', which no row of the input is called"):
        answer_batch(source, out, engine, SPEAKER)
    for text in ("{\n", '{"a":' * 100_000):
        (tmp_path / "in.jsonl").write_text(text)
        with pytest.raises(DataError, match=r"in\.jsonl:1: not JSON"):
            answer_batch(tmp_path / "in.jsonl", out, engine, SPEAKER)


@pytest.mark.parametrize("end", ["\n", ""])
def test_the_requests_are_not_the_file_of_the_responses(engine, tmp_path, end):
    source, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    source.write_text(json.dumps(ROWS[0]) + end)
    link.symlink_to(source)
    before = source.read_bytes()
    for out in (source, link):
        with pytest.raises(DataError, match=r"is the file of the requests\.\n  Name another"):
            answer_batch(source, out, engine, SPEAKER)
    assert source.read_bytes() == before


def test_of_a_foreign_file_nothing_is_cut_off(engine, whole, tmp_path):
    """The last line may lack its end only if it is a response to one of the rows."""
    source, out = written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    other = '{"id": "batch_req_66a", "custom_id": "r1", "response": {'
    for tail in ('{"a": 1}', "notes", "{}", '{"id": "batch_req_r1", "custom_id": "r2"', other):
        for before in ("", "notes\n"):
            out.write_text(before + tail)
            with pytest.raises(DataError, match=r"has lines that are not responses\.\n  Name"):
                answer_batch(source, out, engine, SPEAKER)
            assert out.read_text() == before + tail
    answer_batch(source, out.with_suffix(".whole"), engine, SPEAKER)
    line = out.with_suffix(".whole").read_bytes().splitlines()[0]
    for length in (1, 10, 40, 60, len(line)):
        out.write_bytes(line[:length])
        assert answer_batch(source, out, engine, SPEAKER).answered == 18
        assert responses(out).keys() == whole.keys()


def test_a_row_that_the_queue_refuses_is_refused_alone(tmp_path):
    engine = Small(Served(), slots=4, context=128, chunk=64)
    large = row("large", {"prompt": ["a", "a" * 100], "n": 2})
    card = answer_batch(
        written(tmp_path / "in.jsonl", [large, ROWS[0]]), tmp_path / "out.jsonl", engine, SPEAKER
    )
    assert (card.answered, card.refused, engine.stats().pages_used) == (2, 1, 0)
    assert responses(tmp_path / "out.jsonl")["r0"]["status_code"] == 200


def test_rows_are_read_ahead_for_all_slots_and_no_more(engine, tmp_path, monkeypatch):
    """Also with rows of several requests."""
    rows = [row(f"m{n}", {"prompt": "a", "n": 3, "max_tokens": 2}) for n in range(20)]
    before, seen = engine.stats().num_steps, []
    step = engine.step

    def counted():
        seen.append(engine.stats().num_waiting + engine.stats().num_running)
        return step()

    monkeypatch.setattr(engine, "step", counted)
    answer_batch(written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", engine, SPEAKER)
    assert 12 <= max(seen) < 12 + 3, "4 slots run, 8 requests wait, and rows stay whole"
    assert len(seen) <= engine.stats().num_steps - before + 2


def test_rows_without_a_seed_get_the_same_answer_again(engine, tmp_path):
    """So that a batch that goes on does as one that was never stopped."""
    rows = [row("s", {"prompt": "a", "n": 3, "max_tokens": 8})]
    source = written(tmp_path / "in.jsonl", rows)
    found = []
    for name in ("one.jsonl", "two.jsonl"):
        answer_batch(source, tmp_path / name, engine, SPEAKER)
        found.append([one["text"] for one in responses(tmp_path / name)["s"]["body"]["choices"]])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_a_full_disk_loses_no_response(engine, whole, tmp_path):
    source, out = written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(DataError, match="File too large"):
            answer_batch(source, out, engine, SPEAKER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert engine.stats().num_running == 0
    before = out.read_bytes().count(b"\n")
    assert 0 < before < 18
    assert answer_batch(source, out, engine, SPEAKER).answered == 18 - before
    assert responses(out).keys() == whole.keys()


def test_one_process_writes_a_file_of_responses(engine, whole, tmp_path):
    source, out = written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    with out.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another process writes .*out\.jsonl.*\n  Wait for"):
            answer_batch(source, out, engine, SPEAKER)
    assert not out.read_bytes()
    answer_batch(source, out, engine, SPEAKER)
    assert responses(out).keys() == whole.keys()


def test_a_row_that_needs_an_absent_extra_is_refused_alone(engine, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    form = {"type": "json_object"}
    rows = [row("form", {"prompt": "a", "response_format": form, "max_tokens": 2}), ROWS[0]]
    card = answer_batch(
        written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", new_engine(), SPEAKER
    )
    assert (card.answered, card.refused) == (2, 1)
    refused = responses(tmp_path / "out.jsonl")["form"]
    assert refused["status_code"] == 400
    assert "grammar" in refused["body"]["error"]["message"]


def test_requests_of_parquet(engine, tmp_path):
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    rows = [one | {"body": json.dumps(one["body"])} for one in ROWS[:3]]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "in.parquet")
    answer_batch(tmp_path / "in.parquet", tmp_path / "out.jsonl", engine, SPEAKER)
    assert responses(tmp_path / "out.jsonl").keys() == {"r0", "r1", "r2"}


def test_columns_of_parquet_that_are_refused_before_anything_is_computed(engine, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    columns = [("custom_id", "a"), ("url", "/v1/completions"), ("body", '{"prompt": "a"}')]

    def write(columns):
        arrays = [pyarrow.array([value]) for _, value in columns]
        table = pyarrow.Table.from_arrays(arrays, names=[name for name, _ in columns])
        parquet.write_table(table, source)

    def refused(columns, message):
        write(columns)
        with pytest.raises(DataError, match=re.escape(message)):
            answer_batch(source, out, engine, SPEAKER)
        assert not out.exists()

    refused(columns[:2], f"row 1 of {source} has no body.\n  Write rows as")
    for name, value in columns:
        refused([*columns, (name, "b")], f"{source} has more than one column {name}.\n  Rename")
        others = [one for one in columns if one[0] != name]
        message = f"row 1 of {source} has bytes, and not text, in the column {name}.\n  Write"
        refused([*others, (name, value.encode())], message)
    # Columns that nobody reads.
    write([*columns, ("note", b"a"), ("note", "b")])
    assert answer_batch(source, out, engine, SPEAKER).refused == 0


def test_damaged_parquet_is_refused_before_anything_is_computed(engine, tmp_path):
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    rows = [one | {"body": json.dumps(one["body"])} for one in ROWS[:3]]
    # Without compression and a dictionary the text lies in the file as it is.
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    source, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"

    def refused(damaged, **options):
        parquet.write_table(Table.from_pylist(rows), source, **options)
        source.write_bytes(damaged(source.read_bytes()))
        with pytest.raises(DataError, match=r"in.parquet cannot be read: [^\n]*\n  Write the file"):
            answer_batch(source, out, engine, SPEAKER)
        assert not out.exists()

    refused(lambda data: data[:-9])
    refused(lambda data: data[:4] + b"\xff" * 8 + data[12:])  # The header of the first page.
    refused(lambda data: data.replace(b"number 1", b"numb\xffr 1"), **plain)  # Not UTF-8.
    other = {"write_page_checksum": True, **plain}
    refused(lambda data: data.replace(b"number 1", b"number 7"), **other)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_is_not_a_file_of_requests_is_named(engine, tmp_path, suffix):
    source, out = tmp_path / f"in.{suffix}", tmp_path / "out.jsonl"
    with pytest.raises(DataError, match=rf"no such file: .*in.{suffix}\.\n  Name"):
        answer_batch(source, out, engine, SPEAKER)
    os.mkfifo(source)  # As /dev/stdin behind a pipe.
    with pytest.raises(DataError, match=rf"in.{suffix} is not a regular file.*\n  Write the"):
        answer_batch(source, out, engine, SPEAKER)
    assert not out.exists()
