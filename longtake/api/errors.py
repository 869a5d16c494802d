"""Every error as one JSON body: RFC 9457 problem details with OpenAI's ``error`` object inside.

SDKs of the OpenAI kind read ``error``, everybody else the members on top. ``install`` sets the one
handler; handlers and middlewares of this package raise or answer through ``ApiError`` alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from longtake.errors import (
    ConflictError,
    LeaseLostError,
    LimitError,
    LongtakeError,
    MediaError,
    ModelError,
    NotFoundError,
    RequestError,
    ServiceError,
    TooLargeError,
)

LOG = logging.getLogger("longtake.api")
PROBLEM_TYPE = "application/problem+json"
MAX_RETRY_AFTER_S = 120  # a longer one makes OpenAI's SDK give up
MAX_MESSAGE = 2_000
NO_RETRY = {"x-should-retry": "false"}
# names of VideoRequest's own fields as the REST body has them
REST_NAMES = {"image": "input_reference"}
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
CODES = {
    400: "bad_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    416: "range_not_satisfiable",
    422: "unprocessable",
    500: "internal_error",
}


class ErrorObject(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDetail(BaseModel):
    """One of several faults of a request; ``pointer`` is a JSON pointer into it."""

    pointer: str
    detail: str


class Problem(BaseModel):
    """Problem details (RFC 9457); ``error`` says the same to clients of the OpenAI kind."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    errors: list[ErrorDetail] = []
    error: ErrorObject


class ApiError(LongtakeError):
    """An answer other than 2xx, decided by the API itself."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or CODES.get(status, "error")
        self.param = param
        self.headers = dict(headers or {})
        self.errors = tuple(errors)


class ProblemResponse(Response):
    """An ``ApiError`` on the wire."""

    media_type = PROBLEM_TYPE

    def __init__(self, error: ApiError, request_id: str | None = None) -> None:
        super().__init__(
            content=json.dumps(problem(error, request_id), separators=(",", ":")).encode(),
            status_code=error.status,
            headers={"cache-control": "no-store", **error.headers},
        )


def problem(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """The body of an error."""
    message = error.message if len(error.message) <= MAX_MESSAGE else error.message[:MAX_MESSAGE]
    body: dict[str, Any] = {
        "type": f"urn:longtake:problem:{error.code}",
        "title": _title(error.status),
        "status": error.status,
        "detail": message,
        "instance": f"urn:longtake:request:{request_id}" if request_id else None,
        "error": {
            "message": message,
            "type": KINDS.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
        },
    }
    if error.errors:
        body["errors"] = [{"pointer": p, "detail": d} for p, d in error.errors]
    return body


def api_error(error: Exception) -> ApiError:
    """The answer that an exception makes; the unknown one is a 500 that tells nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return _request_error(error)
    if isinstance(error, NotFoundError):
        message = f"There is no {error.kind} with that id" + (
            f": {error.why}." if error.why else "."
        )
        return ApiError(404, message, code=f"{error.kind.replace(' ', '_')}_not_found")
    if isinstance(error, LeaseLostError):
        return ApiError(409, str(error), code="conflict", headers=NO_RETRY)
    if isinstance(error, ConflictError):
        mismatch = error.code == "idempotency_mismatch"
        return ApiError(422 if mismatch else 409, str(error), code=error.code, headers=NO_RETRY)
    if isinstance(error, LimitError):
        headers = retry_after(error.retry_after_s)
        return ApiError(429, str(error), code=error.code, headers=headers)
    if isinstance(error, ServiceError):
        headers = retry_after(error.retry_after_s)
        return ApiError(503, str(error), code="service_unavailable", headers=headers)
    if isinstance(error, ModelError):
        # the message names files of the server
        LOG.warning("model not usable: %s", error)
        message = "The model cannot be used on this server just now."
        return ApiError(503, message, code="model_unavailable", headers=retry_after(60))
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, _detail(error), headers=error.headers)
    if isinstance(error, DBAPIError | PoolTimeoutError):
        LOG.error("database: %s", type(error).__name__, exc_info=error)
        message = "The database does not answer just now."
        return ApiError(503, message, code="service_unavailable", headers=retry_after(5))
    return ApiError(500, "Something broke inside; the server's log has it under the request id.")


def retry_after(seconds: float) -> dict[str, str]:
    """``Retry-After``, at least 1 s and never so long that SDKs would not wait."""
    return {"retry-after": str(max(1, min(MAX_RETRY_AFTER_S, round(seconds))))}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route that may answer with these statuses."""
    content = {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {s: {"description": _title(s), "content": content} for s in statuses}


def install(app: FastAPI) -> None:
    """Make ``app`` answer every exception as a problem."""
    for kind in (LongtakeError, HTTPException, RequestValidationError, DBAPIError):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(PoolTimeoutError, _handle)


async def _handle(request: Request, error: Exception) -> Response:
    answer = api_error(error)
    request_id = getattr(request.state, "request_id", None)
    if answer.status == 500:
        LOG.error("request failed", exc_info=error, extra={"request_id": request_id})
    return ProblemResponse(answer, request_id)


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _detail(error: HTTPException) -> str:
    return str(error.detail) if error.detail else _title(error.status_code)


def _request_error(error: RequestError) -> ApiError:
    field = REST_NAMES.get(error.field, error.field)
    message = str(error)
    if isinstance(error, MediaError):
        # its value is a path of the server
        message = message.replace(f"{error.field}={error.value}", field, 1)
    elif field != error.field and message.startswith(f"{error.field}="):
        message = field + message[len(error.field) :]
    if isinstance(error, TooLargeError):
        return ApiError(413, message, code="too_large", param=field)
    return ApiError(400, message, code="invalid_value", param=field)


def _validation_error(error: RequestValidationError) -> ApiError:
    """FastAPI's own checks of path, query and body, in the words of this API."""
    faults = [(_pointer(item["loc"]), _reason(item)) for item in error.errors()]
    pointer, detail = faults[0] if faults else ("", "is not of the form that this route takes")
    param = pointer.rsplit("/", 1)[-1] or None
    message = f"{param}: {detail}" if param else detail
    return ApiError(400, message, code="invalid_request", param=param, errors=faults)


def _reason(item: Mapping[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        return "no such parameter"
    return str(item["msg"]).removeprefix("Value error, ")


def _pointer(location: Sequence[int | str]) -> str:
    """``("body", "a", 0)`` as ``/a/0``."""
    parts = [str(part).replace("~", "~0").replace("/", "~1") for part in location[1:]]
    return "".join(f"/{part}" for part in parts)
