"""Profiles: found by themselves or named, used where the request leaves room, refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.cli import main
from longtake.errors import RequestError
from longtake.video import profiles
from longtake.video.attention_readings import Chunked, Full, Window
from longtake.video.generate import Result, Target, generate
from longtake.video.manifest import Manifest, read_manifest
from longtake.video.options import EngineOptions, Storage
from longtake.video.prepare import plan_request
from longtake.video.profiles import (
    Profile,
    check_named,
    expected_backend,
    profile_asked,
    profile_path,
    read_profile,
    target_of,
    write_profile,
)
from longtake.video.request import VideoRequest
from longtake.video.shapes import read_shape
from longtake.video.tune import Measured, choose, filling, readings

MakeModel = Callable[..., Path]
Refuse = Callable[..., str]
CPU = torch.device("cpu")
CHUNKED = "window+chunked:16"


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of the test's own."""
    folder = tmp_path_factory.mktemp("data")
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    return folder


@pytest.fixture
def model(make_model: MakeModel) -> Path:
    return make_model()


def profile_for(model: Path, **changes: Any) -> Profile:
    """A profile of the model here, as tune would write it."""
    manifest = read_manifest(model / "longtake.json")
    made = Profile(
        target=target_of(manifest, read_shape(manifest), CPU, "fp32"),
        backend="sdpa",
        attention=CHUNKED,
        exact=True,
        error=1e-7,
        error_bound=0.0,
    )
    return replace(made, **changes)


def automatic(profile: Profile) -> Path:
    """The file that is found by itself."""
    target = profile.target
    return profile_path(target.model, target.device, target.dtype)


def run(model: Path, folder: Path, name: str = "a", **options: Any) -> Result:
    request = VideoRequest(prompt="a", model=str(model), num_frames=17, seed=3)
    return generate(request, Target(folder / f"{name}.mp4"), EngineOptions(device="cpu", **options))


