"""The owner's side: edit, reorder, cancel, retry, trash and delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select

from longtake.errors import ConflictError, LeaseLostError, LimitError, NotFoundError, RequestError
from longtake.queue.records import ArtifactKind, JobState, Relation
from longtake.queue.tables import artifacts, attempts, chunks

if TYPE_CHECKING:
    from tests.queue.conftest import Desk


def test_edit_changes_flags_at_their_time(desk: Desk) -> None:
    edit, job = desk.store.submissions.edit, desk.submit()
    changed = edit(job.id, "local", {"tags": ["x"], "starred": True, "paused": True, "priority": 1})
    assert changed == desk.get(job)
    assert (changed.tags, changed.starred, changed.paused, changed.priority) == (
        ("x",),
        True,
        True,
        1,
    )
    assert desk.store.leases.claim("w", "default") is None
    edit(job.id, "local", {"paused": False})
    running = desk.claim()
    edit(job.id, "local", {"priority": 2})
    for field, value in (("prompt", "new"), ("position", "first")):
        with pytest.raises(ConflictError) as refused:
            edit(job.id, "local", {field: value})
        assert refused.value.code == "not_queued"
    desk.complete(running)
    with pytest.raises(ConflictError, match="completed video"):
        edit(job.id, "local", {"priority": 2})
    assert edit(job.id, "local", {"starred": False}).starred is False
    assert desk.told(job).count("updated") == 4
    with pytest.raises(NotFoundError):
        edit(job.id, "other", {"starred": True})
    for bad in ({"priority": 10}, {"state": "completed"}, {"fence": 0}):
        with pytest.raises(RequestError):
            edit(job.id, "local", bad)


def test_a_new_request_forgets_what_was_made_for_the_old(desk: Desk) -> None:
    job = desk.submit()
    job = desk.claim()
    desk.store_chunk(job, 0)
    desk.store.leases.release(job.id, job.fence, counts=True, strike_chunk=1)
    changes = {"request": {"seed": 1}, "plan": {}, "prompt": "b", "model": "m", "mode": "clip"}
    changed = desk.store.submissions.edit(job.id, "local", changes)
    assert (changed.request, changed.prompt, changed.model, changed.mode) == (
        {"seed": 1}, "b", "m", "clip",
    )  # fmt: skip
    assert (changed.chunks_done, changed.bytes_stored, changed.attempt, changed.strikes) == (0,) * 4
    assert desk.store.listings.chunks(job.id) == []
    assert len(desk.garbage()) == 3
    assert desk.garbage()[-1] == f"jobs/{job.id}/1/"


@pytest.mark.parametrize(
    ("move", "place", "order"),
    [
        ("d", "first", "dabce"),
        ("b", "last", "acdeb"),
        ("e", {"before": "b"}, "aebcd"),
        ("a", {"after": "c"}, "bcade"),
        ("c", {"before": "a"}, "cabde"),
        ("c", {"after": "e"}, "abdec"),
    ],
)
def test_reorder(desk: Desk, move: str, place: Any, order: str) -> None:
    made = {
        job.prompt: job for job in desk.store.submissions.submit([desk.new(x) for x in "abcde"])
    }
    if isinstance(place, dict):
        place = {side: made[other].id for side, other in place.items()}
    desk.store.submissions.edit(made[move].id, "local", {"position": place})
    jobs_now = [desk.get(made[name]) for name in order]
    assert [desk.store.listings.position(job) for job in jobs_now] == [0, 1, 2, 3, 4]
    assert "".join(desk.claim().prompt for _ in order) == order


def test_reorder_never_runs_out_of_room(desk: Desk) -> None:
    a, b, c = desk.store.submissions.submit([desk.new(x) for x in "abc"])
    for turn in range(12):
        moved, other = (c, b) if turn % 2 else (b, c)
        desk.store.submissions.edit(moved.id, "local", {"position": {"after": a.id}})
        assert desk.store.listings.position(desk.get(moved)) == 1
        assert desk.store.listings.position(desk.get(other)) == 2
    assert desk.claim().id == a.id


def test_reorder_takes_the_neighbours_priority_and_only_ones_own(desk: Desk) -> None:
    urgent = desk.submit("urgent", priority=1)
    theirs = desk.submit("theirs", owner="other")
    job = desk.submit("job")
    edit = desk.store.submissions.edit
    moved = edit(job.id, "local", {"position": {"before": urgent.id}})
    assert moved.priority == 1
    assert desk.claim().id == job.id
    with pytest.raises(NotFoundError):
        edit(urgent.id, "local", {"position": {"after": theirs.id}})
    with pytest.raises(RequestError, match="not a place"):
        edit(urgent.id, "local", {"position": "third"})


def test_cancel_of_a_queued_job_is_immediate(desk: Desk) -> None:
    job = desk.submit()
    done = desk.store.submissions.cancel(job.id, "local")
    assert (done.state, done.finished) == (JobState.CANCELLED, True)
    assert done.completed_at is not None
    assert desk.store.leases.claim("w", "default") is None
    assert desk.told(job) == ["queued", "cancelled"]
    assert desk.store.submissions.cancel(job.id, "local") == done
    assert desk.told(job) == ["queued", "cancelled"]


@pytest.mark.parametrize("keep", [True, False])
def test_cancel_of_a_running_job_asks_its_worker(desk: Desk, keep: bool) -> None:
    desk.submit()
    job = desk.claim()
    desk.store_chunk(job, 0)
    asked = desk.store.submissions.cancel(job.id, "local", keep_chunks=keep)
    assert (asked.state, asked.cancel_requested) == (JobState.RUNNING, True)
    desk.store.submissions.cancel(job.id, "local")
    renewal = desk.store.held.renew(job.id, job.fence, 60)
    assert (renewal.cancel_requested, renewal.keep_chunks) == (True, keep)
    files = [desk.file(job, ArtifactKind.VIDEO, "video.mp4")] if keep else []
    done = desk.store.leases.cancelled(job.id, job.fence, files)
    assert (done.state, done.cancel_requested) == (JobState.CANCELLED, False)
    assert desk.told(job) == ["queued", "started", "chunk", "cancelling", "cancelled"]
    assert len(desk.store.listings.chunks(job.id)) == (1 if keep else 0)
    assert desk.get(job).bytes_stored == (30 if keep else 0)
    assert f"jobs/{job.id}/1/" in desk.garbage() or keep
    assert desk.store.leases.cancelled(job.id, job.fence).state == JobState.CANCELLED


def test_a_cancelled_job_is_not_queued_again_by_its_worker(desk: Desk) -> None:
    for how in ("release", "expire", "reclaim"):
        desk.submit(how)
        job = desk.claim()
        desk.store.submissions.cancel(job.id, "local")
        if how == "release":
            desk.store.leases.release(job.id, job.fence, counts=False)
        elif how == "expire":
            desk.lose(job)
            desk.store.leases.expire()
        else:
            desk.store.leases.reclaim(["worker-1"])
        assert desk.get(job).state == JobState.CANCELLED
        assert desk.told(job)[-1] == "cancelled"


def test_retry_goes_on_from_the_chunks_there_are(desk: Desk) -> None:
    desk.submit()
    job = desk.claim()
    desk.store_chunk(job, 0)
    with pytest.raises(ConflictError, match="running"):
        desk.store.submissions.retry(job.id, "local")
    desk.store.leases.fail(job.id, job.fence, {"code": "model_error", "message": "no"})
    assert desk.get(job).error == {"code": "model_error", "message": "no"}
    other = desk.submit()
    with pytest.raises(LimitError) as full:
        desk.store.submissions.retry(job.id, "local", {"max_queued": 1})
    assert full.value.code == "queue_full"
    desk.store.submissions.cancel(other.id, "local")
    again = desk.store.submissions.retry(job.id, "local")
    assert (again.state, again.attempt, again.error, again.completed_at, again.expires_at) == (
        JobState.QUEUED, 0, None, None, None,
    )  # fmt: skip
    assert again.chunks_done == 1
    second = desk.claim()
    assert (second.fence, second.attempt) == (2, 1)
    desk.complete(second)
    with pytest.raises(ConflictError) as refused:
        desk.store.submissions.retry(job.id, "local")
    assert refused.value.code == "not_finished"


@pytest.mark.parametrize("relation", [Relation.EXTEND, Relation.EDIT])
def test_what_another_is_made_from_stays_until_that_is_finished(
    desk: Desk, relation: Relation
) -> None:
    source = desk.submit()
    desk.store.submissions.cancel(source.id, "local")
    child = desk.submit(parent_id=source.id, relation=relation)
    desk.submit(parent_id=source.id, relation=Relation.REMIX)
    for take_away in (desk.store.submissions.delete, desk.store.submissions.retry):
        with pytest.raises(ConflictError, match=child.id) as refused:
            take_away(source.id, "local")
        assert refused.value.code == "in_use"
    desk.store.submissions.cancel(child.id, "local")
    desk.store.submissions.delete(source.id, "local")
    with pytest.raises(NotFoundError, match=source.id):
        desk.submit(parent_id=source.id, relation=relation)
    desk.submit(parent_id=source.id, relation=Relation.REMIX)


def test_trash_hides_cancels_and_restores(desk: Desk) -> None:
    queued, done = desk.submit("queued"), desk.submit("done", priority=0)
    desk.complete(desk.claim())
    for job in (queued, done):
        assert desk.store.submissions.trash(job.id, "local").trashed_at is not None
        desk.store.submissions.trash(job.id, "local")
    assert desk.get(queued).state == JobState.CANCELLED
    assert desk.store.listings.page("local").jobs == []
    assert desk.store.submissions.restore(done.id, "local").trashed_at is None
    desk.store.submissions.restore(done.id, "local")
    assert [job.id for job in desk.store.listings.page("local").jobs] == [done.id]
    assert desk.told(queued) == ["queued", "cancelled", "updated"]


def test_what_the_trash_ended_goes_on_after_restore(desk: Desk) -> None:
    trash, restore = desk.store.submissions.trash, desk.store.submissions.restore
    first, second, third = (desk.submit(name) for name in ("first", "second", "third"))
    running = desk.claim()
    desk.store_chunk(running, 0)
    assert trash(running.id, "local").cancel_requested
    desk.store.leases.cancelled(running.id, running.fence)
    trash(second.id, "local")
    desk.store.submissions.cancel(third.id, "local")
    trash(third.id, "local")
    desk.submit("fourth")
    with pytest.raises(LimitError):
        restore(second.id, "local", {"max_queued": 1})
    back = [restore(job.id, "local") for job in (first, second, third)]
    assert [job.state for job in back] == [JobState.QUEUED, JobState.QUEUED, JobState.CANCELLED]
    assert [job.position for job in back] == [first.position, second.position, third.position]
    assert [job.chunks_done for job in back] == [1, 0, 0]
    assert not any(job.trashed_at or job.cancel_requested for job in back)
    assert desk.told(second)[-3:] == ["updated", "requeued", "updated"]


@pytest.mark.parametrize("state", ["queued", "running", "completed"])
def test_delete_leaves_nothing_but_its_event(desk: Desk, state: str) -> None:
    job = desk.submit()
    if state != "queued":
        job = desk.claim()
        desk.store_chunk(job, 0)
    if state == "completed":
        desk.complete(job)
    desk.store.submissions.delete(job.id, "local")
    with pytest.raises(NotFoundError):
        desk.get(job)
    with pytest.raises(NotFoundError):
        desk.store.submissions.delete(job.id, "local")
    with desk.store.db.read() as conn:
        for table in (artifacts, attempts, chunks):
            assert conn.execute(select(func.count()).select_from(table)).scalar() == 0
    assert desk.told(job) == ["deleted"]
    assert desk.garbage()[-1] == f"jobs/{job.id}/"
    if state == "running":
        with pytest.raises(LeaseLostError):
            desk.store_chunk(job, 1)
        with pytest.raises(LeaseLostError):
            desk.complete(job)


def test_nobody_touches_anothers_job(desk: Desk) -> None:
    job = desk.submit()
    calls = desk.store.submissions
    for act in (calls.cancel, calls.retry, calls.trash, calls.restore, calls.delete):
        with pytest.raises(NotFoundError):
            act(job.id, "other")
    assert desk.get(job) == job
