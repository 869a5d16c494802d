"""The Celery application. A message is a tick ("queue X has work"); jobs live in the database.

So every setting here aims at one thing: a tick that is lost, late or sent twice does no harm, and
a job that runs for hours never meets a timer of the broker. Measured reasons are in the comments.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.signals import setup_logging

TICK = "longtake.tick"
KEY_PREFIX = "longtake:"
DAY_S = 86_400
# an old tick says nothing: workers look by themselves far more often than this
TICK_EXPIRES_S = 600.0

CONSUMER_TRANSPORT: dict[str, Any] = {
    # Ticks are acknowledged before they run, so nothing should ever wait for this; were one left
    # unacknowledged, it is redelivered a day later and finds nothing to do. All applications on
    # one server share the shortest timeout, hence the prefix, which keeps keys apart.
    "visibility_timeout": DAY_S,
    "global_keyprefix": KEY_PREFIX,
    # a half-open connection is noticed and dropped
    "socket_timeout": 30,
    "socket_keepalive": True,
    "health_check_interval": 25,
    # Priorities live in the database. Were a message ever given one, these make its order exact
    # (the default four steps merge neighbours).
    "queue_order_strategy": "priority",
    "priority_steps": list(range(10)),
    "sep": ":",
    # sweep at each interval (10 s), not at each tenth
    "unacked_restore_throttle": 1,
}
# A publisher must not hold up a request: it gives up in a moment and the outbox tries again.
PUBLISHER_TRANSPORT: dict[str, Any] = CONSUMER_TRANSPORT | {
    "socket_connect_timeout": 0.5,
    "socket_timeout": 2,
    "retry_on_timeout": False,
    "max_retries": 0,
}
SETTINGS: dict[str, Any] = {
    # Early acknowledgement: with leases in the database nothing is gained by late ones, and
    # redelivery of a long job's message (up to three runs measured) is gone.
    "task_acks_late": False,
    # No tick waits in a busy worker's memory while another worker is idle (6 s instead of 1.7 s).
    "worker_disable_prefetch": True,
    "worker_prefetch_multiplier": 1,
    # One engine owns the device, so one tick at a time. Threads keep ping and SIGTERM alive while
    # a job runs, and unlike prefork's daemonic children may start the engine process.
    "worker_pool": "threads",
    "worker_concurrency": 1,
    # No result backend: results are rows and files; result keys and reply keys only pile up.
    "task_ignore_result": True,
    "result_backend": None,
    # Ids only, as JSON: a message can never carry code.
    "task_serializer": "json",
    "accept_content": ["json"],
    # A lost connection does not end the job in flight: its lease is in the database.
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    # A worker outlives any outage of the broker; meanwhile it polls the database.
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    # A failed publish is the outbox's affair.
    "task_publish_retry": False,
    "task_publish_retry_policy": {"max_retries": 1},
    # Logging, standard streams and remote control stay as the service sets them.
    "worker_hijack_root_logger": False,
    "worker_redirect_stdouts": False,
    "worker_send_task_events": False,
    "worker_enable_remote_control": False,
    "worker_proc_alive_timeout": 60,
    "enable_utc": True,
}
# Workers need to know nothing of each other: no gossip, mingle or broker heartbeat.
WORKER_OPTIONS: dict[str, Any] = {
    "without_gossip": True,
    "without_mingle": True,
    "without_heartbeat": True,
}


def make_app(broker_url: str, *, publisher: bool = False) -> Celery:
    """A Celery application on this broker; a ``publisher`` gives up on it within a moment."""
    transport = PUBLISHER_TRANSPORT if publisher else CONSUMER_TRANSPORT
    app = Celery("longtake", broker=broker_url, set_as_current=False)
    app.conf.update(SETTINGS, broker_transport_options=dict(transport))
    return app


def keep_logging() -> None:
    """Keep Celery from configuring loggers: a receiver of this signal is all it takes."""
    setup_logging.connect(_leave_logging, weak=False)


def _leave_logging(**_: object) -> None:
    """Nothing: the process has set up its logging before."""