def test_a_named_profile_is_used_and_the_receipt_says_so(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "fast.json"
    write_profile(file, profile_for(model))
    plain = run(model, tmp_path, "plain")
    made = run(model, tmp_path, profile=str(file))
    used = made.receipt["plan"]["profile"]
    assert used == made.receipt["engine"]["profile"]
    assert used["sha256"] == read_profile(file).digest
    assert (used["name"], used["backend"], used["attention"]) == ("fast.json", "sdpa", CHUNKED)
    assert made.receipt["plan"]["attention"] == CHUNKED
    assert made.receipt["warnings"] == plain.receipt["warnings"]
    assert plain.receipt["plan"]["profile"] is None
    assert plain.receipt["plan"]["attention"] == "window"


def test_the_profile_of_this_model_is_found_by_itself(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = profile_for(model)
    write_profile(automatic(profile), profile)
    assert run(model, tmp_path).receipt["plan"]["attention"] == CHUNKED
    assert run(model, tmp_path, profile="none").receipt["plan"]["profile"] is None
    assert main(["plan", "a", "--model", str(model), "--device", "cpu"]) == 0
    assert "profile" in (shown := capsys.readouterr().out)
    assert f"attention {CHUNKED}" in " ".join(shown.split())
    # another dtype has another profile, and ranks that share a video look for none
    assert plan_of(model, dtype="bf16").profile is None
    assert profile_asked(EngineOptions(parallel="ulysses=2")) == "none"
    assert profile_asked(EngineOptions(parallel="ulysses=2", profile="a.json")) == "a.json"


def plan_of(model: Path, **options: Any) -> Any:
    request = VideoRequest(prompt="a", model=str(model), num_frames=17)
    return plan_request(request, EngineOptions(device="cpu", **options), probe=False)


def test_what_a_caller_names_wins(model: Path) -> None:
    profile = profile_for(model)
    write_profile(automatic(profile), profile)
    request = VideoRequest(prompt="a", model=str(model), attention="global")
    plan: Any = plan_request(request, EngineOptions(device="cpu", backend="flex"), probe=False)
    assert plan.attention == "global"
    assert (plan.profile["attention"], plan.profile["backend"]) == (None, None)
    plain = VideoRequest(prompt="a", model=str(model))
    for named in (replace(plain, window=6), replace(plain, sink=1)):
        made: Any = plan_request(named, EngineOptions(device="cpu"), probe=False)
        assert (made.attention, made.profile["backend"]) == ("window", "sdpa")


def test_a_profile_that_leaves_keys_out_is_a_warning(model: Path) -> None:
    profile = profile_for(model, attention="window+window:4", exact=False, error=0.031)
    write_profile(automatic(profile), profile)
    plan = plan_of(model)
    assert any("attention=window+window:4, whose error is 0.031" in w for w in plan.warnings)
    assert plan.profile["exact"] is False


def test_a_profile_that_the_request_leaves_no_room_for_is_not_used(
    model: Path, tmp_path: Path
) -> None:
    profile = profile_for(model, attention="window,steps:9=full")
    write_profile(automatic(profile), profile)
    plan = plan_of(model)
    assert (plan.attention, plan.profile["attention"], plan.profile["backend"]) == (
        "window",
        None,
        "sdpa",
    )
    assert [w for w in plan.warnings if w.startswith("not used: attention of profile")]
    named = tmp_path / "named.json"
    write_profile(named, profile)
    with pytest.raises(RequestError, match="attention="):
        plan_of(model, profile=str(named))


def test_stored_chunks_go_on_as_they_were_made(model: Path, tmp_path: Path) -> None:
    """A profile that comes or goes between two runs changes nothing of a rollout under way."""
    request = VideoRequest(prompt="a", model=str(model), num_frames=9, seed=3)

    def made(name: str, request: VideoRequest | None, storage: Storage) -> Any:
        target = Target(tmp_path / f"{name}.mp4")
        receipt = generate(request, target, EngineOptions(device="cpu"), storage=storage).receipt
        return receipt["plan"]["attention"]

    longer = replace(request, num_frames=17)
    assert made("a", request, Storage(keep=tmp_path / "plain")) == "window"
    profile = profile_for(model)
    file = automatic(profile)
    write_profile(file, profile)
    assert made("b", longer, Storage(resume=tmp_path / "plain")) == "window"
    assert made("c", request, Storage(keep=tmp_path / "chunked")) == CHUNKED
    file.unlink()
    assert made("d", longer, Storage(resume=tmp_path / "chunked")) == CHUNKED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "a faster one"}, r"was made for device 'a faster one', this is '.* cpu, .*'"),
        ({"dtype": "bf16"}, "was made for dtype 'bf16', this is 'fp32'"),
        ({"model": "other"}, "was made for model 'other', this is 'tiny'"),
        ({"mark": "0" * 16}, "was made for other weights or sizes of 'tiny'"),
    ],
)
def test_a_profile_of_something_else_is_refused_where_named_and_told_where_found(
    model: Path, tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    profile = profile_for(model)
    other = replace(profile, target=replace(profile.target, **change))
    file = tmp_path / "other.json"
    write_profile(file, other)
    with pytest.raises(RequestError, match=f"profile='.*: {reason}; longtake tune, or none"):
        plan_of(model, profile=str(file))
    write_profile(automatic(profile), other)
    plan = plan_of(model)
    assert (plan.profile, plan.attention) == (None, "window")
    assert [w for w in plan.warnings if w.startswith("not used: profile=")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"longtake_profile": 2}',
        '{"longtake_profile": 1}',
        '{"longtake_profile": 1, "target": {"model": "tiny"}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_profile_is_refused_where_named_and_told_where_found(
    model: Path, tmp_path: Path, text: str | bytes
) -> None:
    file = automatic(profile_for(model))
    file.parent.mkdir(parents=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RequestError, match="is no profile, or damaged: ") as caught:
        plan_of(model, profile=str(file))
    assert caught.value.field == "profile"
    assert len([w for w in plan_of(model).warnings if "is no profile, or damaged" in w]) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "swift"),
        ("attention", "sideways"),
        ("exact", "yes"),
        ("error", None),
        ("error", float("nan")),
        ("error_bound", -5),
    ],
)
def test_every_field_of_a_profile_is_checked(
    model: Path, tmp_path: Path, field: str, value: Any
) -> None:
    file = tmp_path / "a.json"
    write_profile(file, profile_for(model))
    assert read_profile(file).profile == profile_for(model)
    data = json.loads(file.read_text()) | {field: value}
    file.write_text(json.dumps(data))
    with pytest.raises(RequestError, match="is no profile, or damaged"):
        read_profile(file)


