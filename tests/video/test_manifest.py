"""Manifests: there and back, defaults, the shipped ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from longtake.video.manifest import (
    BUNDLED,
    MANIFEST_NAME,
    SAMPLERS,
    ComponentRef,
    Manifest,
    Schedule,
    read_manifest,
)
from longtake.video.source import catalogue, find_model

MakeModel = Callable[..., Path]
EVERYTHING: dict[str, Any] = {
    "name": "whole",
    "components": {
        "transformer": {"source": "a/b", "file": "net.pt", "key": "generator_ema"},
        "vae": {"source": "a/b", "subfolder": "vae", "revision": "main"},
        "text_encoder": {"source": "text"},
        "tokenizer": {"source": "/models/text"},
    },
    "schedule": {
        "sampler": "lcm",
        "steps": 3,
        "shift": 8,
        "timesteps": [1000, 757, 522, 0],
        "warp": False,
    },
    "chunk": 3,
    "first_chunk": 1,
    "window": 12,
    "sink": 3,
    "size": [832, 480],
    "sizes": [[832, 480], [480, 832]],
    "fps": 16,
    "num_frames": 81,
    "guidance_scale": 1,
    "negative_prompt": "blur",
    "context_noise": 0.1,
    "context_noise_added": True,
    "recache": False,
    "text_length": 226,
    "vae_dtype": "fp32",
    "max_latent_frames": 21,
    "closed_vocabulary": True,
    "description": "d",
    "licence": "l",
}


def test_every_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "whole.json"
    path.write_text(json.dumps(EVERYTHING))
    manifest = read_manifest(path)
    assert manifest == Manifest(
        name="whole",
        components={
            "transformer": ComponentRef("a/b", None, None, "net.pt", "generator_ema"),
            "vae": ComponentRef("a/b", "vae", "main"),
            "text_encoder": ComponentRef("text"),
            "tokenizer": ComponentRef("/models/text"),
        },
        schedule=Schedule("lcm", 3, 8.0, (1000.0, 757.0, 522.0, 0.0), warp=False),
        chunk=3,
        first_chunk=1,
        window=12,
        sink=3,
        size=(832, 480),
        sizes=((832, 480), (480, 832)),
        fps=16.0,
        num_frames=81,
        guidance_scale=1.0,
        negative_prompt="blur",
        context_noise=0.1,
        context_noise_added=True,
        recache=False,
        text_length=226,
        vae_dtype="fp32",
        max_latent_frames=21,
        closed_vocabulary=True,
        description="d",
        licence="l",
        folder=tmp_path,
    )
    assert set(EVERYTHING) | {"folder"} == {f.name for f in fields(Manifest)}
    assert type(manifest.schedule.shift) is float


def test_null_is_what_an_absent_key_means(make_model: MakeModel) -> None:
    path = make_model() / MANIFEST_NAME
    plain = read_manifest(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"first_chunk": None, "sizes": None, "vae_dtype": None}))
    assert read_manifest(path) == plain


def test_bundled_manifest() -> None:
    source = find_model("papercut")
    manifest = source.manifest
    assert manifest is not None
    assert (source.modes, manifest.folder) == (("hybrid", "clip"), BUNDLED)
    assert manifest.schedule.sigmas() == pytest.approx((1.0, 0.9, 0.75, 0.5, 0.0))
    assert manifest.schedule.sampler in SAMPLERS
    assert (manifest.size, manifest.fps, manifest.num_frames) == ((128, 80), 16.0, 81)


def test_self_forcing_has_the_published_schedule() -> None:
    """Self-Forcing (arXiv:2506.08009): 1000, 750, 500, 250 warped by shift 5; chunks of 3."""
    manifest = find_model("self-forcing-1.3b").manifest
    assert manifest is not None
    timesteps = [1000 * sigma for sigma in manifest.schedule.sigmas()]
    assert timesteps == pytest.approx([1000, 937.5, 833.333, 625, 0], abs=1e-3)
    assert (manifest.schedule.sampler, manifest.schedule.steps) == ("lcm", 4)
    assert (manifest.chunk, manifest.guidance_scale, manifest.context_noise) == (3, 1.0, 0.0)
    assert (manifest.size, manifest.fps, manifest.text_length) == ((832, 480), 16.0, 512)


PUBLISHED: list[tuple[tuple[float, ...], int, float, bool, list[float]]] = [
    ((1000, 800, 600, 400, 200), 5, 5.0, True, [1000, 952.381, 882.353, 769.231, 555.556]),
    ((1000, 757, 522, 0), 3, 8.0, False, [1000, 757, 522]),
    ((1000, 750, 500, 250, 0), 4, 5.0, True, [1000, 937.5, 833.333, 625]),
    ((1000, 500), 2, 5.0, True, [1000, 833.333]),
]


@pytest.mark.parametrize(("listed", "steps", "shift", "warp", "timesteps"), PUBLISHED)
def test_published_schedules(
    listed: tuple[float, ...], steps: int, shift: float, warp: bool, timesteps: list[float]
) -> None:
    """Rolling Forcing, CausVid (not warped; its 0 is the clean pass), Krea, Causal-Forcing++."""
    schedule = Schedule("lcm", steps, shift, listed, warp=warp)
    assert [1000 * s for s in schedule.sigmas()] == pytest.approx([*timesteps, 0], abs=1e-3)


def test_another_number_of_steps_or_shift_leaves_the_published_list() -> None:
    schedule = Schedule("lcm", 4, 5.0, (1000.0, 750.0, 500.0, 250.0))
    assert schedule.sigmas(2) == pytest.approx((1.0, 5 / 6, 0.0))
    assert schedule.sigmas(shift=1.0) == pytest.approx((1.0, 0.75, 0.5, 0.25, 0.0))
    assert schedule.sigmas(4) == schedule.sigmas()


def test_every_shipped_manifest_reads() -> None:
    known = catalogue()
    assert list(known) == ["papercut", "self-forcing-1.3b"]
    for name, path in known.items():
        manifest = read_manifest(path)
        assert manifest.name == name
        assert manifest.description
        assert manifest.licence


def test_models_are_found_by_folder_and_by_file(make_model: MakeModel) -> None:
    folder = make_model()
    by_folder, by_file = find_model(str(folder)), find_model(str(folder / MANIFEST_NAME))
    assert by_folder.manifest == by_file.manifest
    assert (by_folder.modes, by_file.modes) == (("hybrid",), ("hybrid",))
