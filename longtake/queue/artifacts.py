"""Where files live: a local folder, or any store that fsspec knows (S3).

A key is a path below the root: ``jobs/<job>/<fence>/<path in the attempt's folder>`` or
``inputs/<id>``. In a local folder an attempt works at the very place of its keys, so publishing
only names a file; elsewhere it works in a scratch folder and publishing uploads. Nothing is public
before the store commits its key, and a key's content never changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import IO, Any, ParamSpec, TypeVar
from urllib.parse import parse_qsl

from fsspec.core import url_to_fs

from longtake.errors import ServiceError
from longtake.queue.ids import new_id
from longtake.queue.messages import File
from longtake.queue.records import Artifact, ArtifactKind
from longtake.settings import Settings
from longtake.video.partfile import sync_folder

P = ParamSpec("P")
T = TypeVar("T")

JOBS, INPUTS = "jobs", "inputs"
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", re.ASCII)
LOCAL_PROTOCOLS = ("file", "local")
# an object appears there when it is whole, so no other name is needed meanwhile
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "oci", "memory"})


class Artifacts(ABC):
    """Files by key. Methods raise OSError where the store fails, and its FileNotFoundError."""

    def __init__(self, work: Path) -> None:
        self._work = work

    def attempt_folder(self, job_id: str, fence: int) -> Path:
        """The folder that an attempt works in, made if need be."""
        folder = self._work / _attempt(job_id, fence)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(self, folder: Path, files: Sequence[File], owner: str) -> list[Artifact]:
        """Give files of an attempt's folder their keys.

        Args:
            folder: from ``attempt_folder``.
            files: whole.
            owner: whose job it is.

        Raises:
            ServiceError: a file is not in the folder.
        """
        job_id, fence = folder.parent.name, int(folder.name)
        root = folder.resolve()
        paths = {}
        for file in files:
            path = file.path.resolve()
            if not path.is_relative_to(root):
                raise ServiceError(f"{file.path} is not in the attempt's folder")
            inside = path.relative_to(root).as_posix()
            paths[_checked(f"{_attempt(job_id, fence)}/{inside}")] = path
        self._put(paths)
        return [
            _artifact(path, key, file, (job_id, owner, fence))
            for file, (key, path) in zip(files, paths.items(), strict=True)
        ]

    def put_input(
        self,
        source: Path,
        owner: str,
        details: Mapping[str, Any],
        content_type: str = "application/octet-stream",
    ) -> Artifact:
        """Take a copy of a start image or clip in; it belongs to no job yet."""
        name = new_id("file")
        file = File(ArtifactKind.INPUT, source, content_type, dict(details))
        key = _checked(f"{INPUTS}/{name}")
        self._add(source, key)
        return _artifact(source, key, file, (None, owner, 0), name)

    @abstractmethod
    def fetch(self, key: str, to: Path) -> None:
        """Make ``to`` a file with a key's content; it is read only: it may be the very file."""

    @abstractmethod
    def local_path(self, key: str) -> Path | None:
        """Where a key lies on this machine's disk, None where it is elsewhere."""

    @abstractmethod
    def open(self, key: str) -> IO[bytes]:
        """A key's content, for reading from any place."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes of a key's content."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove a key; nothing happens where there is none."""

    @abstractmethod
    def remove_attempt(self, job_id: str, fence: int) -> None:
        """Remove everything an attempt left, published files as well."""

    @abstractmethod
    def remove_job(self, job_id: str) -> None:
        """Remove everything of a job."""

    def free_bytes(self) -> int | None:
        """Space left where attempts work; None if the system does not tell."""
        try:
            return shutil.disk_usage(self._work).free
        except OSError:
            return None

    @abstractmethod
    def _put(self, paths: Mapping[str, Path]) -> None:
        """Publish files of an attempt under their keys."""

    @abstractmethod
    def _add(self, path: Path, key: str) -> None:
        """Copy a file from elsewhere in."""


class LocalArtifacts(Artifacts):
    """A folder. Everything in it is written under another name first, and on the disk."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root.resolve()
        super().__init__(self._root)

    def fetch(self, key: str, to: Path) -> None:
        """A hard link; a copy on another disk."""
        source = self._path(key)
        to.unlink(missing_ok=True)
        try:
            os.link(source, to)
        except FileNotFoundError:
            raise
        except OSError:
            _copy(source, to)

    def local_path(self, key: str) -> Path:
        """The file."""
        return self._path(key)

    def open(self, key: str) -> IO[bytes]:
        """The file, opened."""
        return self._path(key).open("rb")

    def size(self, key: str) -> int:
        """As the file system has it."""
        return self._path(key).stat().st_size

    def remove(self, key: str) -> None:
        """Remove the file, and its folders where it was the last."""
        path = self._path(key)
        path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder.parent == self._root or folder == self._root:
                return
            try:
                folder.rmdir()
            except OSError:
                return

    def remove_attempt(self, job_id: str, fence: int) -> None:
        """Remove the attempt's folder."""
        self._remove_folder(_attempt(job_id, fence))
        with contextlib.suppress(OSError):
            self._path(_job(job_id)).rmdir()

    def remove_job(self, job_id: str) -> None:
        """Remove the job's folder."""
        self._remove_folder(_job(job_id))

    def _remove_folder(self, key: str) -> None:
        shutil.rmtree(self._path(key), ignore_errors=True)

    def _put(self, paths: Mapping[str, Path]) -> None:
        """They lie there already; a name that the store commits must survive a power cut."""
        for path in paths.values():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        for folder in {path.parent for path in paths.values()}:
            sync_folder(folder)

    def _add(self, path: Path, key: str) -> None:
        target = self._path(key)
        target.parent.mkdir(exist_ok=True)
        _copy(path, target)

    def _path(self, key: str) -> Path:
        path = self._root / _checked(key)
        if not path.parent.resolve().is_relative_to(self._root):
            raise ServiceError(f"key {key!r} leads out of the folder of artifacts")
        return path


