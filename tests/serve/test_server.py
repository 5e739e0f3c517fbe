"""The server: the official client's view, limits, faults and its end."""

import asyncio
import base64
import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import numpy as np
import openai
import pytest
from byte_decoder import LONG, SPEAKER, TEXT, Served, Slow, client, new_engine, serving, wait_until
from flax import nnx
from starlette.requests import Request

from shardlib.errors import ConfigError
from shardlib.finetune import lora
from shardlib.serve import bodies, server
from shardlib.serve.app import ServerLimits
from shardlib.serve.gate import read_json, read_keys


@pytest.fixture(scope="module")
def served():
    with serving() as (service, address):
        yield service, address


@pytest.fixture(scope="module")
def http(served):
    with client(served[1]) as one:
        yield one


@pytest.fixture(scope="module")
def official(served):
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def engine():
    return new_engine()


DRAWN = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
ASKED = {"model": "tiny", **DRAWN}
MESSAGES = [{"role": "user", "content": "hi"}]


def test_completions_are_those_of_the_engine(official, engine):
    (first,) = engine.generate("one", **DRAWN, logprobs=2)
    (second,) = engine.generate([98, 99], **DRAWN | {"seed": 4})
    found = official.completions.create(prompt="one", logprobs=2, **ASKED)
    assert found.choices[0].text == first.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 12
    logprobs = found.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx([t.logprob for t in first.tokens], abs=1e-5)
    several = official.completions.create(prompt=["one", [98, 99]], n=2, **ASKED)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == first.text
    assert several.choices[3].text == second.text
    stop = first.text[5:7]
    cut = official.completions.create(prompt="one", stop=[stop], **ASKED)
    assert cut.choices[0].text == first.text[: first.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_chat_in_pieces_is_the_whole_one(official):
    whole = official.chat.completions.create(
        messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, **ASKED
    )
    texts, tokens, reasons, numbers = {0: "", 1: ""}, {0: [], 1: []}, {}, None
    for chunk in official.chat.completions.create(
        messages=MESSAGES,
        n=2,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        **ASKED,
    ):
        numbers = chunk.usage or numbers
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason
    assert reasons == {0: "length", 1: "length"}
    assert numbers.completion_tokens == whole.usage.completion_tokens == 24
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        pairs = zip(tokens[choice.index], choice.logprobs.content, strict=True)
        for piece, one in pairs:
            assert (piece.token, len(piece.top_logprobs)) == (one.token, 2)


def test_a_completion_in_pieces(official):
    whole = official.completions.create(prompt="one", logprobs=1, **ASKED)
    chunks = list(official.completions.create(prompt="one", logprobs=1, stream=True, **ASKED))
    assert len(chunks) > 4
    assert "".join(one.choices[0].text for one in chunks) == whole.choices[0].text
    offsets = [x for one in chunks for x in one.choices[0].logprobs.text_offset]
    assert offsets == whole.choices[0].logprobs.text_offset


def test_tools_are_rendered_by_the_template(official):
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
    ]
    counts = [
        official.chat.completions.create(messages=messages, **ASKED, **more).usage.prompt_tokens
        for more in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"})
    ]
    assert [count - counts[0] for count in counts] == [0, len("[look_up]"), 0]


def test_embeddings_are_those_of_the_engine(official, engine):
    (expected,) = engine.embed("one")
    for form in ("float", "base64"):
        found = official.embeddings.create(model="tiny", input=["two", "one"], encoding_format=form)
        vector = found.data[1].embedding
        if form == "base64":
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        np.testing.assert_allclose(vector, expected, atol=1e-6)
    assert found.usage.prompt_tokens == found.usage.total_tokens == 6
    assert official.embeddings.create(model="tiny", input=[1, 2, 3]).data[0].index == 0


