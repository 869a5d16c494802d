"""The ranks of one attempt: how they begin it together, agree on it, and leave it together.

Rank 0 tells when an attempt begins and how many stored chunks it goes on from, then its stop flag
before every step, and that it is over. A rank that waits for any of these can be told any other
of them, so rank 0 may leave by an error wherever it does not exchange data. An error inside an
exchange leaves the others waiting for good: whoever started the ranks ends them (fail-stop).
"""

from __future__ import annotations

from collections.abc import Callable

from longtake.errors import BackendError, DeviceError, ModelError, RequestError, ResumeError
from longtake.video.model_cache import ModelCache
from longtake.video.options import EngineOptions, SilentObserver, Storage
from longtake.video.parallel_groups import OVER, Abandoned, Ranks
from longtake.video.prepare import choose_mode
from longtake.video.prepare_clip import prepare_clip
from longtake.video.prepare_hybrid import prepare_hybrid
from longtake.video.request import VideoRequest
from longtake.video.source import find_model

FIRST_BEGIN = -2
# what every rank meets alike, since all of them read the same request and files
SHARED_ERRORS = (RequestError, ResumeError, ModelError, DeviceError, BackendError)


def begin(ranks: Ranks | None, stored: int = 0) -> None:
    """Rank 0: an attempt begins that goes on from ``stored`` chunks."""
    if ranks is not None:
        ranks.hear(FIRST_BEGIN - stored)


def follow(
    request: VideoRequest,
    engine: EngineOptions,
    storage: Callable[[int], Storage],
    models: ModelCache,
) -> None:
    """Be another rank than 0 through the attempts at one video, until rank 0 says it is over.

    Args:
        request: the same as rank 0's.
        engine: with this rank's device and ``ranks``.
        storage: where stored chunks are, by how many there are; nothing is written.
        models: where the model may be loaded already.

    Raises:
        LongtakeError: what rank 0 meets as well, or what makes this rank unfit.
    """
    ranks = engine.ranks
    if ranks is None:
        return
    told = ranks.hear()
    while told != OVER:
        context = (engine, storage(FIRST_BEGIN - told), SilentObserver())
        try:
            source = find_model(request.model)
            if choose_mode(request, source) == "clip":
                plain = engine.for_clip
                context = (plain, Storage(), SilentObserver())
                made = prepare_clip(request, source, context, lambda _: None, models)
            else:
                made = prepare_hybrid(request, source, context, lambda _: None, models)
            for _ in made.pieces:
                pass
            told = ranks.hear()
        except Abandoned as left:
            told = left.told
        except SHARED_ERRORS:
            told = ranks.hear()
            if told >= 0:
                raise  # rank 0 goes on, so this rank alone is unfit
