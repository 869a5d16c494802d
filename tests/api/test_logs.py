"""Log lines: ids, no secrets, no prompts above debug, one line whatever a client sends."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from longtake.logs import bind, masked, set_up

if TYPE_CHECKING:
    from tests.api.conftest import Site

SetUp = Callable[..., io.StringIO]
LOG = logging.getLogger("longtake.test")


@pytest.fixture
def logs() -> Iterator[SetUp]:
    """Have logs go to a text; as it was afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    levels = {name: logger.level for name, logger in _named()}

    def start(level: str = "info", *, as_json: bool = True) -> io.StringIO:
        text = io.StringIO()
        set_up(level, text, as_json=as_json)
        return text

    yield start
    root.handlers[:], root.level = before
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def _named() -> list[tuple[str, logging.Logger]]:
    known = logging.root.manager.loggerDict.items()
    return [(name, logger) for name, logger in known if isinstance(logger, logging.Logger)]


def lines(text: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.getvalue().splitlines()]


def test_a_line_is_an_object_with_the_ids_of_what_is_going_on(logs: SetUp) -> None:
    text = logs()
    state: dict[str, Any] = {"principal": "not for the log"}
    with bind(state):
        state["request_id"] = "req_1"  # known only after the binding
        with bind({"job_id": "video_1"}):
            LOG.info("made %d frames", 9, extra={"ms": 1.5})
        LOG.warning("half")
    LOG.debug("not shown")

    first, second = lines(text)
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "longtake.test",
        "message": "made 9 frames",
        "request_id": "req_1",
        "job_id": "video_1",
        "ms": 1.5,
    }
    assert (second["request_id"], "job_id" in second) == ("req_1", False)


@pytest.mark.parametrize(("level", "shown"), [("info", False), ("debug", True)])
def test_prompts_are_for_debugging_only(logs: SetUp, level: str, shown: bool) -> None:
    text = logs(level)
    LOG.warning("submitted", extra={"prompt": "a red ball", "prompts": ["blue"], "seed": 7})

    [line] = lines(text)
    assert ("prompt" in line, "prompts" in line) == (shown, shown)
    assert line["seed"] == 7


SECRETS = [
    "lt_abcdefgh_jkmnpqrstuvwxyz23456789",
    "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "Authorization: Bearer sk-abc.def",
    "postgresql+psycopg://longtake:hunter2@db/longtake",
    "redis://:hunter2@broker:6379/0",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_masked_wherever_they_stand(logs: SetUp, secret: str) -> None:
    text = logs()
    LOG.info("got %s", secret, extra={"header": secret})
    try:
        raise ValueError(secret)
    except ValueError:
        LOG.exception("failed")

    tail = secret.rpartition("@")[0].rpartition(":")[2] or secret[-12:]
    assert tail not in text.getvalue()
    assert "***" in masked(secret)
    assert "ValueError" in lines(text)[1]["traceback"]


@pytest.mark.parametrize("as_json", [True, False])
def test_what_a_client_sends_cannot_begin_a_line(logs: SetUp, as_json: bool) -> None:
    text = logs(as_json=as_json)
    LOG.info("GET %s", "/a\r\n2030-01-01 root logged in\x1b[2J\u2028", extra={"agent": "a\nb"})

    assert len(text.getvalue().splitlines()) == 1
    assert "\x1b" not in text.getvalue()


def test_a_request_is_one_line_with_its_id_and_without_its_query(site: Site, logs: SetUp) -> None:
    text = logs()
    path = "/v1/videos/video_1?q=a+red+ball"
    answer = site.http.get(path, headers={"x-request-id": "mine-1"})
    site.http.get("/healthz")
    site.close()

    [line] = [one for one in lines(text) if one["logger"] == "longtake.access"]
    assert line["message"] == "GET /v1/videos/{video_id} 404"
    assert line["request_id"] == answer.headers["x-request-id"] == "mine-1"
    assert line["status"] == 404
    assert line["ms"] >= 0
    assert "red" not in text.getvalue()


def test_prompts_and_keys_of_requests_are_not_in_the_log(site: Site, logs: SetUp) -> None:
    text = logs()
    _, secret = site.service.store.keys.create("mine")
    headers = {"authorization": f"Bearer {secret}"}
    hook = {"name": "a", "url": "https://hooks.example/", "event_types": ["video.failed"]}
    made = site.http.post("/v1/webhooks", json=hook, headers=headers).json()
    body = {"prompt": "a very secret ball", "num_frames": 9}
    for sent in (body, {**body, "seed": -1}, {**body, "nonsense": 1}):
        site.http.post("/v1/videos", json=sent, headers=headers)
    site.http.post("/v1/videos", json=body, headers={"authorization": f"Bearer {secret}x"})
    site.close()

    assert len(lines(text)) >= 5
    for hidden in ("secret ball", secret, secret.rpartition("_")[2], made["signing_secret"]):
        assert hidden not in text.getvalue()