def test_equal_prompts_of_a_body_without_a_seed_are_answered_apart():
    for seed, is_live in ((None, True), (None, False), (3, True)):
        body = {"prompt": ["a", "a", "b"], "n": 2, "seed": seed}
        asked = bodies.parse("/v1/completions", body, SPEAKER, is_live=is_live)
        seeds = {one.seed for _, samplings in asked.by_prompt() for one in samplings}
        assert len(seeds) == (6 if seed is None else 2)


def test_equal_requests_without_a_seed_get_different_answers(official):
    asked = {"model": "tiny", "prompt": "one", "max_tokens": 12, "temperature": 1.0, "n": 2}
    found = [official.completions.create(**asked) for _ in "ab"]
    assert len({choice.text for one in found for choice in one.choices}) == 4
    found = [official.completions.create(**asked, seed=5) for _ in "ab"]
    assert found[0].choices[1].text == found[1].choices[1].text


def test_the_cost_of_a_body_does_not_grow_with_its_choices(monkeypatch):
    """A long body is read once for all seeds, and one that asks for too much not at all."""
    calls = []
    blake2b = bodies.hashlib.blake2b

    def counted(data, **options):
        calls.append(data)
        return blake2b(data, **options)

    monkeypatch.setattr(bodies.hashlib, "blake2b", counted)
    body = {"prompt": "a", "n": 128}
    asked = bodies.parse("/v1/completions", body, SPEAKER)
    assert len({one.seed for one in asked.samplings}) == 128
    assert len(calls) == 1
    start = time.monotonic()
    bias = {str(number): 1 for number in range(20_000)}
    asked = bodies.parse("/v1/completions", body | {"logit_bias": bias}, SPEAKER, is_live=True)
    assert time.monotonic() - start < 1, "a bias is checked once for all choices"
    assert len({one.seed for one in asked.samplings}) == 128
    many = {"prompt": ["a"] * 9, "n": 100}
    for url, one in (("/v1/completions", many), ("/v1/embeddings", {"input": ["a"] * 900})):
        with pytest.raises(bodies.BodyError, match=r"asks for 900 answers, and .* 12") as refused:
            bodies.parse(url, one, SPEAKER, is_live=True, most_answers=12)
        assert (refused.value.status, refused.value.code) == (413, "too_many_prompts")
    assert len(calls) == 1


def test_a_long_body_is_read_beside_the_event_loop(monkeypatch):
    """While it is read, others are answered: here, a coroutine that ticks."""

    def request(content):
        async def receive():
            return {"type": "http.request", "body": content}

        headers = [(b"content-type", b"application/json")]
        return Request({"type": "http", "headers": headers}, receive)

    async def ticks_while_read(content):
        ticks, task = 0, asyncio.create_task(read_json(request(content), 2**24))
        while not task.done():
            await asyncio.sleep(0)
            ticks += 1
        return await task, ticks

    assert asyncio.run(ticks_while_read(b"[1, 2]"))[1] < 5
    value, ticks = asyncio.run(ticks_while_read(b"[" + b"12, " * 300_000 + b"3]"))
    assert value == [12] * 300_000 + [3]
    assert ticks > 5


def test_models(official):
    assert [one.id for one in official.models.list()] == ["tiny"]
    assert official.models.retrieve("tiny").owned_by == "shardlib"
    with pytest.raises(openai.NotFoundError, match="no model is called 'big'"):
        official.models.retrieve("big")


@pytest.mark.mesh
def test_an_adapter_is_a_model_of_its_own():
    adapted = lora(Served().model, rngs=nnx.Rngs(0))
    for _, factor in nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam)):
        factor[...] = jax.random.normal(jax.random.key(0), factor.shape)
    engine = new_engine(adapters={"own": adapted}, slots=2, context=64, chunk=32)
    (expected,) = engine.generate("one", max_tokens=12, adapter="own")
    speaker = dataclasses.replace(SPEAKER, adapters=("own",))
    with serving(engine, speaker=speaker) as (_, address), client(address) as http:
        listed = http.get("/v1/models").json()["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [
            ("tiny", None),
            ("own", "tiny"),
        ]
        greedy = {"prompt": "one", "max_tokens": 12, "temperature": 0}
        bodies = [greedy | {"model": name} for name in ("own", "tiny")]
        own, base = (http.post("/v1/completions", json=body).json() for body in bodies)
        assert own["choices"][0]["text"] == expected.text != base["choices"][0]["text"]
        assert (own["model"], base["model"]) == ("own", "tiny")
        refused = http.post("/v1/completions", json={"prompt": "a", "model": "owm"})
        assert (refused.status_code, "Did you mean 'own'" in refused.text) == (404, True)


