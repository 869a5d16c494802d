"""Requests made from docs/openapi.json, against the application in this process.

Few for each operation here; many with ``LONGTAKE_SOAK=1`` (``make soak``). Streams of events are
left out: they do not end.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import requests
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from longtake.api.app import create_app
from longtake.queue.database import upgrade
from longtake.settings import Settings

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"
STREAMS = {"/v1/events", "/v1/videos/{video_id}/events"}
LONG = os.environ.get("LONGTAKE_SOAK") == "1"
EXAMPLES = 150 if LONG else 4
ANSWER_S = 20
SCHEMA = schemathesis.openapi.from_path(COMMITTED)
OPERATIONS = {
    operation.label: operation
    for operation in (cast(Any, result).ok() for result in SCHEMA.get_all_operations())
    if operation.path not in STREAMS
}


class Api:
    """The application on a free port, and things in it that requests can be about."""

    def __init__(self, data: Path) -> None:
        configured = Settings(
            data_dir=data,
            min_free_bytes=0,
            max_queued=100_000,
            webhook_timeout_s=0.2,
            allow_private_addresses=True,
        )
        upgrade(configured.database)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(
            create_app(configured), log_config=None, access_log=False, lifespan="on"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=ANSWER_S, trust_env=False)
        self.http.get("/healthz").raise_for_status()
        self.session = requests.Session()
        self.session.trust_env = False
        self._make: dict[str, Callable[[], httpx.Response]] = {
            "video_id": lambda: self.http.post("/v1/videos", json=self._video()),
            "batch_id": lambda: self.http.post("/v1/batches", json={"items": [self._video()]}),
            "webhook_id": lambda: self.http.post(
                "/v1/webhooks",
                json={"name": "one", "url": f"{self.url}/hook", "event_types": ["video.completed"]},
            ),
        }

    def existing(self, name: str) -> str | None:
        """The id of something that a path parameter may name; None where nothing is made."""
        make = self._make.get(name)
        if make is None:
            return None
        if name == "webhook_id":  # of which there may be 50
            for there in self.http.get("/v1/webhooks").json()["data"]:
                return str(there["id"])
        answer = make()
        assert answer.is_success, answer.text
        found: str = answer.json()["id"]
        return found

    def close(self) -> None:
        self.http.close()
        self.session.close()
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    @staticmethod
    def _video() -> dict[str, Any]:
        return {"prompt": "a red ball", "num_frames": 9}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One application for all operations."""
    running = Api(tmp_path_factory.mktemp("schema"))
    yield running
    running.close()


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_one_that_the_document_knows(api: Api, label: str) -> None:
    """Legal and illegal requests, of things that are there and of things that are not."""
    operation = OPERATIONS[label]
    known = {int(status) for status in operation.definition.raw["responses"]}
    cases = st.one_of(*_strategies(operation))

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink) if LONG else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, real=st.booleans())
    def ask(case: schemathesis.Case[Any], real: bool) -> None:
        if real:
            for name in dict(case.path_parameters or {}):
                case.path_parameters[name] = api.existing(name) or case.path_parameters[name]
        answer = case.call(base_url=api.url, session=api.session, timeout=ANSWER_S)
        told = f"{case.as_curl_command()}\n{answer.status_code} {answer.text[:2000]}"
        assert answer.status_code in known, told
        if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE, told
            assert answer.headers.get("retry-after"), told

    ask()


def _strategies(operation: Any) -> list[st.SearchStrategy[schemathesis.Case[Any]]]:
    """Cases that fit the document, and cases that do not where there is a way not to."""
    found = [operation.as_strategy(generation_mode=GenerationMode.POSITIVE)]
    if operation.body or any(map(len, (operation.query, operation.path_parameters))):
        found.append(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    return found


def test_streams_alone_are_left_out() -> None:
    assert len(OPERATIONS) + len(STREAMS) == sum(1 for _ in SCHEMA.get_all_operations())
