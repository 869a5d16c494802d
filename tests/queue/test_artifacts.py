"""Files by key, in a folder and in S3: the same behaviour, from two different machines' view."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from longtake.errors import ServiceError
from longtake.queue.artifacts import Artifacts, LocalArtifacts, RemoteArtifacts, open_artifacts
from longtake.queue.messages import File
from longtake.queue.records import ArtifactKind
from longtake.settings import Settings

JOB = "video_a"
BUCKET = "videos"
Open = Callable[[], Artifacts]


@pytest.fixture(scope="module")
def s3_address() -> Iterator[str]:
    """An S3 server on a free port, with one bucket."""
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        client = boto3.client(
            "s3",
            endpoint_url=address,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",  # noqa: S106 - what the test server takes
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield address
    finally:
        server.stop()


@pytest.fixture(params=["folder", "s3", "plain"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same store anew each time, as another process would."""
    kind: str = request.param
    if kind == "folder":
        return lambda: LocalArtifacts(tmp_path / "artifacts")
    if kind == "plain":  # any other file system: here fsspec's local one, which can half-write
        url = f"file://{tmp_path / 'elsewhere'}"
    else:
        address = request.getfixturevalue("s3_address")
        url = f"s3://{BUCKET}/{tmp_path.name}?endpoint_url={address}&key=test&secret=test"
    return lambda: RemoteArtifacts(url, tmp_path / "scratch")


def put(store: Artifacts, text: bytes, name: str = "segments/a.m4s", fence: int = 1) -> str:
    """Publish one file of an attempt; its key."""
    folder = store.attempt_folder(JOB, fence)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    file = File(ArtifactKind.SEGMENT, path, "video/iso.segment", {"frames": 3})
    (artifact,) = store.publish(folder, [file], "local")
    assert artifact.sha256 == hashlib.sha256(text).hexdigest()
    assert (artifact.size, artifact.fence, artifact.job_id) == (len(text), fence, JOB)
    assert artifact.details == {"frames": 3}
    return artifact.key


def test_what_is_published_is_read_by_others(opened: Open, tmp_path: Path) -> None:
    key = put(opened(), b"0123456789")
    assert key == f"jobs/{JOB}/1/segments/a.m4s"
    other = opened()
    assert other.size(key) == 10
    with other.open(key) as file:
        file.seek(4)
        assert file.read(3) == b"456"
    other.fetch(key, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"0123456789"


def test_a_key_that_another_wrote_meanwhile_is_seen(opened: Open) -> None:
    reader, writer = opened(), opened()
    key = put(writer, b"1")
    assert reader.size(key) == 1
    later = put(writer, b"22", name="segments/b.m4s")
    assert reader.size(later) == 2


def test_what_is_gone_is_said_so(opened: Open, tmp_path: Path) -> None:
    store = opened()
    key = put(store, b"x")
    store.remove(key)
    store.remove(key)
    with pytest.raises(FileNotFoundError):
        store.fetch(key, tmp_path / "copy")
    with pytest.raises(FileNotFoundError):
        store.size(key)
    assert list(tmp_path.glob("*copy*")) == []


def test_fetching_replaces_a_file_without_touching_its_content(
    opened: Open, tmp_path: Path
) -> None:
    store = opened()
    old, target, linked = put(store, b"new"), tmp_path / "file", tmp_path / "linked"
    target.write_bytes(b"old")
    os.link(target, linked)
    store.fetch(old, target)
    assert (target.read_bytes(), linked.read_bytes()) == (b"new", b"old")


def test_an_attempt_and_a_job_go_as_a_whole(opened: Open) -> None:
    store = opened()
    first, second = put(store, b"1"), put(store, b"2", fence=2)
    third = put(store, b"3", name="video.mp4", fence=2)
    store.remove_attempt(JOB, 1)
    with pytest.raises(FileNotFoundError):
        store.size(first)
    assert store.size(second) == 1
    store.remove_job(JOB)
    store.remove_job(JOB)
    for key in (second, third):
        with pytest.raises(FileNotFoundError):
            store.size(key)


def test_an_input_is_a_copy(opened: Open, tmp_path: Path) -> None:
    source = tmp_path / "upload"
    source.write_bytes(b"picture")
    store = opened()
    artifact = store.put_input(source, "key_1", {"width": 3}, "image/png")
    source.write_bytes(b"changed")
    with store.open(artifact.key) as file:
        assert file.read() == b"picture"
    assert artifact.key == f"inputs/{artifact.id}"
    assert (artifact.owner, artifact.job_id, artifact.kind) == ("key_1", None, ArtifactKind.INPUT)
    assert artifact.content_type == "image/png"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "../x",
        "jobs/../../x",
        "jobs/a/1/..",
        "jobs//x",
        "jobs/./x",
        "jobs/a/1/.hidden",
        "jobs/a\\b",
        "jobs/a\0b",
        "jobs/a b",
        "jobs/" + "x" * 201,
        "jobs/ünicode",
    ],
)
def test_no_key_leads_out(opened: Open, tmp_path: Path, key: str) -> None:
    store = opened()
    for call in (store.open, store.size, store.remove, store.local_path):
        with pytest.raises(ServiceError, match="no key"):
            call(key)
    with pytest.raises(ServiceError, match="no key"):
        store.fetch(key, tmp_path / "x")