def test_bodies_that_cannot_be_answered(http):
    cases = [
        ({"prompt": "a", "temprature": 1}, 400, "Did you mean 'temperature'"),
        ({"prompt": "a", "model": "big"}, 404, "no model is called 'big'"),
        ({"prompt": "a" * 200}, 400, "the context of 128"),
        ({"prompt": "\ud800"}, 400, "not Unicode"),
        ({"prompt": [300]}, 400, "the tokens 300"),
        ({"prompt": [2**70]}, 400, f"the tokens {2**70}, but the model has"),
        ({"prompt": ["a"] * 13}, 413, "and the server holds 12"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "without stream"),
        ([], 400, "the body is list"),
    ]
    for body, status, text in cases:
        answer = http.post("/v1/completions", content=json.dumps(body).encode(), headers=JSON)
        assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True)
    for content, kind, status in (
        (b"{", "application/json", 400),
        (b'{"prompt": "a", "top_p": NaN}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"{}", "text/plain", 415),
    ):
        answer = http.post("/v1/completions", content=content, headers={"content-type": kind})
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
    for body, text in (
        ({"prompt": "a"}, "no field 'prompt'"),
        ({"input": ""}, "the prompt has no tokens"),
        ({"input": []}, "input is not a text"),
        ({"input": "a", "encoding_format": "int8"}, "'float' or 'base64'"),
        ({"input": "a", "dimensions": 8}, "no field 'dimensions'"),
    ):
        answer = http.post("/v1/embeddings", json=body)
        assert (answer.status_code, text in answer.text) == (400, True), answer.text
    form = {"response_format": {"type": "regex", "regex": "a(b"}, "prompt": "a"}
    answer = http.post("/v1/completions", json=form)
    assert (answer.status_code, "grammar" in answer.text) == (400, True)
    assert http.get("/v1/other").json()["error"]["type"] == "not_found_error"
    assert "--files FOLDER" in http.get("/v1/files").json()["error"]["message"]
    assert http.get("/v1/completions").status_code == 405


JSON = {"content-type": "application/json"}


def numbers(http):
    lines = http.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return collections.Counter({name: float(value) for name, value in pairs})


def test_metrics_count_what_happens(served, http):
    before = numbers(http)
    body = {"prompt": "a" * 40, "max_tokens": 5, "ignore_eos": True}
    for _ in range(2):
        assert http.post("/v1/completions", json=body).status_code == 200
    assert http.post("/v1/completions", json={"prompts": 1}).status_code == 400
    after = numbers(http)
    assert after["shardlib_answer_tokens_total"] == served[0].thread.stats.answer_tokens
    after.subtract(before)
    assert after["shardlib_answer_tokens_total"] == 10
    assert after["shardlib_cached_tokens_total"] == 32
    assert after["shardlib_time_to_first_token_seconds_count"] == 2
    assert after["shardlib_inter_token_seconds_count"] == 8
    assert after['shardlib_answers_total{finish_reason="length"}'] == 2
    assert after['shardlib_responses_total{status="400"}'] == 1
    assert http.get("/").headers["content-type"].startswith("text/html")


def test_a_client_that_goes_before_its_body_ends_is_no_failure(served, http, caplog):
    gone = 'shardlib_responses_total{status="499"}'
    before = numbers(http)[gone]
    url = httpx.URL(served[1])
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
    wait_until(lambda: numbers(http)[gone] == before + 1)
    assert not caplog.records


@pytest.mark.process
def test_a_key_is_asked_for(engine_of_keys):
    address = engine_of_keys
    with client(address) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret-ü"}):
            refused = http.get("/v1/models", headers=[(k, v.encode()) for k, v in headers.items()])
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/v1/models", headers={"authorization": "Bearer b"}).status_code == 200
        assert http.get("/health").status_code == 200
        large = http.post("/v1/completions", content=b" " * 2000, headers=KEYED)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        pieces = (b" " * 100 for _ in range(20))
        assert http.post("/v1/completions", content=pieces, headers=KEYED).status_code == 413


KEYED = JSON | {"authorization": "Bearer b"}


@pytest.fixture
def engine_of_keys():
    with serving(keys=("a", "b"), limits=ServerLimits(most_body_bytes=1000)) as (_, address):
        yield address


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("# of the team\none\n\ntwo # of a guest\nth#ree\t#\n  # \n")
    assert read_keys(str(tmp_path / "keys")) == ("one", "two", "th#ree")
    monkeypatch.delenv("SHARDLIB_API_KEYS", raising=False)
    assert read_keys(None) == ()
    monkeypatch.setenv("SHARDLIB_API_KEYS", "a, b#c")
    assert read_keys(None) == ("a", "b#c")
    for empty in ("", " , "):
        monkeypatch.setenv("SHARDLIB_API_KEYS", empty)
        with pytest.raises(ConfigError, match=r"SHARDLIB_API_KEYS is set and has no.*\n  Write"):
            read_keys(None)
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ConfigError, match="has no API key"):
        read_keys(str(tmp_path / "keys"))


