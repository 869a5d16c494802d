"""Waiting out a database that is away for a moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from longtake.errors import ServiceError

T = TypeVar("T")

DATABASE_ERRORS = (ServiceError, SQLAlchemyError)
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
logger = logging.getLogger(__name__)


def patiently(call: Callable[[], T], give_up_s: float) -> T:
    """Run ``call`` again while the database does not answer, for ``give_up_s`` at most."""
    until = time.monotonic() + give_up_s
    wait_s = FIRST_WAIT_S
    while True:
        try:
            return call()
        except DATABASE_ERRORS as error:
            if time.monotonic() + wait_s > until:
                raise
            logger.warning("the database does not answer, trying again: %s", error)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
