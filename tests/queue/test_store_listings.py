"""Reading: pages and their filters, places in the queue, counts; nothing scans the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, update

from longtake.errors import NotFoundError
from longtake.queue.listings import Filters
from longtake.queue.records import Job, JobState
from longtake.queue.tables import jobs

if TYPE_CHECKING:
    from tests.queue.conftest import Desk


def _prompts(desk: Desk, **filters: Any) -> list[str]:
    page = desk.store.listings.page("local", filters=Filters(**filters), limit=100, order="asc")
    return [job.prompt for job in page.jobs]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_cover_everything_once(desk: Desk, order: Any) -> None:
    made = desk.store.submissions.submit([desk.new(str(number)) for number in range(25)])
    with desk.store.db.write() as conn:  # equal times: the id decides
        conn.execute(update(jobs).where(jobs.c.id.in_([one.id for one in made[5:15]])).values(
            created_at=made[5].created_at))  # fmt: skip
    desk.submit("theirs", owner="other")
    seen: list[Job] = []
    after = None
    for expected in (10, 10, 5):
        page = desk.store.listings.page("local", after, 10, order)
        assert len(page.jobs) == expected
        assert page.has_more == (expected == 10)
        seen += page.jobs
        after = page.jobs[-1].id
    assert {job.id for job in seen} == {job.id for job in made}
    times = [job.created_at for job in seen]
    assert times == sorted(times, reverse=order == "desc")
    assert desk.store.listings.page("local", after, 10, order).jobs == []
    assert len(desk.store.listings.page(None, limit=100).jobs) == 26


def test_a_page_goes_on_after_a_job_deleted_meanwhile(desk: Desk) -> None:
    made = desk.store.submissions.submit([desk.new(str(number)) for number in range(6)])
    page = desk.store.listings.page("local", limit=2)
    for job in page.jobs:
        desk.store.submissions.delete(job.id, "local")
    following = desk.store.listings.page("local", page.jobs[-1].id, 2)
    assert [job.id for job in following.jobs] == [made[3].id, made[2].id]
    for owner, after in (("other", page.jobs[-1].id), ("other", made[0].id), ("local", "video_x")):
        with pytest.raises(NotFoundError):
            desk.store.listings.page(owner, after)


def test_filters(desk: Desk) -> None:
    first = desk.submit("A Red boat", model="papercut", tags=("sea", "red"), batch_id="batch_1")
    second = desk.submit("100% blue_sky", parent_id=first.id, request={"seed": 2**40}, model="m")
    third = desk.submit("ÄÖÜ kite", request={"seed": 8})
    edit = desk.store.submissions.edit
    edit(third.id, "local", {"starred": True})
    desk.store.submissions.trash(first.id, "local")
    assert _prompts(desk) == ["100% blue_sky", "ÄÖÜ kite"]
    assert _prompts(desk, trashed=True) == ["A Red boat"]
    assert len(_prompts(desk, trashed=None)) == 3
    for filters, prompts in (
        ({"text": "rED b"}, ["A Red boat"]),
        ({"text": "0% BLUE_"}, ["100% blue_sky"]),
        ({"text": "b%e"}, []),
        ({"text": "ue sea"}, []),
        ({"text": "SKY  100%"}, ["100% blue_sky"]),
        ({"text": "boat A"}, ["A Red boat"]),
        ({"text": "boat a_"}, []),
        ({"text": " "}, ["A Red boat", "100% blue_sky", "ÄÖÜ kite"]),
        ({"text": "KITE"}, ["ÄÖÜ kite"]),
        ({"model": "m"}, ["100% blue_sky"]),
        ({"tag": "sea"}, ["A Red boat"]),
        ({"tag": "se"}, []),
        ({"batch_id": "batch_1"}, ["A Red boat"]),
        ({"parent_id": first.id}, ["100% blue_sky"]),
        ({"seed": 2**40}, ["100% blue_sky"]),
        ({"seed": 8}, ["ÄÖÜ kite"]),
        ({"starred": True}, ["ÄÖÜ kite"]),
        ({"starred": False}, ["A Red boat", "100% blue_sky"]),
        ({"state": JobState.CANCELLED}, ["A Red boat"]),
        ({"state": JobState.QUEUED, "model": "m"}, ["100% blue_sky"]),
        ({"created_after": second.created_at}, ["100% blue_sky", "ÄÖÜ kite"]),
        ({"created_before": second.created_at}, ["A Red boat"]),
    ):
        assert _prompts(desk, trashed=None, **filters) == prompts, filters


def test_places_follow_priority_owners_in_turn_and_position(desk: Desk) -> None:
    for owner, count in (("b", 3), ("a", 2), ("c", 1)):
        for number in range(count):
            desk.submit(f"{owner}{number}", owner=owner)
    desk.submit("urgent", owner="b", priority=1)
    paused = desk.submit("paused", owner="a", priority=0)
    desk.store.submissions.edit(paused.id, "a", {"paused": True})
    queued = desk.store.listings.page(None, limit=100).jobs
    places = desk.store.listings.positions(queued)
    assert paused.id not in places
    expected = sorted(places, key=places.__getitem__)
    assert sorted(places.values()) == list(range(7))
    claimed = []
    while queued := desk.store.listings.page(None, filters=Filters(state=JobState.QUEUED)).jobs:
        now = desk.store.listings.positions(queued)
        if not now:
            break
        job = desk.claim()
        # what was just served moves its owner back, so look again at each turn
        assert now[job.id] == 0
        assert desk.store.listings.position(job) is None
        claimed.append(job.id)
    assert claimed[0] == expected[0]
    assert len(claimed) == 7


def test_places_are_those_of_the_claims_without_served_owners(desk: Desk) -> None:
    for owner, count in (("a", 3), ("b", 1), ("c", 2)):
        for number in range(count):
            desk.submit(f"{owner}{number}", owner=owner)
    queued = desk.store.listings.page(None, limit=100).jobs
    places = desk.store.listings.positions(queued)
    assert [places[desk.claim().id] for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_counts_age_and_usage(desk: Desk) -> None:
    assert desk.store.listings.queue_age() == 0
    for _ in range(3):
        desk.submit()
    desk.submit(owner="other")
    with desk.store.db.write() as conn:
        conn.execute(update(jobs).values(created_at=jobs.c.created_at - 100))
    assert 100 <= desk.store.listings.queue_age() < 160
    desk.complete(desk.claim())
    counts = desk.store.listings.counts()
    assert (counts[JobState.QUEUED], counts[JobState.COMPLETED], counts[JobState.FAILED]) == (
        3,
        1,
        0,
    )
    assert sum(desk.store.listings.counts("other").values()) == 1
    usage = desk.store.listings.usage("local")
    assert (usage["queued"] + desk.store.listings.usage("other")["queued"], usage["bytes"]) in (
        (3, 10),
        (3, 0),
    )


def test_nobody_sees_anothers_job(desk: Desk) -> None:
    job = desk.submit()
    assert desk.store.listings.get(job.id, "local") == job
    assert desk.store.listings.get(job.id) == job
    with pytest.raises(NotFoundError, match=job.id):
        desk.store.listings.get(job.id, "other")
    with pytest.raises(NotFoundError):
        desk.store.listings.get("video_x", "local")


def test_every_list_walks_an_index(desk: Desk) -> None:
    made = desk.store.submissions.submit([desk.new() for _ in range(200)])
    lists = desk.store.listings
    for call in (
        lambda: lists.get(made[0].id),
        lambda: lists.page("local"),
        lambda: lists.page("local", made[50].id, order="asc"),
        lambda: lists.page("local", filters=Filters(state=JobState.FAILED)),
        lambda: lists.page("local", filters=Filters(trashed=True)),
        lambda: lists.page("local", filters=Filters(text="x", tag="y", seed=1)),
        lambda: lists.page("local", filters=Filters(parent_id="video_x")),
        lambda: lists.positions(made[:20]),
        lambda: lists.counts("local"),
        lambda: lists.usage("local"),
        lambda: desk.store.batches.results("batch_x"),
        lambda: desk.store.files.retention(trash_s=1, max_bytes=1),
        lambda: desk.store.leases.expire(),
        lambda: desk.store.leases.reclaim(["w"]),
        lambda: desk.store.submissions.submit([desk.new()], {"max_queued": 1000, "max_bytes": 9}),
    ):
        plans = desk.plans(call)
        assert plans
        assert "SCAN jobs" not in plans.replace("SCAN jobs USING", ""), plans
        assert "Seq Scan on jobs" not in plans, plans


def test_a_page_is_one_statement_and_its_cursor_one_more(desk: Desk) -> None:
    made = desk.store.submissions.submit([desk.new() for _ in range(50)])
    assert _statements(desk, lambda: desk.store.listings.page("local", limit=50)) == 1
    assert _statements(desk, lambda: desk.store.listings.page("local", made[9].id)) == 2
    assert _statements(desk, lambda: desk.store.listings.positions(made)) == 2


def _statements(desk: Desk, call: Any) -> int:
    seen: list[str] = []

    def note(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith("BEGIN"):
            seen.append(statement)

    event.listen(desk.store.db.engine, "before_cursor_execute", note)
    call()
    event.remove(desk.store.db.engine, "before_cursor_execute", note)
    return len(seen)