@pytest.mark.process
def test_clients_that_go_away_leave_nothing():
    with serving(Slow(Served(), slots=2, context=128, chunk=64)) as (service, address):
        steps = []
        for number in range(6):
            with client(address) as http, http.stream("POST", "/v1/completions", json=LONG) as got:
                if number % 2:
                    next(got.iter_lines())
                wait_until(lambda: service.thread.stats.num_running)
                before = service.thread.stats.num_steps
            wait_until(lambda: not service.thread.stats.num_running)
            steps.append(service.thread.stats.num_steps - before)
        assert max(steps) <= 3, "the one that runs, and two"
        # A client that waits for its whole answer.
        with client(address) as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG | {"stream": False}, timeout=0.2)
        wait_until(lambda: not service.thread.stats.num_running)
        stats = service.thread.stats
        assert (stats.pages_used, stats.num_waiting, service.gate.num_open) == (0, 0, 0)
        assert stats.answer_tokens < 100


@pytest.mark.process
def test_a_full_queue_is_refused():
    with contextlib.ExitStack() as open_:
        engine = Slow(Served(), slots=1, context=128)
        _, address = open_.enter_context(serving(engine, queue=1))
        http = open_.enter_context(client(address))
        for _ in range(2):
            open_.enter_context(http.stream("POST", "/v1/completions", json=LONG))
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "queue_full"


@pytest.mark.process
def test_a_server_with_too_many_requests_refuses_others():
    limits = ServerLimits(most_requests=1)
    with contextlib.ExitStack() as open_:
        engine = Slow(Served(), slots=1, context=128)
        _, address = open_.enter_context(serving(engine, limits=limits))
        http = open_.enter_context(client(address))
        with http.stream("POST", "/v1/completions", json=LONG):
            refused = http.get("/v1/models")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "too_many_requests"
            assert http.get("/ready").status_code == 200


