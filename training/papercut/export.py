"""Stage 4: the trained parts as diffusers folders in fp16, with the engine's manifest beside them.

``python -m training.papercut.export`` writes ``export/`` in the working folder; ``WanPipeline.
from_pretrained`` and longtake's engine both load it as it is.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline

from training.papercut import data
from training.papercut.batches import CONTEXT_NOISE
from training.papercut.causal import CHUNK, SINK, WINDOW, make_transformer
from training.papercut.distributed import log_to_stderr
from training.papercut.places import work_folder
from training.papercut.text import TEXT_LENGTH, make_encoder, make_tokenizer

LOG = logging.getLogger(__name__)
PARTS = ("transformer", "vae", "text_encoder", "tokenizer")


def manifest(steps: int, shift: float, guidance: float) -> dict[str, Any]:
    """``longtake.json``: how the checkpoint wants to be run."""
    return {
        "name": "papercut",
        "components": {part: {"source": ".", "subfolder": part} for part in PARTS},
        "schedule": {"sampler": "euler", "steps": steps, "shift": shift},
        "guidance_scale": guidance,
        "chunk": CHUNK,
        "window": WINDOW,
        "sink": SINK,
        "context_noise": CONTEXT_NOISE,
        "context_noise_added": True,
        "recache": False,
        "text_length": TEXT_LENGTH,
        "vae_dtype": "fp32",
        "size": [data.WIDTH, data.HEIGHT],
        "sizes": [[data.WIDTH, data.HEIGHT]],
        "fps": float(data.FPS),
        "num_frames": 81,
        "closed_vocabulary": True,
        "description": "small paper-cut scenes: a coloured subject that moves over a background",
        "licence": "Apache-2.0",
    }


def export(folder: Path, target: Path, values: dict[str, Any]) -> int:
    """Write the folders; returns their size in bytes."""
    weights = torch.load(folder / "transformer.pt", map_location="cpu")
    tokenizer = make_tokenizer()
    encoder, transformer = make_encoder(len(tokenizer)).eval(), make_transformer()
    encoder.load_state_dict(weights["encoder"])
    transformer.load_state_dict(weights["model"])
    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    scheduler = FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=values["schedule"]["shift"]
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=vae,
        transformer=transformer,
        scheduler=scheduler,
    )
    shutil.rmtree(target, ignore_errors=True)
    for part in (encoder, vae, transformer):
        part.half()
    pipeline.save_pretrained(target)
    (target / "longtake.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="folder for everything that is made")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument("--guidance", type=float, default=3.0)
    chosen = parser.parse_args()
    log_to_stderr()
    folder = work_folder(chosen.work)
    size = export(folder, folder / "export", manifest(chosen.steps, chosen.shift, chosen.guidance))
    LOG.info("%s: %.1f MB", folder / "export", size / 1e6)


if __name__ == "__main__":
    main()
