"""The owner's side: submit, quotas, idempotency, edit, cancel, retry, trash and delete."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select, text, update

from longtake.errors import ConflictError, LeaseLostError, LimitError, NotFoundError, RequestError
from longtake.queue.batches import Batches
from longtake.queue.gathering import Call
from longtake.queue.intake import Intake, Submission
from longtake.queue.outbox import Outbox
from longtake.queue.policy import Policy
from longtake.queue.records import ArtifactKind, Job, JobState, Relation
from longtake.queue.store import Store
from longtake.queue.tables import artifacts, attempts, chunks, idempotency, jobs, usage

if TYPE_CHECKING:
    from tests.queue.conftest import Desk


def test_what_is_submitted_is_what_is_stored(desk: Desk) -> None:
    job = desk.submit(
        "für Élise, 雨",
        request={"prompt": "für Élise, 雨", "seed": 2**31, "lora": [{"path": "x", "scale": 0.5}]},
        priority=3,
        tags=("a", "b"),
        parent_id="video_x",
        relation=Relation.REMIX,
        batch_index=4,
    )
    assert desk.get(job) == job
    assert (job.state, job.priority, job.tags) == (JobState.QUEUED, 3, ("a", "b"))
    assert (job.relation, job.parent_id, job.batch_index) == (Relation.REMIX, "video_x", 4)
    assert job.request["lora"] == [{"path": "x", "scale": 0.5}]
    assert (job.fence, job.attempt, job.error, job.max_attempts) == (0, 0, None, 5)
    assert desk.told(job) == ["queued"]
    assert [tick.queue for tick in desk.store.outbox.pending()] == ["default"]


def test_one_submission_keeps_its_order(desk: Desk) -> None:
    made = desk.store.submissions.submit([desk.new(str(number)) for number in range(30)])
    assert [job.prompt for job in made] == [str(number) for number in range(30)]
    assert [desk.claim().id for _ in made] == [job.id for job in made]
    page = desk.store.listings.page("local", order="asc", limit=100)
    assert [job.id for job in page.jobs] == [job.id for job in made]


def test_a_queue_that_is_full_takes_no_more(desk: Desk) -> None:
    submit, limits = desk.store.submissions.submit, {"max_queued": 2}
    submit([desk.new()], limits)
    with pytest.raises(LimitError) as refused:
        submit([desk.new(), desk.new()], limits)
    assert (refused.value.code, refused.value.retry_after_s) == ("queue_full", 60)
    submit([desk.new()], limits)
    with pytest.raises(LimitError, match="2 videos are queued"):
        submit([desk.new()], limits)
    submit([desk.new(owner="other")], limits)
    desk.claim()
    submit([desk.new()], limits)
    assert desk.store.listings.counts("local")[JobState.QUEUED] == 2


def test_many_threads_do_not_pass_a_quota_together(desk: Desk, two_stores: list[Store]) -> None:
    refused: list[LimitError] = []

    def work(store: Store) -> None:
        for _ in range(5):
            try:
                store.submissions.submit([desk.new()], {"max_queued": 8})
            except LimitError as error:
                refused.append(error)

    threads = [threading.Thread(target=work, args=(two_stores[n % 2],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert desk.store.listings.counts()[JobState.QUEUED] == 8
    assert len(refused) == 12


def test_engine_seconds_of_a_day_are_limited_and_outlive_their_job(desk: Desk) -> None:
    limits = {"max_running_s": 100}
    job = desk.submit()
    job = desk.claim()
    _shift(desk, attempts, "started_at", -150)
    with pytest.raises(LimitError, match="150 of 100 engine seconds"):
        desk.store.submissions.submit([desk.new()], limits)
    desk.complete(job)
    desk.store.submissions.delete(job.id, "local")
    assert 150 <= desk.store.listings.usage("local")["running_s"] < 160
    with pytest.raises(LimitError) as refused:
        desk.store.submissions.submit([desk.new()], limits)
    assert refused.value.code == "running_quota"
    _shift(desk, usage, "hour", -25)
    desk.store.submissions.submit([desk.new()], limits)


def test_stored_bytes_are_limited(desk: Desk) -> None:
    limits = {"max_bytes": 25}
    job = desk.submit()
    job = desk.claim()
    desk.store_chunk(job, 0)
    loose = desk.file(job, ArtifactKind.INPUT, "x", job_id=None, key="inputs/x", size=4)
    desk.store.files.add(loose)
    desk.store.submissions.submit([desk.new()], limits)
    desk.complete(job)
    assert desk.store.listings.usage("local")["bytes"] == 34 == desk.store.files.stored_bytes()
    with pytest.raises(LimitError, match="34 of 25 bytes") as refused:
        desk.store.submissions.submit([desk.new()], limits)
    assert refused.value.code == "storage_quota"
    desk.store.submissions.delete(job.id, "local")
    desk.store.submissions.submit([desk.new()], limits)


def test_a_repeated_key_returns_the_job_made_then(desk: Desk) -> None:
    submit, key = desk.store.submissions.submit, ("key", "print")
    [job] = submit([desk.new()], {"max_queued": 1}, idempotency=key)
    assert submit([desk.new()], {"max_queued": 1}, idempotency=key) == [job]
    with pytest.raises(ConflictError) as other:
        submit([desk.new()], idempotency=("key", "another"))
    assert other.value.code == "idempotency_mismatch"
    [theirs] = submit([desk.new(owner="other")], idempotency=("key", "another"))
    assert theirs.id != job.id
    assert desk.store.listings.counts()[JobState.QUEUED] == 2
    assert len(desk.store.outbox.pending()) == 2


def test_one_key_from_many_threads_makes_one_job(desk: Desk, two_stores: list[Store]) -> None:
    made: list[str] = []

    def work(store: Store) -> None:
        for key in "abcd":
            [job] = store.submissions.submit([desk.new()], idempotency=(key, "print"))
            made.append(job.id)

    threads = [threading.Thread(target=work, args=(two_stores[n % 2],)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 24
    assert len(set(made)) == 4


def test_a_key_is_forgotten_after_its_time_and_never_makes_a_deleted_job_again(
    desk: Desk,
) -> None:
    submit, key = desk.store.submissions.submit, ("key", "print")
    [job] = submit([desk.new()], idempotency=key)
    desk.store.submissions.delete(job.id, "local")
    with pytest.raises(NotFoundError, match=job.id):
        submit([desk.new()], idempotency=key)
    assert desk.store.submissions.forget_idempotency() == 0
    _shift(desk, idempotency, "created_at", -Policy().idempotency_s - 1)
    [new] = submit([desk.new()], idempotency=key)
    assert new.id != job.id
    _shift(desk, idempotency, "created_at", -Policy().idempotency_s - 1)
    assert desk.store.submissions.forget_idempotency() == 1


def test_a_batch_and_its_jobs_are_stored_together(desk: Desk) -> None:
    batches, submit = desk.store.batches, desk.store.submissions.submit
    batch = batches.new("local", "night", 3, [{"index": 1, "error": "no prompt"}])
    new = [desk.new(str(index), batch_id=batch.id, batch_index=index) for index in (2, 0)]
    with pytest.raises(LimitError):
        submit(new, {"max_queued": 1}, batch=batch)
    with pytest.raises(NotFoundError):
        batches.get(batch.id)
    made = submit(new, batch=batch, idempotency=("key", "print"))
    stored = batches.get(batch.id, "local")
    assert stored == replace(batch, created_at=stored.created_at)
    assert [job.batch_index for job in batches.results(batch.id)] == [0, 2]
    replayed = submit(new, batch=batch, idempotency=("key", "print"))
    assert {job.id for job in replayed} == {job.id for job in made}
    with pytest.raises(NotFoundError):
        batches.get(batch.id, "other")


def test_inputs_belong_to_one_job(desk: Desk) -> None:
    job = desk.submit()
    files = desk.store.files
    image = desk.file(job, ArtifactKind.INPUT, "x", job_id=None, key="inputs/x")
    files.add(image)
    [taken] = desk.store.submissions.submit([desk.new(inputs=(image.id,))])
    assert [one.id for one in files.of_job(taken.id, ArtifactKind.INPUT)] == [image.id]
    assert desk.get(taken).bytes_stored == 10
    for who in ("local", "other"):
        with pytest.raises(NotFoundError, match=image.id):
            desk.store.submissions.submit([desk.new(owner=who, inputs=(image.id,))])
    assert desk.store.listings.counts()[JobState.QUEUED] == 2


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
    renewal = desk.store.leases.renew(job.id, job.fence, 60)
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


def test_a_crash_before_the_commit_leaves_nothing(store: Store, desk: Desk) -> None:
    with store.db.engine.connect() as conn:
        event_table = "events"
        fail = {
            "sqlite": f"CREATE TRIGGER broken BEFORE INSERT ON {event_table} "
            "BEGIN SELECT RAISE(ABORT, 'broken'); END",
            "postgresql": "ALTER TABLE events ADD CONSTRAINT broken CHECK (type = 'none')",
        }[store.db.dialect]
        conn.execute(text(fail))
        conn.commit()
    try:
        with pytest.raises(Exception, match="broken"):
            desk.submit()
        assert store.listings.page(None).jobs == []
        assert store.outbox.pending() == []
    finally:
        if store.db.dialect == "postgresql":
            with store.db.write() as conn:
                conn.execute(text("ALTER TABLE events DROP CONSTRAINT broken"))


def _shift(desk: Desk, table: Any, column: str, by: float) -> None:
    """Move a time of all rows of a table."""
    with desk.store.db.write() as conn:
        conn.execute(update(table).values({column: table.c[column] + by}))


def test_jobs_of_several_owners_are_no_submission(desk: Desk) -> None:
    with pytest.raises(ValueError, match="one owner"):
        desk.store.submissions.submit([desk.new(), desk.new(owner="other")])
    with pytest.raises(ValueError, match="one job or one batch"):
        desk.store.submissions.submit([desk.new(), desk.new()], idempotency=("k", "f"))
    assert desk.store.submissions.submit([]) == []
    with desk.store.db.read() as conn:
        assert conn.execute(select(func.count()).select_from(jobs)).scalar() == 0


def test_a_batch_of_nothing_valid_is_kept(desk: Desk) -> None:
    batch = desk.store.batches.new("local", None, 1, [{"index": 0, "error": "bad"}])
    made: list[Job] = desk.store.submissions.submit([], batch=batch, idempotency=("k", "f"))
    assert made == []
    assert desk.store.batches.get(batch.id).invalid == ({"index": 0, "error": "bad"},)
    assert desk.store.submissions.submit([], batch=batch, idempotency=("k", "f")) == []


def test_one_bad_submission_of_a_group_is_refused_alone(desk: Desk) -> None:
    limits, outcomes = {"max_queued": 3}, []

    def work(number: int) -> None:
        inputs = ("file_nobody_has",) if number % 2 else ()
        try:
            desk.store.submissions.submit([desk.new(inputs=inputs)], limits)
            outcomes.append("made")
        except (LimitError, NotFoundError) as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    with desk.store.db.write():  # on SQLite they come together while this is open
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["LimitError"] * 3 + ["NotFoundError"] * 6 + ["made"] * 3
    assert desk.store.listings.counts()[JobState.QUEUED] == 3


def test_twins_of_one_group_are_stored_once(desk: Desk) -> None:
    db, files = desk.store.db, desk.store.files
    upload = desk.file(desk.submit(), ArtifactKind.INPUT, "x", job_id=None, key="inputs/x")
    files.add(upload)
    intake = Intake(db, desk.store.events, files, Outbox(db), Batches(db), Policy())
    group: list[Call[Submission, list[Job]]] = [
        Call(Submission("local", [desk.new("a")], {}, ("key", "print"), None)),
        Call(Submission("local", [desk.new("a")], {}, ("key", "print"), None)),
        Call(Submission("local", [desk.new("b", inputs=(upload.id,))], {}, None, None)),
        Call(Submission("local", [desk.new("c", inputs=(upload.id,))], {}, None, None)),
    ]
    intake.take_group(group)
    assert [call.done for call in group] == [True, False, True, False]
    intake.take_group([call for call in group if not call.done])
    assert group[1].result == group[0].result
    assert isinstance(group[3].error, NotFoundError)
    assert desk.store.listings.counts()[JobState.QUEUED] == 3