@pytest.mark.process
def test_a_client_that_stalls_is_given_up(tmp_path, caplog, monkeypatch):
    """The body of one does not come, nor the head of another, and a third does not read."""
    # Longer than the upload may pause on a busy machine.
    monkeypatch.setattr(server, "_REQUEST_SECONDS", 3)
    limits = ServerLimits(stalled_seconds=3)
    with serving(files=tmp_path, limits=limits) as (service, address):
        content = b"{}\n" * 2**23  # More than the buffers of a connection.
        with client(address) as http:
            form = {"data": {"purpose": "batch"}, "files": {"file": ("a", content)}}
            file = http.post("/v1/files", **form).json()["id"]
        host, port = address.removeprefix("http://").split(":")
        with contextlib.ExitStack() as open_:
            body, head, reader = (
                open_.enter_context(socket.create_connection((host, port), 20)) for _ in range(3)
            )
            length = b"content-length: 100\r\ncontent-type: application/json\r\n\r\n{"
            body.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + length)
            head.sendall(b"POST /v1/comp")
            proxied = "host: a\r\nx-forwarded-for: 10.0.0.1\r\n\r\n"
            reader.sendall(f"GET /v1/files/{file}/content HTTP/1.1\r\n{proxied}".encode())
            wait_until(lambda: service.gate.num_open == 2)
            assert body.recv(2**16).startswith(b"HTTP/1.1 408 ")
            wait_until(lambda: service.gate.num_open == 0, seconds=20)
            assert read_to_end(head) == 0
            assert 0 < read_to_end(reader) < len(content)
    assert "A client made no progress for 3 seconds" in caplog.text


def read_to_end(connection):
    """Returns the bytes that come before a connection ends."""
    size = 0
    with contextlib.suppress(ConnectionResetError):
        while got := connection.recv(2**20):
            size += len(got)
    return size


@pytest.mark.process
def test_a_connection_stays_while_requests_come(monkeypatch):
    monkeypatch.setattr(server, "_REQUEST_SECONDS", 3)
    with serving() as (_, address), client(address) as http:
        for _ in range(20):
            assert http.get("/health").status_code == 200
            time.sleep(0.3)


