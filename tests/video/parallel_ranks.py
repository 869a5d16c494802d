"""Ranks of the tests of sequence parallelism: ``-m tests.video.parallel_ranks FOLDER JOB...``.

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
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch._C._distributed_c10d import FileStore

import longtake.video  # noqa: F401  fixes the numerics before torch is imported
from longtake.errors import ParallelError, RequestError
from longtake.video.causal_wan import CausalWan, Session
from longtake.video.codec import StreamingDecoder
from longtake.video.components import CausalModel, load_model
from longtake.video.manifest import read_manifest
from longtake.video.parallel import Mesh, install
from longtake.video.parallel_decode import divide_decode, undivide
from longtake.video.parallel_groups import Limits, Ranks
from longtake.video.parallel_layout import (
    WHOLE_FRAMES,
    Facts,
    Layout,
    bytes_a_layer,
    facts_of,
    resolve_layout,
)
from longtake.video.rollout import rollout
from tests.video.parallel_cases import Output, cases, plan_of

# by number of ranks; those with a * run every case
LAYOUTS = {
    4: ("ulysses=4", "ring=4", "ulysses=2,ring=2*", "cfg=2,ring=2", "auto"),
    2: ("ulysses=2*", "ring=2*", "cfg=2*"),
}
CACHE_MODES = ("window", "global", "chunked", "reading", "guided")
JOB_LIMIT_S = 600
SILENT = Limits(data_s=2.0, control_s=1.0)


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
        limits = SILENT if name == "silent" else Limits(data_s=JOB_LIMIT_S)
        ranks = Ranks(rank, size, store, torch.device("cpu"), limits)
        result = job(ranks, folder)
        if ranks.leader:
            (folder / f"{name}.json").write_text(json.dumps(result))
        ranks.close()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _alone(model: CausalModel, ranks: Ranks, folder: Path, *, guided: bool) -> dict[str, Output]:
    """Every case on one rank, made once for all jobs; each rank makes some of them."""
    known = folder / f"alone-{guided}.pt"
    if not known.is_file():
        whole = list(cases(model, guided=guided).items())
        mine = {name: make() for name, make in whole[ranks.rank :: ranks.size]}
        everyone: list[Any] = [None] * ranks.size
        dist.all_gather_object(everyone, mine)
        if ranks.leader:
            torch.save({name: made for part in everyone for name, made in part.items()}, known)
    ranks.agree(0)
    found: dict[str, Output] = torch.load(known)
    return found


def parity(ranks: Ranks, folder: Path) -> Any:
    """Every layout and case against one rank."""
    model = load_model(read_manifest(folder / "model" / "longtake.json"))
    return {text.rstrip("*"): _against(model, ranks, folder, text) for text in LAYOUTS[ranks.size]}


def _against(model: CausalModel, ranks: Ranks, folder: Path, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    guided = "cfg" in text
    alone = _alone(model, ranks, folder, guided=guided)
    for name, make in cases(model, guided=guided).items():
        asked = CACHE_MODES if text != "auto" else ("guided",)
        if not (text.endswith("*") or name in asked) or (name in WHOLE_FRAMES and "ring" in text):
            continue  # the latter is refused at plan time
        plan = plan_of(model, guidance_scale=2.0 if guided or name == "guided" else 1.0)
        layout = resolve_layout(text.rstrip("*"), facts_of(plan), ranks.size)
        install(model, ranks, layout)
        latents, frames = make()
        same = torch.stack([latents.double().sum(), frames.double().sum()])
        everyone = ranks.world.gather(same, [(2,)] * ranks.size)
        latents_alone, frames_alone = alone[name]
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


def leaving(ranks: Ranks, folder: Path) -> Any:
    """Rank 0 alone is asked to stop, in the middle of a chunk: steps that every rank has done."""
    model = load_model(read_manifest(folder / "model" / "longtake.json"))
    install(model, ranks, Layout(ulysses=2))
    asked: list[int] = []
    done: list[int] = []

    def stopping() -> bool:
        asked.append(1)
        return len(asked) > 12

    plan = plan_of(model, num_inference_steps=5)
    flag = ranks.stop_flag(stopping)
    made = rollout(plan, model, stop=flag, on_step=lambda event: done.append(event.step))
    chunks = len(list(made))
    everyone: list[Any] = [None] * ranks.size
    dist.all_gather_object(everyone, {"steps": done, "chunks": chunks, "asked": len(asked)})
    return everyone


def silent(ranks: Ranks, folder: Path) -> Any:
    """Rank 1 stops itself: rank 2 waits to be told something, and rank 0 longer for data."""
    pids = ranks.world.gather(torch.tensor([os.getpid()]), [(1,)] * ranks.size)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        if ranks.leader:
            ranks.world.swap(1, torch.zeros(1))
        else:
            ranks.hear()
    except ParallelError as error:
        (folder / f"silent-{ranks.rank}.json").write_text(json.dumps(str(error)))
    if ranks.leader:
        os.kill(int(pids[1]), signal.SIGCONT)
    os._exit(0)  # a broken group is not closed


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
    "leaving": (2, leaving),
    "silent": (3, silent),
}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
