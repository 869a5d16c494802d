"""Stored chunk latents: written whole, read back, refused when damaged or of another request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from longtake.errors import OutputError, ResumeError
from longtake.schedulers.chunks import ChunkSpec
from longtake.schedulers.prompts import TimedPrompt
from longtake.video.latents import (
    VERSION,
    LatentFolder,
    StoredRollout,
    check_same_model,
    check_same_plan,
    merge_request,
    rollout_metadata,
)
from longtake.video.manifest import Manifest
from longtake.video.plan import Inputs, Plan, make_plan
from longtake.video.request import VideoRequest
from longtake.video.rollout import Chunk
from longtake.video.shapes import read_shape
from longtake.video.source import find_model

WEIGHTS = {"transformer/a.safetensors": "11", "vae/b.safetensors": "22"}


def chunk(index: int, latents: torch.Tensor | None = None) -> Chunk:
    """A finished chunk of two latent frames."""
    made = torch.randn(1, 4, 2, 4, 8) if latents is None else latents
    spec = ChunkSpec(index, 2 * index, 2, 2, False, ())
    frames = torch.zeros(1, 16, 32, 3, dtype=torch.uint8)
    return Chunk(spec, made, frames, prompt=0, attempt=0, reused=False, timings={})


def rollout(**fields: Any) -> StoredRollout:
    request = VideoRequest(**{"prompt": "a red ball \N{SNOWMAN}", "seed": 7, **fields})
    return StoredRollout(
        request=request,
        plan={"seed": 7, "sigmas": [1.0, 0.0]},
        num_frames=81,
        inputs=Inputs("continue", 9, (2, 1)),
        input_hash="cd",
        weights=WEIGHTS,
        dtype="fp32",
        fingerprint={"matmul": "ab"},
    )


def plan(**fields: Any) -> Plan:
    manifest = find_model("papercut").manifest
    assert isinstance(manifest, Manifest)
    return make_plan(VideoRequest(prompt="a", **fields), manifest, read_shape(manifest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_come_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = LatentFolder(tmp_path)
    latents = torch.randn(1, 4, 2, 4, 8).to(dtype)
    latents[0, 0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    folder.write(chunk(0, latents))
    read = folder.read(0)
    assert read is not None
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), latents.view(torch.uint8))


def test_views_are_stored_whole(tmp_path: Path) -> None:
    latents = torch.randn(1, 4, 9, 8, 4).transpose(3, 4)[:, :, 3:5]
    LatentFolder(tmp_path).write(chunk(0, latents))
    read = LatentFolder(tmp_path).read(0)
    assert read is not None
    assert torch.equal(read, latents)


def test_what_is_not_stored_is_none_and_counting_stops_at_a_gap(tmp_path: Path) -> None:
    folder = LatentFolder(tmp_path)
    assert (folder.count, folder.read(0), folder.holds(0)) == (0, None, False)
    for index in (0, 1, 3):
        folder.write(chunk(index))
    assert (folder.count, folder.read(2), folder.holds(3)) == (2, None, True)


def test_a_chunk_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    folder = LatentFolder(tmp_path)
    for value in (1.0, 2.0):
        folder.write(chunk(0, torch.full((1, 4, 2, 4, 8), value)))
    read = folder.read(0)
    assert read is not None
    assert bool((read == 2.0).all())
    assert [p.name for p in tmp_path.iterdir()] == ["chunk-000000.safetensors"]


def test_the_description_comes_back(tmp_path: Path) -> None:
    stored = rollout(prompts=(TimedPrompt(1.0, "b"),), size=(128, 80), seconds=2.5)
    folder = LatentFolder(tmp_path / "new")
    folder.check_empty()
    folder.describe_as(stored)
    assert folder.describe() == stored
    assert [p.name for p in folder.path.iterdir()] == ["rollout.json"]
    assert json.loads((folder.path / "rollout.json").read_text())["version"] == VERSION


def test_a_plan_is_stored_with_the_seed_that_was_drawn() -> None:
    made = plan()
    stored = rollout_metadata(
        made, Inputs(), input_hash=None, weights={}, dtype="fp32", fingerprint={}
    )
    assert stored.request == replace(made.request, seed=made.seed)


@pytest.fixture
def blocked(tmp_path: Path) -> LatentFolder:
    """A folder in which every rename onto a chunk's or the description's name fails."""
    for name in ("chunk-000000.safetensors", "rollout.json"):
        (tmp_path / name / "in the way").mkdir(parents=True)
    return LatentFolder(tmp_path)


def test_a_write_that_fails_leaves_no_part(blocked: LatentFolder) -> None:
    before = sorted(blocked.path.rglob("*"))
    with pytest.raises(OutputError, match=r"keep_latents=.*chunk-000000.safetensors: ") as caught:
        blocked.write(chunk(0))
    assert caught.value.field == "keep_latents"
    with pytest.raises(OutputError, match=r"keep_latents=.*rollout.json: "):
        blocked.describe_as(rollout())
    assert sorted(blocked.path.rglob("*")) == before


def test_a_half_written_chunk_has_no_name(tmp_path: Path) -> None:
    """What a killed process leaves is not taken for a chunk, and is replaced by the next write."""
    folder = LatentFolder(tmp_path)
    (tmp_path / ".chunk-000000.safetensors.part").write_bytes(b"half")
    assert folder.count == 0
    folder.write(chunk(0))
    assert [p.name for p in tmp_path.iterdir()] == ["chunk-000000.safetensors"]


def test_folders_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, message in [
        ("none/kept", r"keep_latents=.*none/kept: the folder .*none does not exist"),
        ("file", r"keep_latents=.*file: Not a directory"),
        ("", r"keep_latents=.*: the folder is not empty"),
    ]:
        with pytest.raises(OutputError, match=message):
            LatentFolder(tmp_path / name).check_empty()
    with pytest.raises(OutputError, match=r"keep_latents=.*file: File exists"):
        LatentFolder(tmp_path / "file").describe_as(rollout())


def test_damaged_chunks_are_refused(tmp_path: Path) -> None:
    folder = LatentFolder(tmp_path)
    folder.write(chunk(0))
    path = tmp_path / "chunk-000000.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], b""):
        path.write_bytes(damaged)
        with pytest.raises(
            ResumeError, match=r"chunk-000000.safetensors: the chunk cannot be read"
        ):
            folder.read(0)
    save_file({"other": torch.zeros(1)}, path)
    with pytest.raises(ResumeError, match="the chunk cannot be read"):
        folder.read(0)


def test_descriptions_of_another_version_are_refused(tmp_path: Path) -> None:
    folder = LatentFolder(tmp_path)
    with pytest.raises(ResumeError, match="no stored rollout there"):
        folder.describe()
    folder.describe_as(rollout())
    path = tmp_path / "rollout.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"version": VERSION + 1}))
    with pytest.raises(ResumeError, match=f"version {VERSION + 1}, not {VERSION}"):
        folder.describe()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ResumeError, match=r"rollout.json is damaged"):
        folder.describe()


def test_what_a_caller_names_replaces_what_is_stored() -> None:
    stored = VideoRequest(prompt="a", seed=7, seconds=2.0, model="m")
    assert merge_request(stored, None) is stored
    asked = VideoRequest(prompt="a", model="m", num_frames=33, window=8)
    assert merge_request(stored, asked) == replace(stored, seconds=None, num_frames=33, window=8)


def described(made: Plan) -> StoredRollout:
    ran: dict[str, Any] = {"weights": {}, "dtype": "fp32", "fingerprint": {}}
    return rollout_metadata(made, Inputs(), input_hash=None, **ran)


def test_only_the_length_may_be_another() -> None:
    stored = described(plan(seed=7, num_frames=33))
    check_same_plan(stored, plan(seed=7, num_frames=81))
    check_same_plan(stored, plan(seed=7, seconds=9.0, guidance_scale=3.0, size=(128, 80)))
    others: dict[str, Any] = {
        "seed": 8,
        "window": 8,
        "sink": 1,
        "guidance_scale": 2.0,
        "num_inference_steps": 3,
        "flow_shift": 2.0,
        "sampler": "lcm",
        "attention": "global",
        "negative_prompt": "b",
        "prompts": (TimedPrompt(1.0, "b"),),
    }
    fields = {"num_inference_steps": "sigmas", "flow_shift": "sigmas"}
    for name, value in others.items():
        changed = plan(**({"seed": 7, "num_frames": 33} | {name: value}))
        with pytest.raises(ResumeError, match=rf"^{fields.get(name, name)}=.*the stored rollout"):
            check_same_plan(stored, changed)


def test_weights_are_compared_by_content() -> None:
    stored = rollout()
    renamed = {"transformer/other.safetensors": "11", "vae/b.safetensors": "22"}
    check_same_model(stored, plan(), renamed)
    for other in ({**WEIGHTS, "vae/b.safetensors": "33"}, {"vae/b.safetensors": "22"}):
        with pytest.raises(ResumeError, match="its weights are not those that made the latents"):
            check_same_model(stored, plan(), other)