@pytest.mark.soak
@pytest.mark.parametrize("bytes_per_second", [5 * 10**6, 10**6])
def test_a_client_that_reads_slowly_gets_all(tmp_path, bytes_per_second):
    with serving(files=tmp_path, limits=ServerLimits(stalled_seconds=3)) as (_, address):
        content = b"{}\n" * (bytes_per_second * 4)
        with client(address) as http:
            form = {"data": {"purpose": "batch"}, "files": {"file": ("a", content)}}
            file = http.post("/v1/files", **form).json()["id"]
            size = 0
            with http.stream("GET", f"/v1/files/{file}/content") as got:
                for piece in got.iter_raw(bytes_per_second // 2):
                    size += len(piece)
                    time.sleep(0.5)
        assert size == len(content)


@pytest.mark.process
def test_a_request_that_breaks_steps_ends_alone(caplog, monkeypatch):
    engine = new_engine()
    right = engine.generate("good", max_tokens=40, temperature=1.0, seed=1)[0].text
    run = engine._programs.run

    def fails(params, state, arrays, kernels):
        if ord("!") in arrays.tokens:
            raise RuntimeError("a bad prompt")
        return run(params, state, arrays, kernels)

    monkeypatch.setattr(engine._programs, "run", fails)
    good = {"prompt": "good", "max_tokens": 40, "seed": 1}
    with serving(engine) as (service, address), client(address) as http:
        with ThreadPoolExecutor(4) as pool:
            bodies = [good, {"prompt": "bad!"}, good, good | {"prompt": "bad!", "stream": True}]
            answers = list(pool.map(lambda one: http.post("/v1/completions", json=one), bodies))
        assert [one.status_code for one in answers] == [200, 500, 200, 200]
        assert answers[0].json()["choices"][0]["text"] == right
        assert answers[2].json()["choices"][0]["text"] == right
        assert "a bad prompt" in answers[1].json()["error"]["message"]
        assert "a bad prompt" in answers[3].text
        assert "[DONE]" not in answers[3].text
        assert http.get("/ready").status_code == 200
        assert http.post("/v1/completions", json=good).json()["choices"][0]["text"] == right
        assert service.thread.stats.pages_used == 0


@pytest.mark.process
def test_a_dead_engine_ends_all_requests():
    with contextlib.ExitStack() as open_:
        engine = Slow(Served(), slots=2, context=128)
        service, address = open_.enter_context(serving(engine))
        http = open_.enter_context(client(address))
        with ThreadPoolExecutor(4) as pool:
            bodies = [LONG, LONG | {"stream": False}, LONG | {"stream": False}]
            futures = [
                pool.submit(http.post, "/v1/completions", json=one | {"max_tokens": 120})
                for one in bodies
            ]
            wait_until(lambda: service.gate.num_open == 3 and service.thread.stats.num_running)
            ident = ctypes.c_ulong(service.thread._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
            wait_until(lambda: http.get("/ready").status_code == 503, seconds=2)
            assert http.get("/health").status_code == 503
            answers = [one.result(10) for one in futures]
            assert [one.status_code for one in answers] == [200, 500, 500]
            assert "the engine has stopped" in answers[0].text
            assert http.post("/v1/completions", json=LONG).status_code == 500


def test_prompts_are_repeated_with_their_log_probabilities(official, engine):
    """As evaluation harnesses ask for it: by tokens, and without an answer."""
    (right,) = engine.generate([98, 99, 100], max_tokens=1, prompt_logprobs=True, logprobs=1)
    scores = [token.logprob for token in (*right.prompt_tokens, *right.tokens)]
    asked = {"model": "tiny", "prompt": [98, 99, 100], "echo": True, "logprobs": 1}
    found = official.completions.create(max_tokens=1, temperature=0, **asked).choices[0]
    assert found.logprobs.token_logprobs == [None, *(pytest.approx(s, abs=1e-5) for s in scores)]
    assert found.text == "bcd" + right.text
    assert found.logprobs.tokens[:3] == ["b", "c", "d"]
    assert found.logprobs.top_logprobs[0] is None
    assert max(found.logprobs.top_logprobs[1].values()) == pytest.approx(
        right.prompt_tokens[0].top[0][1], abs=1e-5
    )
    (piece, *_) = official.completions.create(max_tokens=1, temperature=0, stream=True, **asked)
    assert piece.choices[0].logprobs.token_logprobs == found.logprobs.token_logprobs
    only = official.completions.create(max_tokens=0, **asked)
    assert (only.choices[0].text, only.usage.completion_tokens) == ("bcd", 0)
    assert len(only.choices[0].logprobs.tokens) == 3
    # They leave out the last token, also where it would end the text.
    ends = {"logit_bias": {str(TEXT.eot): 100}}
    last = official.completions.create(max_tokens=1, temperature=0, **ends, **asked).choices[0]
    assert last.logprobs.token_logprobs[:3] == found.logprobs.token_logprobs[:3]
    assert len(last.logprobs.tokens) == 4


@pytest.mark.soak
def test_a_thousand_disconnects_leave_nothing():
    async def leave(port, number, slots):
        rng, body = random.Random(number), LONG | {"prompt": "a" * (1 + number % 60)}
        data = json.dumps(body | {"stream": number % 2 == 0, "max_tokens": 60}).encode()
        async with slots:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + data)
            await writer.drain()
            await asyncio.sleep(rng.random() * 0.05)
            if number % 4 == 0:
                await reader.read(200)
            writer.transport.abort()

    async def leave_all(port):
        slots = asyncio.Semaphore(16)
        await asyncio.gather(*(leave(port, number, slots) for number in range(1000)))

    with serving(queue=64) as (service, address):
        files = len(os.listdir("/proc/self/fd"))
        asyncio.run(leave_all(int(address.rpartition(":")[2])))
        wait_until(lambda: service.gate.num_open == 0)
        wait_until(lambda: not service.thread.call(lambda engine: engine.busy).result())
        stats = service.thread.call(lambda engine: engine.stats()).result()
        assert stats.num_steps > 100
        assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
        assert not service.thread._answers
        assert not service.thread._engine._open.by_sequence
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)
