"""Commands of the job service: serve, api, worker, db, keys. Parse, call, print.

Settings come from the environment (docs/settings.md); a flag wins over its variable. Nothing heavy
is imported before a command runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longtake.errors import RequestError

if TYPE_CHECKING:
    from longtake.settings import Settings

DONE = 0
# settings that a flag of the same name sets
FLAGS = (
    "data_dir",
    "host",
    "port",
    "allow_open",
    "queue",
    "device",
    "parallel",
    "kv_cache",
    "profile",
)
LIMITS = ("max_queued", "max_running_s", "max_bytes", "requests_per_minute")
SHUTDOWN_S = 2
NewCommand = Callable[[Any, str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]


def add_commands(commands: Any, command: NewCommand) -> None:
    """Add the service's commands; ``command`` makes a parser of one."""
    serve = command(commands, "serve", "the whole service on this machine", _serve)
    _add_data(serve)
    _add_address(serve)
    serve.add_argument("--workers", type=int, default=1, help="worker processes (default 1)")
    serve.add_argument(
        "--device", action="append", default=[], help="of a worker's engine (repeatable, in turn)"
    )
    _add_engine(serve)

    api = command(commands, "api", "the REST API alone", _api)
    _add_data(api)
    _add_address(api)
    api.add_argument("--fd", type=int, help=argparse.SUPPRESS)

    worker = command(commands, "worker", "one worker alone", _worker)
    _add_data(worker)
    worker.add_argument("--queue", help="queue that jobs are taken from")
    worker.add_argument("--device", help="the engine's device")
    _add_engine(worker)

    _add_database(commands, command)
    _add_keys(commands, command)


def _add_database(commands: Any, command: NewCommand) -> None:
    parser = command(commands, "db", "the database's schema", _db_check)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run in (("upgrade", _db_upgrade), ("check", _db_check)):
        action = command(actions, name, str(run.__doc__).partition(".")[0].lower(), run)
        _add_data(action)


def _add_keys(commands: Any, command: NewCommand) -> None:
    parser = command(commands, "keys", "API keys", _keys_list)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = command(actions, "create", "make a key; it is shown once", _keys_create)
    create.add_argument("name", help="what the key is for")
    for limit in LIMITS:
        create.add_argument(
            f"--{limit.replace('_', '-')}", type=int, help="instead of the service's setting"
        )
    listing = command(actions, "list", "list keys, without their secrets", _keys_list)
    revoke = command(actions, "revoke", "let a key open nothing any more", _keys_revoke)
    revoke.add_argument("id", help="key_..., as the list shows it")
    move = command(actions, "move", "hand the videos of one owner to a key", _keys_move)
    move.add_argument("source", help="key_..., also a revoked one, or local: made without a key")
    move.add_argument("target", help="key_... that is to have them")
    for action in (create, listing, revoke, move):
        _add_data(action)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-cache", metavar="TYPE", help="store the past as bf16, fp16 or int8, not as computed"
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="of longtake tune, or none (default: the one made for a model and device)",
    )
    parser.add_argument("--gpus", metavar="LIST", help="one video on these CUDA devices: 0,1,2,3")
    parser.add_argument(
        "--parallel",
        metavar="LAYOUT",
        help="how it is divided: auto, or ulysses=N, ring=N, cfg=2 joined by commas; without "
        "--gpus on CPU processes",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", dest="data_dir", metavar="DIR", help="data folder")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8000; 0 takes any)")
    parser.add_argument(
        "--allow-open",
        action="store_true",
        default=None,
        help="with --host beyond loopback: anybody who reaches it may use the service, no keys",
    )


def read_settings(args: argparse.Namespace) -> Settings:
    """The settings of environment and flags.

    Raises:
        RequestError: a value is not legal; names the flag or variable.
    """
    from pydantic import ValidationError

    from longtake.settings import PREFIX, Settings

    told: dict[str, Any] = {name: getattr(args, name, None) for name in FLAGS}
    gpus = getattr(args, "gpus", None)
    told["gpus"] = _devices(gpus) if gpus is not None else None
    told["device"] = told["device"] or None  # a list where serve takes several
    flags = {name: value for name, value in told.items() if value is not None}
    flags = {name: value for name, value in flags.items() if not isinstance(value, list)}
    try:
        return Settings(**flags)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        shown = name if name in flags else f"{PREFIX}{name}".upper()
        raise RequestError(shown, first.get("input"), str(first["msg"])) from None


