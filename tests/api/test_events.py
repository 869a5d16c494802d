"""Server-sent events over a real connection: nothing lost, nothing twice, and an end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from longtake.api import events as streams
from longtake.api.events import Hub, Stream, close_streams
from longtake.errors import LimitError
from longtake.queue.records import Job
from longtake.queue.store import Store

if TYPE_CHECKING:
    from tests.api.conftest import MakeSite, Site

Frame = dict[str, str]


def parse(block: str) -> Frame:
    """The fields of one event; a comment is a field without a name."""
    fields: Frame = {}
    for line in block.splitlines():
        name, _, value = line.partition(":")
        fields[name] = value.removeprefix(" ")
    return fields


class Listener:
    """One open stream."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.blocks = self._read()

    def _read(self) -> Iterator[str]:
        text = ""
        for part in self.answer.iter_text():
            text += part
            while "\n\n" in text:
                block, text = text.split("\n\n", 1)
                yield block

    def frame(self) -> Frame:
        return parse(next(self.blocks))

    def event(self) -> dict[str, Any]:
        """The next event's data; comments and the opening are passed over."""
        while True:
            frame = self.frame()
            if "data" in frame and frame.get("event") != "stream.ready":
                data: dict[str, Any] = json.loads(frame["data"])
                assert frame["id"] == str(data["seq"])
                assert frame["event"] == data["type"]
                return data

    def types(self, count: int) -> list[str]:
        return [self.event()["type"].removeprefix("video.") for _ in range(count)]

    def rest(self) -> list[str]:
        """Types of all events until the server ends the stream."""
        frames = [parse(block) for block in self.blocks]
        return [frame["event"].removeprefix("video.") for frame in frames if "event" in frame]


@contextmanager
def listen(site: Site, path: str, last: int | None = None) -> Iterator[Listener]:
    headers = {} if last is None else {"last-event-id": str(last)}
    with site.http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        yield Listener(answer)


def run_to_the_end(site: Site, job: Job) -> None:
    """Claim, make progress and complete, as a worker does."""
    leases = site.service.store.leases
    claimed = leases.claim("worker-1", "default", loaded_model=None, affinity_s=0, lease_s=60)
    assert claimed is not None
    assert claimed.id == job.id
    site.service.store.held.renew(job.id, claimed.fence, 60, {"phase": "generating", "step": 1})
    leases.complete(job.id, claimed.fence, [], {})


def test_one_video_is_followed_from_its_beginning_to_its_end(api: Site) -> None:
    job = api.submit()
    with listen(api, f"/v1/videos/{job.id}/events") as stream:
        assert stream.answer.headers["content-type"].startswith("text/event-stream")
        assert stream.answer.headers["cache-control"] == "no-cache"
        assert stream.answer.headers["x-accel-buffering"] == "no"
        assert int(stream.frame()["retry"]) > 0
        queued = stream.event()
        assert (queued["id"], queued["status"]) == (job.id, "queued")

        # read as it is told: progress is forgotten once a video is finished
        leases = api.service.store.leases
        claimed = leases.claim("worker-1", "default", loaded_model=None, affinity_s=0, lease_s=60)
        assert claimed is not None
        assert stream.event()["status"] == "in_progress"
        api.service.store.held.renew(job.id, claimed.fence, 60, {"phase": "generating", "step": 1})
        assert stream.event()["x_progress"]["step"] == 1
        leases.complete(job.id, claimed.fence, [], {})
        assert stream.event()["status"] == "completed"
        assert stream.rest() == []


def test_a_client_that_comes_back_is_told_the_rest_and_then_no_more(api: Site) -> None:
    job = api.submit()
    path = f"/v1/videos/{job.id}/events"
    with listen(api, path) as stream:
        first = stream.event()["seq"]
    run_to_the_end(api, job)

    with listen(api, path, last=first) as stream:
        # progress is forgotten once a video is finished
        assert stream.rest() == ["started", "completed"]
    last = api.service.store.events.latest(job_id=job.id)
    assert api.http.get(path, headers={"last-event-id": str(last)}).status_code == 204
    assert api.http.get(path, params={"last_event_id": str(last)}).status_code == 204
    with listen(api, path, last=last + 1000) as stream:  # the id of another database
        assert stream.rest() == ["queued", "started", "completed"]


