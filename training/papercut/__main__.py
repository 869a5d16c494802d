"""The whole recipe in one command and one time budget, from nothing to diffusers folders.

``python -m training.papercut --minutes 7 --device cuda --scale 8`` runs the stages one after
another, each in a process of its own, and leaves the model in ``export`` of the work folder, in
files of less than 16 MB. Called again with more minutes it goes on from where it was.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from pathlib import Path

from training.papercut.distributed import log_to_stderr
from training.papercut.places import work_folder

LOG = logging.getLogger(__name__)
SHARES = {"prepare": 0.15, "train_vae": 0.2, "train_transformer": 0.6}
MOST_BYTES = 16_000_000


def commands(minutes: float, folder: Path, device: str, scale: int) -> list[list[str]]:
    """Module and arguments of every stage; what is left of the budget is for loading and export."""
    made = []
    for stage, share in SHARES.items():
        command = [f"training.papercut.{stage}", "--work", str(folder)]
        command += ["--minutes", f"{minutes * share:.3f}"]
        if stage != "prepare":
            command += ["--device", device]
        if stage == "train_transformer":
            command += ["--scale", str(scale)]
        made.append(command)
    return [*made, ["training.papercut.export", "--work", str(folder)]]


def too_large(folder: Path, most: int = MOST_BYTES) -> list[str]:
    """Files of a folder that have ``most`` bytes or more."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [str(path.relative_to(folder)) for path in files if path.stat().st_size >= most]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="training.papercut", description=__doc__)
    parser.add_argument("--minutes", type=float, default=180.0, help="of all stages together")
    parser.add_argument("--work", type=Path, help="folder for everything that is made")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scale", type=int, default=1, help="clips a step, times the CPU's size")
    chosen = parser.parse_args()
    log_to_stderr()
    folder = work_folder(chosen.work)
    for command in commands(chosen.minutes, folder, chosen.device, chosen.scale):
        LOG.info("python -m %s", " ".join(command))
        subprocess.run([sys.executable, "-m", *command], check=True)
    if large := too_large(folder / "export"):
        raise SystemExit(f"not under {MOST_BYTES} bytes: {', '.join(large)}")
    LOG.info("the model is in %s", folder / "export")


if __name__ == "__main__":
    main()