def _devices(text: str) -> tuple[str, ...]:
    """The devices of ``--gpus``: numbers, or the ids that CUDA_VISIBLE_DEVICES takes."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise RequestError("gpus", text, "is no list of CUDA devices", "such as 0,1,2,3")
    return names


def _serve(args: argparse.Namespace) -> int:
    """Start broker, API and workers on this machine, and keep them running until Ctrl-C."""
    if args.workers < 0:
        raise RequestError("workers", args.workers, "is out of range", "0 or more")
    settings = read_settings(args)
    _check_ranks(settings, args.workers)
    _set_up_logging(settings)
    from longtake.serve import ServeOptions, serve

    return _leave(serve(settings, ServeOptions(args.workers, tuple(args.device))))


def _api(args: argparse.Namespace) -> int:
    """Run the REST API alone; workers and broker are elsewhere."""
    settings = read_settings(args)
    _set_up_logging(settings)
    _end_with_supervisor()
    import socket

    import uvicorn

    from longtake.api.app import create_app
    from longtake.queue.store import open_store
    from longtake.serve import check_address, listen

    store = open_store(settings)
    try:
        check_address(settings, store)
    finally:
        store.close()
    listener = socket.socket(fileno=args.fd) if args.fd is not None else None
    listener = listener or listen(settings.host, settings.port)
    if args.fd is None:
        host, port = listener.getsockname()[:2]
        sys.stderr.write(f"listening on {host} port {port}\n")
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    uvicorn.Server(config).run(sockets=[listener])
    return DONE


def _worker(args: argparse.Namespace) -> int:
    """Run one worker: it claims jobs and drives an engine process until SIGTERM."""
    settings = read_settings(args)
    _check_ranks(settings, 1)
    _set_up_logging(settings)
    _end_with_supervisor()
    from longtake.queue.tasks import run_worker

    run_worker(settings)
    return _leave(DONE)


def _db_upgrade(args: argparse.Namespace) -> int:
    """Bring the schema to this version's."""
    settings = read_settings(args)
    from longtake.queue.database import current_revision, upgrade

    before = current_revision(settings.database)
    upgrade(settings.database)
    after = current_revision(settings.database)
    _print(args, {"before": before, "revision": after}, f"the schema is at revision {after}")
    return DONE


def _db_check(args: argparse.Namespace) -> int:
    """Say whether the schema is this version's; exit code 3 if not."""
    settings = read_settings(args)
    from longtake.queue.database import check_revision, current_revision, open_database

    db = open_database(settings.database)
    try:
        check_revision(db)
    finally:
        db.dispose()
    revision = current_revision(settings.database)
    _print(args, {"revision": revision}, f"the schema is at revision {revision}, as it should be")
    return DONE


def _keys_create(args: argparse.Namespace) -> int:
    """Make an API key. It is shown once: only its hash is stored."""
    limits = {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
    for name, value in limits.items():
        if value < 0:
            raise RequestError(name, value, "is out of range", "0 or more")
    from longtake.queue.records import LOCAL_OWNER

    store = _open_store(args)
    try:
        key, secret = store.keys.create(args.name, limits)
        hidden = sum(store.listings.counts(LOCAL_OWNER).values())
    finally:
        store.close()
    text = f"{secret}\n\nThis is {key.id}. It is shown only now; keep it safe."
    if hidden:
        text += (
            f"\n{hidden} videos were made without a key, and no key shows them. "
            f"To have them: longtake keys move {LOCAL_OWNER} {key.id}"
        )
    _print(args, {**asdict(key), "secret": secret}, text)
    return DONE


def _keys_list(args: argparse.Namespace) -> int:
    """List API keys, without their secrets."""
    store = _open_store(args)
    try:
        keys = store.keys.list()
    finally:
        store.close()
    lines = [
        f"{key.id}  lt_{key.prefix}_...  {_day(key.created_at)}  "
        f"{'revoked' if key.revoked_at is not None else 'active':7}  {key.name}"
        for key in keys
    ]
    _print(args, [asdict(key) for key in keys], "\n".join(lines) or "no keys")
    return DONE


def _keys_revoke(args: argparse.Namespace) -> int:
    """Let a key open nothing any more; its videos stay."""
    store = _open_store(args)
    try:
        key = store.keys.revoke(args.id)
    finally:
        store.close()
    _print(args, asdict(key), f"{key.id} ({key.name}) is revoked")
    return DONE


def _keys_move(args: argparse.Namespace) -> int:
    """Hand the videos of one owner to a key."""
    store = _open_store(args)
    try:
        moved = store.keys.move(args.source, args.target)
    finally:
        store.close()
    _print(args, {"moved": moved}, f"{args.target} has {moved} videos of {args.source} now")
    return DONE


def _open_store(args: argparse.Namespace) -> Any:
    """The store, its schema brought up to date first: keys may be made before the first start."""
    settings = read_settings(args)
    from longtake.queue.database import upgrade
    from longtake.queue.store import open_store

    upgrade(settings.database)
    return open_store(settings)


def _check_ranks(settings: Settings, workers: int) -> None:
    """Refuse a layout that no engine could have before anything starts."""
    from longtake.queue.engine_group import group_size

    if group_size(settings) > 1 and workers > 1:
        reason = "one worker has all ranks"
        raise RequestError("workers", workers, reason, "1, or workers started one by one")


def _set_up_logging(settings: Settings) -> None:
    """Logs go to standard error; of libraries that tell every step, what matters."""
    from longtake.logs import set_up
    from longtake.supervise import TERMINAL_VARIABLE

    set_up(settings.log_level, as_json=False if os.environ.get(TERMINAL_VARIABLE) else None)
    for name in ("alembic", "celery.app.trace", "celery.worker.strategy", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _leave(code: int) -> int:
    """End the process now: everything is closed, and freeing every object takes seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_supervisor() -> None:
    """A child of ``longtake serve`` is told when that process dies, however it dies."""
    from longtake.queue.processes import end_with_parent
    from longtake.supervise import PARENT_VARIABLE

    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent.isdecimal():
        end_with_parent(int(parent), signal.SIGTERM)


def _print(args: argparse.Namespace, data: Any, text: str) -> None:
    shown = json.dumps(data, indent=2, ensure_ascii=False) if args.json else text
    sys.stdout.write(shown + "\n")


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


__all__: Sequence[str] = ("add_commands", "read_settings")
