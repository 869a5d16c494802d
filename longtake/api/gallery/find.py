"""What the gallery is asked to show: the query of a page, and the jobs it finds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from fastapi import Request

from longtake.api.gallery.cards import Card, make_cards
from longtake.api.objects import STATES
from longtake.errors import NotFoundError
from longtake.queue.listings import Filters
from longtake.queue.records import ArtifactKind, Job, JobState
from longtake.queue.store import Store

PAGE_SIZE = 48
MAX_IDS = 200
MAX_SEED_DIGITS = 19  # those of 2**63 - 1


@dataclass(frozen=True, slots=True)
class Query:
    """The fields of the search form; an empty one filters nothing."""

    q: str = ""
    model: str = ""
    state: str = ""
    seed: str = ""
    since: str = ""
    until: str = ""
    tag: str = ""
    batch: str = ""
    stars: str = ""
    trash: str = ""

    @property
    def active(self) -> int:
        """How many of those filter that are folded away."""
        values = (self.model, self.state, self.seed, self.since, self.until, self.tag)
        return sum(bool(v) for v in (*values, self.batch))

    def url(self, **changes: str) -> str:
        """The query as a URL's, with some fields changed."""
        fields = {name: getattr(self, name) for name in self.__slots__} | changes
        return urlencode({name: value for name, value in fields.items() if value})

    @property
    def problems(self) -> list[str]:
        """A sentence for each value that is not understood, and filters nothing."""
        found = []
        if self.state and self.state not in STATES:
            found.append(f'State "{self.state}" is none of {", ".join(STATES)}.')
        if self.seed and self._seed is None:
            found.append(f'Seed "{self.seed}" is not a whole number from 0.')
        for name, date in (("From", self.since), ("Until", self.until)):
            if date and _midnight(date) is None:
                found.append(f'{name} "{date}" is not a date such as 2026-11-30.')
        return found

    @property
    def _seed(self) -> int | None:
        usable = self.seed.isdecimal() and len(self.seed) <= MAX_SEED_DIGITS
        return int(self.seed) if usable else None

    def filters(self) -> Filters:
        """For the store. A value that is of no use, such as half a date, filters nothing."""
        return Filters(
            state=STATES.get(self.state),
            model=self.model or None,
            text=self.q or None,
            batch_id=self.batch or None,
            starred=True if self.stars else None,
            trashed=bool(self.trash),
            tag=self.tag or None,
            seed=self._seed,
            created_after=_midnight(self.since),
            created_before=_midnight(self.until, days=1),
        )

    def shows(self, job: Job) -> bool:
        """True if the job would be among those found."""
        wanted = self.filters()
        seed = job.request.get("seed")
        prompt = job.prompt.casefold()
        after, before = wanted.created_after, wanted.created_before
        return all(
            (
                (job.trashed_at is not None) == wanted.trashed,
                wanted.state in (None, job.state),
                wanted.model in (None, job.model),
                wanted.batch_id in (None, job.batch_id),
                wanted.seed in (None, seed),
                not wanted.starred or job.starred,
                wanted.tag is None or wanted.tag in job.tags,
                all(word in prompt for word in self.q.casefold().split()),
                after is None or job.created_at >= after,
                before is None or job.created_at < before,
            )
        )


@dataclass(frozen=True, slots=True)
class Found:
    """Some cards, and the id after which there are more (None where there are none)."""

    cards: list[Card]
    after: str | None


def query_of(request: Request) -> Query:
    """The query of a request's URL; unknown names are ignored, since links get old."""
    given = request.query_params
    return Query(**{name: given.get(name, "").strip()[:400] for name in Query.__slots__})


def find(store: Store, owner: str, query: Query, after: str | None = None) -> Found:
    """A page of cards, newest first."""
    seq = store.events.latest(owner=owner)
    page = store.listings.page(owner, after, PAGE_SIZE, "desc", query.filters())
    cards = cards_of(store, page.jobs, seq)
    return Found(cards, page.jobs[-1].id if page.has_more and page.jobs else None)


def by_id(store: Store, owner: str, ids: list[str]) -> list[Card]:
    """Cards of the jobs that are there, in the order asked for."""
    seq = store.events.latest(owner=owner)
    jobs = []
    for job_id in ids[:MAX_IDS]:
        try:
            jobs.append(store.listings.get(job_id, owner))
        except NotFoundError:
            continue
    return cards_of(store, jobs, seq)


def cards_of(store: Store, jobs: list[Job], seq: int) -> list[Card]:
    """Cards with all that the store knows of jobs that were read after event ``seq``."""
    pictured = {
        job.id
        for job in jobs
        if job.state is JobState.RUNNING
        and not job.chunks_done
        and store.files.of_job(job.id, ArtifactKind.PREVIEW)
    }
    return make_cards(jobs, seq, store.listings.positions(waiting(jobs)), pictured)


def waiting(jobs: list[Job]) -> list[Job]:
    """Those that have a place in the queue."""
    return [job for job in jobs if job.state is JobState.QUEUED]


def _midnight(date: str, days: int = 0) -> float | None:
    try:
        day = datetime.strptime(date, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        return None
    return (day + timedelta(days=days)).timestamp()
