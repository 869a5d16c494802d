"""Ranks of the tests of sequence parallelism: ``parallel_ranks.py FOLDER JOB...``.

Not a test itself. Importing torch takes seconds, so this process does it once and forks the ranks
of every job, which find each other through a file in FOLDER; rank 0 writes FOLDER/JOB.json. A
rank that fails or hangs ends its job: the others are killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch._C._distributed_c10d import FileStore

import longtake.video  # noqa: F401  fixes the numerics before torch is imported
from longtake.errors import RequestError
from longtake.schedulers.prompts import TimedPrompt
from longtake.video.causal_wan import CausalWan, Session
from longtake.video.codec import StreamingDecoder
from longtake.video.components import CausalModel, load_model
from longtake.video.manifest import read_manifest
from longtake.video.numerics import draw_noise
from longtake.video.parallel import Mesh, facts_of, install
from longtake.video.parallel_decode import divide_decode, undivide
from longtake.video.parallel_groups import Ranks
from longtake.video.parallel_layout import Facts, Layout, bytes_a_layer, resolve_layout
from longtake.video.plan import Inputs, Plan, make_plan
from longtake.video.request import VideoRequest
from longtake.video.rollout import Chunk, Rollout, rollout

BALL = "a red ball bouncing over a green meadow"
STAR = "a blue star moving left over dark hills at night"
FRAMES = 45  # 12 latent frames: 6 chunks of 2
# by number of ranks; every layout runs every cache mode, and those with a * every case
LAYOUTS = {
    4: ("ulysses=4*", "ring=4", "ulysses=2,ring=2*", "cfg=2,ulysses=2", "cfg=2,ring=2", "auto"),
    2: ("ulysses=2", "ring=2", "cfg=2", "auto"),
}
CACHE_MODES = ("window", "global", "chunked", "reading", "guided")
JOB_LIMIT_S = 600
Output = tuple[torch.Tensor, torch.Tensor]


def main(folder: Path, names: list[str]) -> int:
    """Run jobs one after the other; 1 if a rank failed."""
    torch.set_num_threads(1)
    return max(_fork(folder, name, *JOBS[name]) for name in names)


def _fork(folder: Path, name: str, size: int, job: Callable[[Ranks, Path], Any]) -> int:
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os._exit(_be_rank(folder, name, rank, size, job))
        children.append(child)
    failed = 0
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not failed:
            failed = 1
            for other in children:
                os.kill(other, signal.SIGKILL)
    return failed


def _be_rank(
    folder: Path, name: str, rank: int, size: int, job: Callable[[Ranks, Path], Any]
) -> int:
    signal.alarm(JOB_LIMIT_S)
    try:
        store = FileStore(str(folder / f"{name}.store"), size)
        ranks = Ranks(rank, size, store, torch.device("cpu"), JOB_LIMIT_S)
        result = job(ranks, folder)
        if ranks.leader:
            (folder / f"{name}.json").write_text(json.dumps(result))
        ranks.close()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _plan(model: CausalModel, inputs: Inputs | None = None, **fields: Any) -> Plan:
    values: dict[str, Any] = {"prompt": BALL, "seed": 5, "num_frames": FRAMES, **fields}
    return make_plan(VideoRequest(**values), model.manifest, model.shape, inputs=inputs)


def _run(plan: Plan, model: CausalModel, **options: Any) -> Output:
    chunks: list[Chunk] = list(rollout(plan, model, **options))
    return torch.cat([c.latents for c in chunks], 2), torch.cat([c.frames for c in chunks])


def _latents(plan: Plan, model: CausalModel, **options: Any) -> Output:
    """Without VAE decode, which has a job of its own, and is part of two cases."""
    with patch.object(Rollout, "_decode", lambda *_: torch.zeros(1)):
        return _run(plan, model, **options)


def _redo(plan: Plan, model: CausalModel) -> Output:
    """Every chunk is made, thrown away and made again from the state before it."""
    run = Rollout(plan, model)
    chunks = []
    while not run.finished:
        before = run.snapshot()
        run.make_chunk(attempt=1)
        run.restore(before)
        chunk = run.make_chunk()
        if chunk is not None:
            chunks.append(chunk)
    return torch.cat([c.latents for c in chunks], 2), torch.cat([c.frames for c in chunks])


def _cases(model: CausalModel) -> Iterator[tuple[str, bool, Any]]:
    """Name, whether it is guided, and a function that makes it with the model as it is."""
    timeline = (TimedPrompt(1.0, STAR), TimedPrompt(3.5, BALL))
    image = torch.randn(1, 4, 1, 4, 10, generator=torch.Generator().manual_seed(1))
    clip = torch.randn(1, 4, 12, 4, 10, generator=torch.Generator().manual_seed(2))
    stored = draw_noise((1, 4, 2, 4, 10), 9, 0, 0, "start")
    start = Inputs("image", 1)
    yield "window", False, lambda: _run(_plan(model), model)
    yield "global", False, lambda: _latents(_plan(model, attention="global"), model)
    yield "chunked", False, lambda: _latents(_plan(model, attention="global+chunked:7"), model)
    yield "reading", False, lambda: _latents(_plan(model, attention="global+window:5"), model)
    yield "topk", False, lambda: _latents(_plan(model, attention="topk:2"), model)
    yield "int8", False, lambda: _latents(replace(_plan(model), kv_cache="int8"), model)
    yield "guided", True, lambda: _latents(_plan(model, guidance_scale=2.5), model)
    yield "image", False, lambda: _latents(_plan(model, start), model, inputs=image)
    yield (
        "recache",
        True,
        lambda: _latents(_plan(model, prompts=timeline, guidance_scale=2.0), model),
    )
    yield "redo", False, lambda: _redo(_plan(model, prompts=timeline), model)
    yield "resume", False, lambda: _latents(_plan(model), model, stored=[stored])
    redraw = {"video": "clip", "strength": 0.6}
    yield (
        "redraw",
        False,
        lambda: _latents(_plan(model, Inputs("redraw", FRAMES), **redraw), model, inputs=clip),
    )


def parity(ranks: Ranks, folder: Path) -> Any:
    """Every layout and case against one rank, which rank 0 is first while the others wait."""
    model = load_model(read_manifest(folder / "model" / "longtake.json"))
    alone = {name: make() for name, _, make in _cases(model)} if ranks.leader else {}
    ranks.agree(0)
    layouts = LAYOUTS[ranks.size]
    return {text.rstrip("*"): _against(alone, model, ranks, text) for text in layouts}


def _against(
    alone: dict[str, Output], model: CausalModel, ranks: Ranks, text: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, guided, make in _cases(model):
        asked = CACHE_MODES if text != "auto" else ("window", "guided")
        if ("cfg" in text and not guided) or not (text.endswith("*") or name in asked):
            continue
        plan = _plan(model, guidance_scale=2.0) if guided else _plan(model)
        if name == "topk" and "ring" in text:
            continue  # refused at plan time
        layout = resolve_layout(text.rstrip("*"), facts_of(plan), ranks.size)
        install(model, ranks, layout)
        latents, frames = make()
        same = torch.stack([latents.double().sum(), frames.double().sum()])
        everyone = ranks.world.gather(same, [(2,)] * ranks.size)
        latents_alone, frames_alone = alone.get(name, (latents, frames))
        found[name] = {
            "layout": layout.text,
            "latents": (latents - latents_alone).abs().max().item(),
            "rms": ((latents - latents_alone).std() / latents_alone.std()).item(),
            "frames": (frames.int() - frames_alone.int()).abs().max().item(),
            "equal": all(torch.equal(same, other) for other in everyone),
        }
    model.wan.join(None)
    undivide(model.vae)
    return found


def counts(ranks: Ranks, _: Path) -> Any:
    """Bytes sent in one forward, and bytes of the caches, against the formulas."""
    layers, heads, dim, batch = 2, 4, 8, 2
    torch.manual_seed(3)
    wan = CausalWan(_transformer(heads, dim, layers))
    latent, text = (6, 10), torch.ones(3, 16)
    tokens = 15
    whole = wan.new_cache(batch, 5, latent).nbytes
    rows = []
    for layout in (Layout(ulysses=4), Layout(ring=4), Layout(ulysses=2, ring=2)):
        mesh = Mesh(ranks, layout)
        wan.join(mesh)
        cache = wan.new_cache(batch, 5, latent)
        session = Session(cache, wan.encode_text([text, text], 8))
        cache.begin((), (0, 1))
        cache.recording = True
        wan.forward(session, torch.randn(batch, 4, 2, *latent), 0.5)
        cache.begin((0, 1), (2, 3, 4))
        before = ranks.sent
        wan.forward(session, torch.randn(batch, 4, 3, *latent), 0.5)
        sent = ranks.sent - before
        place = layout.place(ranks.rank)
        width = (tokens, heads, dim, 4 * batch)
        own = mesh._shares.own(place.ring)[place.ulysses]
        last = 3 * own * 16 * 4 * batch
        expected = layers * bytes_a_layer(layout, place, 3 * tokens, 5 * tokens, width) + last
        sizes = ranks.world.gather(torch.tensor([cache.nbytes]), [(1,)] * ranks.size)
        rows.append(
            {
                "layout": layout.text,
                "sent": sent,
                "expected": expected,
                "caches": [int(n) for n in sizes],
                "whole": whole,
            }
        )
    everyone = [None] * ranks.size
    dist.all_gather_object(everyone, rows)
    return everyone


def shapes(ranks: Ranks, folder: Path) -> Any:
    """Random shapes and degrees: one forward of two chunks as one rank makes it, or a refusal."""
    rounds = int((folder / "rounds").read_text())
    outcomes: list[dict[str, Any]] = []
    for index in range(rounds):
        draw = random.Random(index)
        heads, dim = draw.randint(1, 6), 2 * draw.randint(3, 5)
        latent = (2 * draw.randint(1, 5), 2 * draw.randint(1, 5))
        frames = (draw.randint(1, 3), draw.randint(1, 3))
        guided = draw.random() < 0.4
        degrees = draw.choice([(4, 1), (1, 4), (2, 2), (2, 1), (1, 2), (1, 1), (3, 1), (1, 3)])
        wanted = Layout(*degrees, cfg=draw.randint(1, 2))
        text = "auto" if draw.random() < 0.3 else wanted.text
        facts = Facts(heads, latent[0] * latent[1] // 4, latent[0], guided)
        try:
            layout = resolve_layout(text, facts, ranks.size)
        except RequestError as refusal:
            outcomes.append({"refused": str(refusal), "field": refusal.field})
            continue
        error = _one_shape(ranks, layout, (heads, dim), latent, frames, guided)
        outcomes.append({"layout": layout.text, "error": error})
    return outcomes


def _one_shape(
    ranks: Ranks,
    layout: Layout,
    width: tuple[int, int],
    latent: tuple[int, int],
    frames: tuple[int, int],
    guided: bool,
) -> float:
    torch.manual_seed(sum(latent))
    wan = CausalWan(_transformer(*width, 1))
    batch = 2 if guided else 1
    first, second = (torch.randn(batch, 4, n, *latent) for n in frames)
    text = [torch.ones(3, 16), torch.zeros(2, 16)][:batch]

    def forward() -> torch.Tensor:
        cache = wan.new_cache(batch, sum(frames), latent)
        session = Session(cache, wan.encode_text(text, 8))
        starts = count()
        own = [tuple(next(starts) for _ in range(n)) for n in frames]
        cache.recording = True
        cache.begin((), own[0])
        wan.forward(session, first, 0.1)
        cache.begin(own[0], own[1])
        return wan.forward(session, second, 0.6)

    alone = forward()
    wan.join(Mesh(ranks, layout))
    together = forward()
    return (together - alone).abs().max().item()


def decode(ranks: Ranks, folder: Path) -> Any:
    """VAE decode by rows: streamed in chunks, redone after a restore, against one rank."""
    model = load_model(read_manifest(folder / "model" / "longtake.json"))
    found = []
    for rows in (4, 5, 11):
        latents = torch.randn(1, 4, 5, rows, 6, generator=torch.Generator().manual_seed(rows))
        undivide(model.vae)
        alone = StreamingDecoder(model.vae).decode(latents)
        divide_decode(model.vae, ranks.world)
        decoder = StreamingDecoder(model.vae)
        pieces = [decoder.decode(latents[:, :, :2])]
        state = decoder.snapshot()
        decoder.decode(-latents[:, :, 2:])
        decoder.restore(state)
        pieces.append(decoder.decode(latents[:, :, 2:]))
        together = torch.cat(pieces, 2)
        found.append({"rows": rows, "error": (together - alone).abs().max().item()})
    return found


def _transformer(heads: int, dim: int, layers: int) -> WanTransformer3DModel:
    model: WanTransformer3DModel = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=dim,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=layers,
        rope_max_seq_len=32,
    )
    return model.eval()


JOBS = {
    "parity-4": (4, parity),
    "parity-2": (2, parity),
    "counts": (4, counts),
    "shapes": (4, shapes),
    "decode": (3, decode),
}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
