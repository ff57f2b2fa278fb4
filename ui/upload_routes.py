"""The JSON route that uploads come in by: begun, sent in slices, asked after, and cancelled.

What is refused is answered with `problem` and `fix`, and with `offset` where the sender is to go on elsewhere.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from core.browser.shelf import UploadError
from core.browser.uploads import Incoming, Uploads
from core.errors import AppError
from ui.registry import services

HEADER, MARK = "x-finetune", "upload"
"""A header that no form of another site can send."""
_PIECE = 2**20
_MOST_JSON = 2**14
_NO_STORE = {"cache-control": "no-store"}


async def begin(request: Request) -> Response:
    """POST {"name", "size", "modified"}: make room for a file; answers how much of it is here already."""
    try:
        _check(request, "application/json")
        told = await _json(request)
        uploads = await _uploads()
        upload = await to_thread.run_sync(uploads.begin, told["name"], told["size"], told["modified"])
    except AppError as error:
        return _refusal(error)
    return JSONResponse({**upload.facts(), "slice": uploads.limits.slice_bytes}, 201, _NO_STORE)


async def one(request: Request) -> Response:
    """GET: how far an upload is; PUT: its bytes from `offset` on; DELETE: forget it."""
    upload_id = request.path_params["upload_id"]
    try:
        uploads = await _uploads()
        if request.method == "DELETE":
            _check(request)
            await to_thread.run_sync(uploads.cancel, upload_id)
            return JSONResponse({}, headers=_NO_STORE)
        upload = uploads.find(upload_id)
        if request.method == "PUT":
            _check(request, "application/octet-stream")
            try:
                await _receive(request, uploads, upload)
            except AppError:
                await _hear_out(request, uploads.limits.slice_bytes)
                raise
    except AppError as error:
        return _refusal(error)
    return JSONResponse(upload.facts(), headers=_NO_STORE)


async def _receive(request: Request, uploads: Uploads, upload: Incoming) -> None:
    """Put a slice onto the disk piece by piece; what came before a cut is kept."""
    offset, length = request.query_params.get("offset", ""), request.headers.get("content-length", "")
    if not offset.isascii() or not offset.isdecimal() or len(offset) > 15:
        raise UploadError(400, "The slice does not say where it begins.", fix="Send offset=N.")
    known = int(length[:15]) if length.isascii() and length.isdecimal() else None
    turn = uploads.take_turn(upload, int(offset), known)
    waiting, came = bytearray(), 0
    try:
        async for chunk in request.stream():
            came += len(chunk)
            if came > uploads.limits.slice_bytes:
                raise UploadError(413, "The slice is too long.", fix="Send less at once.", offset=upload.offset)
            waiting += chunk
            if len(waiting) >= _PIECE:
                await to_thread.run_sync(uploads.write, upload, turn, bytes(waiting))
                waiting.clear()
    except ClientDisconnect:
        pass
    if waiting:
        await to_thread.run_sync(uploads.write, upload, turn, bytes(waiting))


async def _hear_out(request: Request, most_bytes: int) -> None:
    """Let the rest of a slice pass by: a sender that is still busy sending does not hear an answer."""
    # a RuntimeError says that all of it was heard
    with suppress(ClientDisconnect, RuntimeError):
        async for chunk in request.stream():
            most_bytes -= len(chunk)
            if most_bytes < 0:
                return


async def _json(request: Request) -> dict[str, Any]:
    body = bytearray()
    problem = UploadError(400, "The request is not understood.", fix="Send name, size and modified.")
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_JSON:
                raise problem
        told = json.loads(bytes(body))
        is_size = isinstance(told["size"], int) and not isinstance(told["size"], bool)
        name, size, modified = told["name"], told["size"], told.get("modified", "")
    except (ValueError, KeyError, TypeError, RecursionError, ClientDisconnect) as error:
        raise problem from error
    if not isinstance(name, str) or not is_size or not isinstance(modified, str | int | float):
        raise problem
    return {"name": name, "size": size, "modified": modified}


def _check(request: Request, content_type: str = "") -> None:
    if request.headers.get(HEADER) != MARK:
        raise UploadError(403, "Uploads are taken from the page Data alone.", fix="Open it and choose the file there.")
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type and sent != content_type:
        raise UploadError(415, f"This takes {content_type}.", fix="Send it with this content type.")


async def _uploads() -> Uploads:
    return (await to_thread.run_sync(services)).uploads


def _refusal(error: AppError) -> Response:
    told: dict[str, Any] = {"problem": error.problem, "fix": error.fix}
    if isinstance(error, UploadError) and error.offset is not None:
        told["offset"] = error.offset
    return JSONResponse(told, error.status if isinstance(error, UploadError) else 503, _NO_STORE)


UPLOAD_ROUTES = [
    Route("/api/uploads", begin, methods=["POST"]),
    Route("/api/uploads/{upload_id}", one, methods=["GET", "PUT", "DELETE"]),
]
