"""A file that has its name only when it is whole."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from longtake.errors import OutputError

_EFFECTIVE = os.access in os.supports_effective_ids


class PartFile:
    """A file under a temporary name in the target's folder, made at once so a bad target shows.

    Links are followed, so a link to a file keeps being one.
    """

    def __init__(self, target: Path, field: str = "output") -> None:
        self.field = field
        self.asked = target
        try:
            self.target = Path(os.path.realpath(target))
            self._check_target()
            # Cut, because NAME alone may already be as long as a name can be.
            name = f".{self.target.name[:40]}.part-{secrets.token_hex(4)}"
            self.path = self.target.with_name(name)
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except (OSError, ValueError) as error:
            raise output_error(field, target, error) from error

    def _check_target(self) -> None:
        try:
            mode = self.target.stat().st_mode
        except FileNotFoundError:
            if self.target.parent.is_dir():
                return
            reason = f"folder {self.target.parent} does not exist"
            raise OutputError(self.field, self.asked, reason) from None
        if stat.S_ISDIR(mode):
            raise OutputError(self.field, self.asked, "is a folder, not a file")
        if not stat.S_ISREG(mode):
            raise OutputError(self.field, self.asked, "is a device or pipe, not a file")
        if not os.access(self.target, os.W_OK, effective_ids=_EFFECTIVE):
            raise OutputError(self.field, self.asked, "exists and is read-only")

    def commit(self, *, sync: bool = True) -> None:
        """Give the file its name; with ``sync``, what it holds is on the disk by then."""
        if sync:
            with self.path.open("rb+") as file:
                os.fsync(file.fileno())
        self.path.replace(self.target)

    def discard(self) -> None:
        """Remove the file; a target that was there before stays as it was."""
        self.path.unlink(missing_ok=True)


def output_error(field: str, path: object, error: Exception) -> OutputError:
    """What went wrong, in the words of the operating system where it said something."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(field, path, "no space left on the device")
    return OutputError(field, path, getattr(error, "strerror", None) or str(error))


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk; a rename alone may be lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