def test_a_retried_video_goes_on_after_its_failure(api: Site) -> None:
    store, job = api.service.store, api.submit()
    store.submissions.cancel(job.id, None)
    store.submissions.retry(job.id, None)
    with listen(api, f"/v1/videos/{job.id}/events") as stream:
        assert stream.types(3) == ["queued", "cancelled", "requeued"]
        run_to_the_end(api, job)
        assert stream.rest()[-1] == "completed"


def test_a_deleted_video_ends_its_stream(api: Site) -> None:
    job = api.submit()
    with listen(api, f"/v1/videos/{job.id}/events") as stream:
        assert stream.types(1) == ["queued"]
        api.service.store.submissions.delete(job.id, None)
        assert stream.rest() == ["deleted"]
    assert api.http.get(f"/v1/videos/{job.id}/events").status_code == 404


def test_all_videos_of_an_owner_on_one_stream_and_nobody_elses(site: Site) -> None:
    before = site.submit()
    with listen(site, "/v1/events") as stream:
        ready = stream.frame()
        assert ready["event"] == "stream.ready"
        foreign = site.submit(owner="key_somebody")
        mine = [site.submit(), site.submit()]
        assert [stream.event()["id"] for _ in mine] == [job.id for job in mine]
    with listen(site, "/v1/events", last=int(ready["id"])) as stream:
        assert [stream.event()["id"] for _ in mine] == [job.id for job in mine]
    with listen(site, f"/v1/events?ids={mine[1].id}&types=video.queued,video.cancelled") as stream:
        stream.frame()
        for job in (before, *mine):
            site.service.store.submissions.edit(job.id, None, {"starred": True})
            site.service.store.submissions.cancel(job.id, None)
        told = stream.event()
        assert (told["id"], told["type"]) == (mine[1].id, "video.cancelled")
    answer = site.http.get(f"/v1/videos/{foreign.id}/events")
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/events?types=video.queued,nonsense", {}),
        ("/v1/events", {"last-event-id": "-1"}),
        ("/v1/events", {"last-event-id": "9" * 30}),
        ("/v1/events?last_event_id=1%0Aevent:x", {}),
        ("/v1/events?ids=" + ",".join(f"video_{k}" for k in range(501)), {}),
    ],
)
def test_what_is_not_legal_is_refused(api: Site, path: str, headers: dict[str, str]) -> None:
    assert api.http.get(path, headers=headers).status_code == 400


def test_nothing_is_lost_or_told_twice_while_many_write_and_clients_come_and_go(
    api: Site,
) -> None:
    """Four writers, one client that comes back after every three events."""
    start = api.service.store.events.latest()
    writers = [threading.Thread(target=lambda: [api.submit() for _ in range(5)]) for _ in range(4)]
    for writer in writers:
        writer.start()
    seen: list[int] = []
    while len(seen) < 20:
        with listen(api, "/v1/events", last=seen[-1] if seen else start) as stream:
            for _ in range(min(3, 20 - len(seen))):
                seen.append(stream.event()["seq"])
    for writer in writers:
        writer.join()
    assert seen == [event.seq for event in api.service.store.events.read(start)]


async def frames_of(hub: Hub, stream: Stream, count: int) -> list[str]:
    """Types of the next ``count`` frames."""
    found: list[str] = []
    async for data in hub.open(stream):
        found += [parse(block).get("event", "") for block in data.decode().split("\n\n") if block]
        if len(found) >= count:
            return found
    return found


