"""The embedded Valkey, for real: persistence, orphans, refusals, and its end with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from longtake.errors import ServiceError
from longtake.queue.broker import EmbeddedBroker, answers

# starts a server, says its process id and waits to be killed
HOLDER = """
import sys
from pathlib import Path
from longtake.queue.broker import EmbeddedBroker
broker = EmbeddedBroker(Path(sys.argv[1]), Path(sys.argv[1]) / "v.sock")
broker.start()
print(broker.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "v.sock"


@pytest.fixture
def broker(tmp_path: Path, socket: Path) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(tmp_path, socket)
    yield broker
    broker.stop()


def client(socket: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(socket))


def test_what_is_queued_survives_a_restart(broker: EmbeddedBroker, socket: Path) -> None:
    broker.start()
    with client(socket) as valkey:
        valkey.lpush("queue", "tick")
        config = valkey.config_get("append*", "maxmemory*")
        assert (config["appendonly"], config["appendfsync"]) == ("yes", "everysec")
        assert (config["maxmemory"], config["maxmemory-policy"]) == ("0", "noeviction")
    broker.stop()
    assert not socket.exists()
    broker.start()
    with client(socket) as valkey:
        assert valkey.lrange("queue", 0, -1) == [b"tick"]


def test_only_this_user_reaches_it(broker: EmbeddedBroker, socket: Path, tmp_path: Path) -> None:
    broker.start()
    assert socket.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "valkey").stat().st_mode & 0o777 == 0o700
    with client(socket) as valkey:
        assert valkey.config_get("port") == {"port": "0"}


def test_it_ends_with_its_parent(tmp_path: Path, socket: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        server = psutil.Process(int(holder.stdout.readline()))
        holder.kill()
    psutil.wait_procs([server], timeout=10)
    assert not server.is_running()
    assert not answers(socket)


def test_a_server_left_by_an_earlier_run_is_replaced(
    broker: EmbeddedBroker, tmp_path: Path, socket: Path
) -> None:
    earlier = EmbeddedBroker(tmp_path, socket)
    earlier.start()
    with client(socket) as valkey:
        valkey.lpush("queue", "tick")
    broker.start()
    assert not earlier.alive
    assert broker.pid != earlier.pid
    with client(socket) as valkey:
        assert valkey.lrange("queue", 0, -1) == [b"tick"]


def test_a_dead_socket_is_no_obstacle(broker: EmbeddedBroker, socket: Path) -> None:
    broker.start()
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(broker.pid)], timeout=10)
    assert socket.exists()
    assert not broker.alive
    broker.start()
    assert answers(socket)


def test_refusals(tmp_path: Path, socket: Path) -> None:
    with pytest.raises(ServiceError, match="too long for a socket"):
        EmbeddedBroker(tmp_path, tmp_path / ("x" * 120)).start()
    socket.write_text("not a socket")
    with pytest.raises(ServiceError, match="is no socket"):
        EmbeddedBroker(tmp_path, socket).start()
    assert socket.read_text() == "not a socket"


def test_a_server_that_does_not_start_says_why(tmp_path: Path, socket: Path) -> None:
    folder = tmp_path / "valkey" / "appendonlydir"
    folder.mkdir(parents=True)
    (folder / "appendonly.aof.manifest").write_text("nonsense\n")
    broker = EmbeddedBroker(tmp_path, socket)
    with pytest.raises(ServiceError, match=r"does not start, see .*valkey\.log: .*manifest"):
        broker.start()
    assert not broker.alive
