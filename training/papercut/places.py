"""Where the recipe keeps what it makes: a folder outside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

ENVIRONMENT_NAME = "LONGTAKE_TRAINING_DIR"


def work_folder(chosen: Path | None = None) -> Path:
    """The chosen folder, else ``$LONGTAKE_TRAINING_DIR``, else the user's data folder."""
    named = os.environ.get(ENVIRONMENT_NAME)
    default = platformdirs.user_data_path("longtake") / "papercut-training"
    folder = chosen or (Path(named) if named else default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
