"""Taking jobs in: what is stored, quotas, idempotency keys, batches, groups of submissions."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select, text, update

from longtake.errors import ConflictError, LimitError, NotFoundError
from longtake.queue.batches import Batches
from longtake.queue.gathering import Call
from longtake.queue.intake import Intake, Submission
from longtake.queue.outbox import Outbox
from longtake.queue.policy import Policy
from longtake.queue.records import ArtifactKind, Job, JobState, Relation
from longtake.queue.store import Store
from longtake.queue.tables import attempts, idempotency, jobs, usage

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