def test_no_link_leads_out(tmp_path: Path) -> None:
    store = LocalArtifacts(tmp_path / "artifacts")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "artifacts" / "jobs").symlink_to(tmp_path)
    with pytest.raises(ServiceError, match="leads out"):
        store.open("jobs/secret")


@pytest.mark.parametrize("job_id", ["..", "a/b", "", "/"])
def test_no_job_id_leads_out(opened: Open, job_id: str) -> None:
    with pytest.raises(ServiceError):
        opened().attempt_folder(job_id, 1)


def test_only_files_of_the_attempt_are_published(opened: Open, tmp_path: Path) -> None:
    store = opened()
    folder = store.attempt_folder(JOB, 1)
    stray = tmp_path / "stray"
    stray.write_text("x")
    (folder / "link").symlink_to(stray)
    for path in (stray, folder / "link", folder / ".." / ".." / ".." / ".." / "stray"):
        file = File(ArtifactKind.VIDEO, path, "video/mp4")
        with pytest.raises(ServiceError, match="not in the attempt's folder"):
            store.publish(folder, [file], "local")


def test_in_a_folder_publishing_and_fetching_copy_nothing(tmp_path: Path) -> None:
    store = LocalArtifacts(tmp_path / "artifacts")
    key = put(store, b"x" * 100)
    path = store.local_path(key)
    assert path == store.attempt_folder(JOB, 1) / "segments" / "a.m4s"
    next_one = store.attempt_folder(JOB, 2) / "a.m4s"
    store.fetch(key, next_one)
    assert next_one.samefile(path)
    store.remove(key)
    assert not store.attempt_folder(JOB, 1).parent.joinpath("1", "segments").exists()
    assert next_one.read_bytes() == b"x" * 100


def test_a_download_that_breaks_off_leaves_nothing(
    s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/broken?endpoint_url={s3_address}&key=test&secret=test"
    store = RemoteArtifacts(url, tmp_path / "scratch")
    key = put(store, b"whole")

    def half(_source: str, target: str) -> None:
        Path(target).write_bytes(b"wh")
        raise OSError("connection lost")

    monkeypatch.setattr(store._fs, "get_file", half)
    with pytest.raises(OSError, match="connection lost"):
        store.fetch(key, tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scratch"]


def test_files_are_published_together_or_not_at_all(
    s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/together?endpoint_url={s3_address}&key=test&secret=test"
    store = RemoteArtifacts(url, tmp_path / "scratch")
    folder = store.attempt_folder(JOB, 1)
    files = []
    for name in ("a", "b"):
        (folder / name).write_bytes(b"x")
        files.append(File(ArtifactKind.SEGMENT, folder / name, "video/mp4"))
    put_file = store._fs.put_file

    def only_a(source: str, target: str) -> None:
        if source.endswith("b"):
            raise RuntimeError("what only this store's library raises")
        put_file(source, target)

    monkeypatch.setattr(store._fs, "put_file", only_a)
    with pytest.raises(OSError, match="only this store"):
        store.publish(folder, files, "local")
    with pytest.raises(FileNotFoundError):
        store.size(f"jobs/{JOB}/1/a")
    monkeypatch.undo()
    assert [one.size for one in store.publish(folder, files, "local")] == [1, 1]


def test_settings_choose_the_store(tmp_path: Path) -> None:
    local = open_artifacts(Settings(data_dir=tmp_path))
    assert isinstance(local, LocalArtifacts)
    assert (tmp_path / "artifacts").is_dir()
    as_url = open_artifacts(Settings(data_dir=tmp_path, artifacts_url=f"file://{tmp_path}/b"))
    assert isinstance(as_url, LocalArtifacts)
    memory = open_artifacts(Settings(data_dir=tmp_path, artifacts_url="memory://x"))
    assert isinstance(memory, RemoteArtifacts)
    assert memory.attempt_folder(JOB, 1) == tmp_path / "scratch" / "jobs" / JOB / "1"
    with pytest.raises(ServiceError, match="nosuch"):
        open_artifacts(Settings(data_dir=tmp_path, artifacts_url="nosuch://x"))
    (tmp_path / "taken").write_text("x")
    with pytest.raises(ServiceError, match="ARTIFACTS_URL"):
        open_artifacts(Settings(data_dir=tmp_path, artifacts_url=str(tmp_path / "taken")))
    assert isinstance(local.free_bytes(), int)
