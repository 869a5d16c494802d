"""One rank of ``benchmarks.parallel``; rank 0 writes the seconds of every turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch._C._distributed_c10d import FileStore

from longtake.video.causal_wan import CausalWan, Session
from longtake.video.parallel import Mesh
from longtake.video.parallel_groups import Ranks
from longtake.video.parallel_layout import parse_layout

CHANNELS, TEXT, CHUNK = 16, 64, 3
WARM_UP = (8, 8)


def main(rank: int, size: int, folder: Path, use: dict[str, Any]) -> None:
    """Take turns: rank 0 alone while the others wait, then each layout together."""
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), size)
    ranks = Ranks(rank, size, store, torch.device("cpu"))
    torch.manual_seed(0)
    wan = CausalWan(_model(use))
    meshes = {
        text: Mesh(ranks, layout) for text in use["layouts"] if (layout := parse_layout(text))
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("alone", *meshes)}
    for turn in range(use["repeats"] + 1):
        # a small one first: connections, and code that is built when it is first run
        now = use if turn else {**use, "latent": WARM_UP}
        wan.join(None)
        if ranks.leader:
            seconds["alone"].append(_forward(wan, now))
        for text, mesh in meshes.items():
            ranks.agree(0)
            wan.join(mesh)
            seconds[text].append(_forward(wan, now))
        ranks.agree(0)
    if ranks.leader:
        parameters = sum(p.numel() for p in wan.transformer.parameters())
        result = {name: times[1:] for name, times in seconds.items()}
        result["parameters"] = [float(parameters)]
        (folder / "result.json").write_text(json.dumps(result))
    ranks.close()


def _forward(wan: CausalWan, use: dict[str, Any]) -> float:
    """Seconds of one noisy forward; the past's keys and values are whatever memory holds."""
    high, wide = use["latent"]
    past = tuple(range(use["past"]))
    own = tuple(range(use["past"], use["past"] + CHUNK))
    cache = wan.new_cache(1, len(past) + CHUNK, (high, wide))
    session = Session(cache, wan.encode_text([torch.ones(8, TEXT)], 8))
    if past:
        cache.begin((), past)  # gives them slots; nothing is computed for them
    cache.begin(past, own)
    x = torch.randn(1, CHANNELS, CHUNK, high, wide)
    began = perf_counter()
    wan.forward(session, x, 0.5)
    return perf_counter() - began


def _model(use: dict[str, Any]) -> WanTransformer3DModel:
    model: WanTransformer3DModel = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=use["heads"],
        attention_head_dim=use["head_dim"],
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT,
        freq_dim=64,
        ffn_dim=use["ffn_dim"],
        num_layers=use["layers"],
        rope_max_seq_len=64,
    )
    return model


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