def test_a_client_that_does_not_read_holds_up_nobody_and_catches_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BUFFER", 4)
    store = site.service.store

    async def scenario() -> tuple[list[str], int]:
        hub = Hub(store)
        slow = Stream("local", store.events.latest())
        frames = hub.open(slow)
        await anext(frames)  # it is registered, and reads nothing from here on
        waiting = asyncio.ensure_future(anext(frames))
        await asyncio.to_thread(site.submit)
        await waiting
        quick = Stream("local", store.events.latest())
        reading = asyncio.create_task(frames_of(hub, quick, 13))
        while quick not in hub.streams or quick.behind:
            await asyncio.sleep(0)
        jobs = [await asyncio.to_thread(site.submit) for _ in range(12)]
        told = await reading
        assert slow.behind
        assert not slow.buffer
        seqs: list[int] = []
        while len(seqs) < len(jobs):
            data = (await anext(frames)).decode()
            seqs += [int(parse(block)["id"]) for block in data.split("\n\n") if block]
        await frames.aclose()
        return told, len(set(seqs))

    told, caught_up = asyncio.run(scenario())
    assert told == ["stream.ready", *["video.queued"] * 12]
    assert caught_up == 12


def test_an_idle_stream_has_a_heartbeat_and_the_poller_ends_with_the_last_one(
    site: Site,
) -> None:
    async def scenario() -> None:
        hub = Hub(site.service.store, heartbeat_s=0.01)
        frames = hub.open(Stream("local", 0))
        await anext(frames)
        assert await anext(frames) == b": \n\n"
        poller = hub._poller
        assert poller is not None
        await frames.aclose()
        assert not hub.streams
        hub.nudge()
        await poller

    asyncio.run(scenario())


def test_a_client_that_leaves_is_forgotten_at_once(site: Site) -> None:
    with listen(site, "/v1/events") as stream:
        stream.frame()
        hub: Hub = site.app.state.events
        assert len(hub.streams) == 1
    # long before the heartbeat, which would notice it too
    while hub.streams:
        assert site.http.get("/healthz").status_code == 200


def test_one_owner_cannot_take_all_streams(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_OWNER_STREAMS", 1)

    async def scenario() -> None:
        hub = Hub(site.service.store)
        frames = hub.open(Stream("local", 0))
        await anext(frames)
        with pytest.raises(LimitError):
            hub.open(Stream("local", 0))
        hub.open(Stream("another", 0))
        await frames.aclose()

    asyncio.run(scenario())


def test_all_streams_read_the_log_through_one_poller(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    store: Store = site.service.store
    read = store.events.read

    def counted(after: int, **scope: Any) -> Any:
        if not scope.keys() & {"job_id", "owner"}:
            reads.append(threading.get_ident())
        return read(after, **scope)

    monkeypatch.setattr(store.events, "read", counted)

    async def scenario() -> None:
        hub = Hub(store)
        several = [hub.open(Stream("local", store.events.latest())) for _ in range(20)]
        for frames in several:
            await anext(frames)
        waiting = [asyncio.ensure_future(anext(frames)) for frames in several]
        await asyncio.sleep(0)
        await asyncio.to_thread(site.submit)
        await asyncio.gather(*waiting)
        assert len([task for task in asyncio.all_tasks() if task.get_name() == "events"]) == 1
        for frames in several:
            await frames.aclose()

    asyncio.run(scenario())
    assert len(reads) < 20


def test_a_server_that_stops_does_not_wait_for_its_streams(make_site: MakeSite) -> None:
    site = make_site()
    with listen(site, "/v1/events") as stream:
        stream.frame()
        site.submit()
        stream.frame()  # from here on it waits for the next one
        close_streams(site.app)
        # the heartbeat would be the next thing to come, and then the end
        assert list(stream.blocks) == []
    answer = site.http.get("/v1/events")
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


def test_the_stream_of_a_revoked_key_ends(api: Site) -> None:
    keys = api.service.store.keys
    key, _ = keys.create("a laptop")
    other, _ = keys.create("another")

    async def follow() -> None:
        hub = Hub(api.service.store, heartbeat_s=0.01)
        ends, stays = (hub.open(Stream(one.id, 0)) for one in (key, other))
        await anext(ends)
        await anext(stays)
        keys.revoke(key.id)
        async for frame in ends:
            assert frame.startswith(b":")
        await anext(stays)
        hub.close()
        async for _ in stays:
            pass

    asyncio.run(asyncio.wait_for(follow(), 30))