def _told_as_storage(method: Callable[P, T]) -> Callable[P, T]:
    """Raise what a store's own library raises, which nobody else knows, as an OSError."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (OSError, ServiceError):
            raise
        except Exception as error:
            raise OSError(f"the store of artifacts: {type(error).__name__}: {error}") from error

    return run


class RemoteArtifacts(Artifacts):
    """A store reached through fsspec; attempts work in a scratch folder."""

    def __init__(self, url: str, scratch: Path) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        super().__init__(scratch.resolve())
        plain, _, query = url.partition("?")
        options = {name: _option(value) for name, value in parse_qsl(query)}
        # another host may have written what a remembered listing lacks
        try:
            self._fs, self._root = url_to_fs(plain, use_listings_cache=False, **options)
        except (ImportError, ValueError, TypeError) as error:
            raise ServiceError(f"LONGTAKE_ARTIFACTS_URL={plain}: {error}") from error
        protocol = self._fs.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._whole = bool(names & OBJECT_STORES)

    @_told_as_storage
    def fetch(self, key: str, to: Path) -> None:
        """Download under another name, then rename."""
        part = _part_of(to)
        try:
            self._fs.get_file(self._url(key), str(part))
            part.replace(to)
        finally:
            part.unlink(missing_ok=True)

    def local_path(self, key: str) -> None:
        """It is elsewhere."""
        _checked(key)

    def open(self, key: str) -> IO[bytes]:
        """A file that reads what is asked for, some of it ahead."""
        file: IO[bytes] = self._fs.open(self._url(key), "rb")
        return file

    def size(self, key: str) -> int:
        """As the store has it."""
        return int(self._fs.size(self._url(key)))

    @_told_as_storage
    def remove(self, key: str) -> None:
        """Remove the object."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._url(key))

    def remove_attempt(self, job_id: str, fence: int) -> None:
        """Remove the attempt's objects and its scratch folder."""
        self._remove_below(_attempt(job_id, fence))

    def remove_job(self, job_id: str) -> None:
        """Remove the job's objects and its scratch folders."""
        self._remove_below(_job(job_id))

    def _remove_below(self, key: str) -> None:
        shutil.rmtree(self._work / _checked(key), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._url(key), recursive=True)

    def _put(self, paths: Mapping[str, Path]) -> None:
        try:
            for key, path in paths.items():
                self._add(path, key)
        except OSError:
            for key in paths:  # nobody would ever name them
                with contextlib.suppress(OSError):
                    self.remove(key)
            raise

    @_told_as_storage
    def _add(self, path: Path, key: str) -> None:
        target = self._url(key)
        if self._whole:
            self._fs.put_file(str(path), target)
            return
        part = f"{target}.part-{secrets.token_hex(4)}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), part)
        self._fs.mv(part, target)

    def _url(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{_checked(key)}"


def open_artifacts(settings: Settings) -> Artifacts:
    """The store that the settings name.

    Raises:
        ServiceError: no such kind of store, or the folder cannot be made.
    """
    place = settings.artifacts
    protocol, separator, path = place.partition("://")
    try:
        if not separator:
            return LocalArtifacts(Path(place))
        if protocol in LOCAL_PROTOCOLS:
            return LocalArtifacts(Path(path))
        return RemoteArtifacts(place, settings.scratch)
    except OSError as error:
        raise ServiceError(f"LONGTAKE_ARTIFACTS_URL={place}: {error.strerror or error}") from error


def _artifact(
    path: Path,
    key: str,
    file: File,
    whose: tuple[str | None, str, int],
    name: str | None = None,
) -> Artifact:
    """The record of a stored file; ``whose`` is job, owner and fence."""
    job_id, owner, fence = whose
    return Artifact(
        id=name or new_id("file"),
        job_id=job_id,
        owner=owner,
        fence=fence,
        kind=file.kind,
        key=key,
        size=path.stat().st_size,
        sha256=_sha256(path),
        content_type=file.content_type,
        created_at=time.time(),
        details=dict(file.details),
    )


def _job(job_id: str) -> str:
    if not PART.fullmatch(job_id):
        raise ServiceError(f"{job_id!r} is no id of a job")
    return f"{JOBS}/{job_id}"


def _attempt(job_id: str, fence: int) -> str:
    return f"{_job(job_id)}/{fence}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked(key: str) -> str:
    """The key, which leads nowhere but down."""
    parts = PurePosixPath(key).parts
    if "/".join(parts) != key or not parts or not all(PART.fullmatch(part) for part in parts):
        raise ServiceError(f"{key!r} is no key of an artifact")
    return key


def _copy(source: Path, target: Path) -> None:
    """A whole copy on the disk, or none."""
    part = _part_of(target)
    try:
        with source.open("rb") as read, part.open("xb") as write:
            shutil.copyfileobj(read, write, 1 << 20)
            write.flush()
            os.fsync(write.fileno())
        part.replace(target)
        sync_folder(target.parent)
    finally:
        part.unlink(missing_ok=True)


def _part_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.part-{secrets.token_hex(4)}")


def _option(value: str) -> Any:
    """An option of the URL's query: true and false are no text."""
    return {"true": True, "false": False}.get(value.lower(), value)