def test_a_backend_that_is_gone_is_an_error_where_named_and_told_where_found(
    model: Path, tmp_path: Path, refuse: Refuse
) -> None:
    profile = profile_for(model, backend="flash")
    write_profile(automatic(profile), profile)
    assert any(
        "its backend flash cannot be used: needs a CUDA" in w for w in plan_of(model).warnings
    )
    write_profile(tmp_path / "flash.json", profile)
    line = f"{{make}} --model {model} --device cpu --profile flash.json"
    refuse(line, 3, "backend=flash: needs a CUDA device, this is cpu")


def test_bad_names_are_refused(model: Path, refuse: Refuse) -> None:
    field = refuse(
        f"plan a --model {model} --profile nowhere.json", 2, "nowhere.json': cannot be read"
    )
    assert field == "profile"
    line = "plan a --mode clip --profile x.json"
    assert refuse(line, 2, "profile='x.json': clip mode reads none") == "profile"
    line = f"tune --model {model} --error-bound"
    for bound in ("-1", "nan", "1"):
        assert refuse(f"{line}={bound}", 2, "error_bound=.*: is out of range; 0 ") == "error_bound"
    refuse("tune --model nowhere", 3, "model='nowhere': no such folder")


def test_an_engine_that_starts_checks_what_is_named(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_profile(file, profile_for(model))
    check_named(None, CPU, "fp32")
    check_named("none", CPU, "fp32")
    check_named(str(file), CPU, "fp32")
    with pytest.raises(RequestError, match="was made for dtype 'fp32', this is 'bf16'"):
        check_named(str(file), CPU, "bf16")
    with pytest.raises(RequestError, match="cannot be read"):
        check_named(str(tmp_path / "b.json"), CPU, "fp32")
    manifest = read_manifest(model / "longtake.json")
    for options, backend in (
        (EngineOptions(profile=str(file)), "sdpa"),
        (EngineOptions(profile=str(file), backend="flex"), "flex"),
        (EngineOptions(profile="none"), "auto"),
        (EngineOptions(), "auto"),
    ):
        assert expected_backend(options, manifest, CPU, "fp32") == backend


def test_other_weights_of_the_same_name_have_another_mark(make_model: MakeModel) -> None:
    first, second = make_model("first"), make_model("second")
    assert profile_for(first).target == profile_for(second).target
    weights = next((second / "transformer").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert profile_for(first).target != profile_for(second).target


def test_tune_measures_and_its_profile_is_found(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--model", str(model), "--device", "cpu", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    found = read_profile(Path(made["file"]))
    assert found.profile.target == profile_for(model).target
    assert found.profile.exact
    assert [row["attention"] for row in made["measured"]] == [None, "window+window:4"]
    whole, windowed = made["measured"]
    assert whole["error"] < 1e-5 < windowed["error"]
    assert (whole["allowed"], windowed["allowed"]) == (True, False)
    assert plan_of(model).profile["name"] == found.name
    # a bound that allows it, and a file of one's own
    out = tmp_path / "fast.json"
    argv = ["tune", "--model", str(model), "--error-bound", "0.99", "-o", str(out)]
    assert main([*argv, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"{out}: backend sdpa" in shown.replace("\n", "")
    assert all(row["allowed"] for row in read_profile(out).profile.measured)


def test_a_tie_goes_to_the_plainer_way() -> None:
    def line(name: str | None, seconds: float, *, allowed: bool = True) -> Measured:
        return Measured(name, "sdpa", seconds, 0.0, exact=allowed, allowed=allowed)

    plain, chunked, window = line(None, 1.04), line("a", 1.0), line("b", 0.1, allowed=False)
    assert choose([plain, chunked, window]) is plain
    assert choose([replace(plain, seconds=1.06), chunked, window]) is chunked
    assert choose([plain, chunked, replace(window, allowed=True)]).attention == "b"


def test_what_is_tried_fits_the_models_window() -> None:
    manifest = bundled()
    shape = read_shape(manifest)
    assert readings(manifest, shape) == [Full(), Chunked(256), Window(6, 3)]
    assert filling(manifest) == 3
    assert readings(replace(manifest, window=6), shape) == [Full()]
    assert readings(replace(manifest, window=8, sink=1), shape) == [
        Full(),
        Chunked(256),
        Window(5, 1),
    ]


def bundled() -> Manifest:
    return read_manifest(Path(profiles.__file__).parent / "papercut" / "longtake.json")
