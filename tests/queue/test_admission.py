"""What the engines of a service could not do is refused before a job exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longtake.errors import RequestError
from longtake.queue.client import Client
from longtake.queue.database import open_database
from longtake.queue.store import Store
from longtake.settings import Settings
from longtake.video.plan import Plan

NewClient = Callable[..., Client]
REQUEST: dict[str, Any] = {"prompt": "a red ball", "num_frames": 33}


@pytest.fixture
def new_client(make_model: Callable[..., Path], sqlite_url: str) -> Iterator[NewClient]:
    """Make a client of a service with these settings, whose model has two heads."""
    store = Store(open_database(sqlite_url))
    model = str(make_model("tiny"))

    def make(**settings: Any) -> Client:
        return Client(store, Settings(models=(model,), default_model=model, **settings))

    yield make
    store.close()


@pytest.mark.parametrize(
    ("parallel", "changes", "reason"),
    [
        ("ulysses=4", {}, "ulysses=4 does not divide 2 heads; ulysses of 1, 2"),
        ("ring=5", {}, "5 ranks cannot divide VAE decode of 4 rows"),
        ("cfg=2", {}, "guidance_scale is 1"),
        ("ring=2", {"attention": "topk:2"}, "ring cuts frames, and attention=topk ranks whole"),
        ("ulysses=2", {"model": "papercut", "mode": "clip"}, "this service has CPU ranks; mode="),
    ],
)
def test_what_ranks_cannot_share_makes_no_job(
    new_client: NewClient, parallel: str, changes: dict[str, Any], reason: str
) -> None:
    client = new_client(parallel=parallel)
    with pytest.raises(RequestError, match=reason) as caught:
        client.new_job(REQUEST | changes)
    assert caught.value.field == "parallel"
    assert Client(client.store, client.settings.model_copy(update={"parallel": None})).new_job(
        REQUEST | changes
    )


def test_what_they_can_share_does(new_client: NewClient) -> None:
    for parallel in ("ulysses=2", "ring=4", "ulysses=2,ring=2"):
        assert new_client(parallel=parallel).new_job(REQUEST)
    assert new_client(parallel="cfg=2").new_job(REQUEST | {"guidance_scale": 2.0})
    # diffusers divides a clip over GPUs; whether it can is the engine's to say
    clip = REQUEST | {"model": "papercut", "mode": "clip"}
    assert new_client(gpus=("0", "1")).new_job(clip)


def test_a_plan_counts_what_the_cache_stores(new_client: NewClient) -> None:
    sizes = []
    for kv_cache in (None, "int8"):
        plan = new_client(kv_cache=kv_cache).plan(REQUEST).plan
        assert isinstance(plan, Plan)
        assert plan.kv_cache == kv_cache
        sizes.append(plan.as_dict()["cost"]["bytes"]["kv_cache"])
    assert sizes[1] < sizes[0]
