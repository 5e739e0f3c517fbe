"""Routes of files and batches.

Source: the OpenAI API reference, "Files" and "Batch".
"""

import asyncio
import shutil
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Query
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from shardlib.serve.batch_jobs import BatchJobs
from shardlib.serve.bodies import FIELDS
from shardlib.serve.gate import read_json, too_large
from shardlib.serve.http_errors import ApiError, JsonResponse
from shardlib.serve.list_pages import BatchQuery, FileQuery, page_of
from shardlib.serve.openapi import BATCH_BODY, FILE_BODY, RESPONSES

_PURPOSES = ("batch", "fine-tune")
_BATCH_FIELDS = {"input_file_id", "endpoint", "completion_window", "metadata"}
_MOST_FIELD_BYTES = 2**16
_MOST_BATCH_BYTES = 2**16


def add_file_routes(app: FastAPI, jobs: BatchJobs | None, most_file_bytes: int) -> None:
    """Adds the routes of files and batches. Without `jobs` the server keeps no files. A file has at
    most `most_file_bytes`."""

    def kept() -> BatchJobs:
        if jobs is None:
            raise ApiError(404, "this server keeps no files.\n  Start it with --files FOLDER.")
        return jobs

    def found(identity: str, kind: str) -> dict[str, Any]:
        value = kept().store.get(identity, kind)
        if value is None:
            raise ApiError(404, f"there is no {kind} {identity!r}.\n  List them.", "not_found")
        return value

    _add_files(app, kept, found, most_file_bytes)
    _add_batches(app, kept, found)


def _add_files(app: FastAPI, kept: Any, found: Any, most_bytes: int) -> None:
    @app.post("/v1/files", responses=RESPONSES, openapi_extra=FILE_BODY)
    async def upload(request: Request) -> Response:
        store = kept().store
        length = request.headers.get("content-length", "")
        # In chunks a body may be longer than its header says.
        if not length.isdecimal() or "transfer-encoding" in request.headers:
            raise ApiError(411, "the length is not given.\n  Send Content-Length.")
        if int(length) > most_bytes:
            raise too_large(most_bytes)
        async with request.form(max_files=1, max_part_size=_MOST_FIELD_BYTES) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or purpose not in _PURPOSES:
                raise ApiError(
                    400,
                    f"the form has no file, or no purpose of {', '.join(_PURPOSES)}.\n  Send both.",
                )
            identity, name = store.new_id("file"), file.filename or "file.jsonl"
            try:
                with store.content(identity).open("wb") as target:
                    await asyncio.to_thread(shutil.copyfileobj, file.file, target)
                added = await asyncio.to_thread(store.add_file, name, str(purpose), identity)
            except BaseException:  # No client knows its id, to delete it.
                store.delete(identity)
                raise
        return JsonResponse(added)

    @app.get("/v1/files", responses=RESPONSES)
    def files(query: Annotated[FileQuery, Query()]) -> Response:
        every = kept().store.all("file")
        if query.purpose is not None:
            every = [one for one in every if one["purpose"] == query.purpose]
        return JsonResponse(page_of(every if query.order == "desc" else every[::-1], query))

    @app.get("/v1/files/{identity}", responses=RESPONSES)
    def file(identity: str) -> Response:
        return JsonResponse(found(identity, "file"))

    @app.get("/v1/files/{identity}/content", responses=RESPONSES)
    def content(identity: str) -> Response:
        one = found(identity, "file")
        path = kept().store.content(one["id"])
        return FileResponse(path, media_type="application/octet-stream")

    @app.delete("/v1/files/{identity}", responses=RESPONSES)
    def delete(identity: str) -> Response:
        one = found(identity, "file")
        if any(batch["input_file_id"] == one["id"] for batch in kept().store.unfinished()):
            raise ApiError(400, f"a batch reads {one['id']}.\n  Wait for its end, or cancel it.")
        kept().store.delete(one["id"])
        return JsonResponse({"id": one["id"], "object": "file", "deleted": True})


def _add_batches(app: FastAPI, kept: Any, found: Any) -> None:
    @app.post("/v1/batches", responses=RESPONSES, openapi_extra=BATCH_BODY)
    async def create(request: Request) -> Response:
        jobs = kept()
        body = await read_json(request, _MOST_BATCH_BYTES)
        if not isinstance(body, Mapping) or (foreign := sorted(set(body) - _BATCH_FIELDS)):
            wrong = ", ".join(map(repr, foreign)) if isinstance(body, Mapping) else "no object"
            raise ApiError(400, f"a batch has no field {wrong}.\n  Leave it out.")
        endpoint = body.get("endpoint")
        if not isinstance(endpoint, str) or endpoint not in FIELDS:
            raise ApiError(400, f"endpoint is {endpoint!r}.\n  Use {', '.join(FIELDS)}.")
        file = found(str(body.get("input_file_id")), "file")
        metadata = body.get("metadata")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise ApiError(400, "metadata is not an object.\n  Give texts by name.")
        window = str(body.get("completion_window", "24h"))
        added = await asyncio.to_thread(jobs.add, file["id"], endpoint, window, metadata)
        return JsonResponse(added)

    @app.get("/v1/batches", responses=RESPONSES)
    def batches(query: Annotated[BatchQuery, Query()]) -> Response:
        return JsonResponse(page_of(kept().store.all("batch"), query))

    @app.get("/v1/batches/{identity}", responses=RESPONSES)
    def batch(identity: str) -> Response:
        return JsonResponse(found(identity, "batch"))

    @app.post("/v1/batches/{identity}/cancel", responses=RESPONSES)
    def cancel(identity: str) -> Response:
        return JsonResponse(kept().cancel(found(identity, "batch")))
