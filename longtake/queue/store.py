"""The store: one object that holds every statement of the service, by subject."""

from __future__ import annotations

from longtake.queue.accounts import Accounts
from longtake.queue.batches import Batches
from longtake.queue.database import Database, check_revision, open_database
from longtake.queue.endings import Endings
from longtake.queue.events import Events
from longtake.queue.held import Held
from longtake.queue.intake import Intake
from longtake.queue.leases import Leases
from longtake.queue.ledger import Ledger
from longtake.queue.listings import Listings
from longtake.queue.outbox import Outbox
from longtake.queue.policy import Policy
from longtake.queue.roster import Roster
from longtake.queue.submissions import Submissions
from longtake.queue.subscriptions import Subscriptions
from longtake.settings import Settings


class Store:
    """Everything that is stored, on one database; usable from many threads."""

    def __init__(self, db: Database, policy: Policy | None = None) -> None:
        policy = policy or Policy()
        self.db = db
        self.events = Events(db)
        self.files = Ledger(db)
        self.outbox = Outbox(db)
        self.keys = Accounts(db)
        self.webhooks = Subscriptions(db)
        self.batches = Batches(db)
        self.workers = Roster(db)
        self.listings = Listings(db, self.files)
        endings = Endings(db, self.events, self.files, self.webhooks, policy)
        self.held = Held(db, self.events, self.files)
        self.leases = Leases(db, self.events, self.files, endings, policy)
        intake = Intake(db, self.events, self.files, self.outbox, self.batches, policy)
        self.submissions = Submissions(
            db, self.events, self.files, self.outbox, intake, endings, policy
        )

    def close(self) -> None:
        """Close the database's connections."""
        self.db.dispose()


def open_store(settings: Settings) -> Store:
    """The store that ``settings`` name.

    Raises:
        ServiceError: the database cannot be used, or its schema is not this version's.
    """
    db = open_database(settings.database)
    try:
        check_revision(db)
    except BaseException:
        db.dispose()
        raise
    return Store(db, Policy.of(settings))
