"""How one video is divided over ranks: the layout, its rules, and what each rank gets. No torch.

    LAYOUT = auto | PART {"," PART}        PART = ulysses=N | ring=N | cfg=2

``ulysses``: tokens are sharded outside attention and heads inside it (all-to-all, DeepSpeed-
Ulysses, arXiv 2309.14509), so N divides the heads. ``ring``: every latent frame's tokens are
sharded, inside attention too (ring attention, arXiv 2310.01889), for any N. Both together are a
mesh (USP, arXiv 2405.07719). ``cfg=2``: the prompted and the unprompted half of guidance on two
groups. The product is the number of ranks. Nothing is padded: shares differ by one where a
division leaves a rest.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longtake.errors import RequestError

if TYPE_CHECKING:
    from longtake.video.plan import Plan

PARTS = ("ulysses", "ring", "cfg")
MOST_RANKS = 1024
LEGAL = "auto, or ulysses=N, ring=N and cfg=2 joined by commas"
# attention readings that need whole frames on each rank
WHOLE_FRAMES = ("topk", "radial")


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of a division; 1 is none.

    Rank = (cfg index x ring + ring index) x ulysses + ulysses index: the ranks that exchange most
    are neighbours.
    """

    ulysses: int = 1
    ring: int = 1
    cfg: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.ulysses * self.ring * self.cfg

    @property
    def text(self) -> str:
        """As ``parse_layout`` reads it; ``ulysses=1`` for one rank."""
        named = [f"{name}={getattr(self, name)}" for name in PARTS if getattr(self, name) > 1]
        return ",".join(named) or "ulysses=1"

    def place(self, rank: int) -> Place:
        """Where a rank stands."""
        rest, ulysses = divmod(rank, self.ulysses)
        cfg, ring = divmod(rest, self.ring)
        return Place(ulysses, ring, cfg)

    def rank(self, place: Place) -> int:
        """The rank that stands there."""
        return (place.cfg * self.ring + place.ring) * self.ulysses + place.ulysses


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's index along each degree."""

    ulysses: int
    ring: int
    cfg: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What a layout is held against.

    Attributes:
        heads: attention heads.
        frame_tokens: tokens of one latent frame.
        latent_rows: height of the latents, which VAE decode is divided by.
        guided: True where two forwards are made (guidance_scale is not 1).
        readings: kinds of the attention plan's readings.
    """

    heads: int
    frame_tokens: int
    latent_rows: int
    guided: bool
    readings: tuple[str, ...] = ("full",)


def facts_of(plan: Plan) -> Facts:
    """What a layout for this plan is held against."""
    return Facts(
        heads=plan.shape.transformer.heads,
        frame_tokens=plan.frame_tokens,
        latent_rows=plan.latent_shape[1],
        guided=plan.guided,
        readings=tuple(reading.kind for reading in plan.reading.readings),
    )


def share(count: int, parts: int) -> tuple[int, ...]:
    """``count`` things over ``parts``: as even as can be, the first ones get the rest."""
    whole, rest = divmod(count, parts)
    return tuple(whole + (part < rest) for part in range(parts))


def bounds(count: int, parts: int, part: int) -> tuple[int, int]:
    """First and last + 1 of a part's share."""
    sizes = share(count, parts)
    first = sum(sizes[:part])
    return first, first + sizes[part]


def parse_layout(text: str) -> Layout | None:
    """The layout of a text; None for ``auto``.

    Raises:
        RequestError: of the field ``parallel``.
    """
    if text == "auto":
        return None
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        if name not in PARTS or not equals or name in degrees:
            again = "is named twice" if name in degrees else "is no layout"
            raise RequestError("parallel", text, f"{part.strip()!r} {again}", LEGAL)
        if not re.fullmatch(r"[0-9]{1,6}", number) or not 1 <= int(number) <= MOST_RANKS:
            reason = f"{name}={number[:20]} is not a number of ranks"
            raise RequestError("parallel", text, reason, f"{name}=1 to {name}={MOST_RANKS}")
        degrees[name] = int(number)
    layout = Layout(**degrees)
    if layout.cfg > 2:
        raise RequestError("parallel", text, "guidance has two halves", "cfg=1 or cfg=2")
    if layout.ranks > MOST_RANKS:
        raise RequestError("parallel", text, "too many ranks", f"at most {MOST_RANKS} together")
    return layout


def resolve_layout(text: str, facts: Facts, ranks: int | None = None) -> Layout:
    """The layout that a text means for a model and a plan.

    Args:
        text: as in the module's docstring.
        facts: of the plan.
        ranks: how many there are; None takes what the text says.

    Raises:
        RequestError: of the field ``parallel``; names the rule and what would be legal.
    """
    layout = parse_layout(text)
    if layout is None:
        if ranks is None:
            raise RequestError("parallel", text, "the number of ranks is not known", LEGAL)
        return choose_layout(ranks, facts)
    if ranks is not None and layout.ranks != ranks:
        reason = f"is a layout for {layout.ranks} ranks, there are {ranks}"
        raise RequestError("parallel", text, reason, f"degrees whose product is {ranks}")
    broken = broken_rule(layout, facts)
    if broken is not None:
        raise RequestError("parallel", text, *broken)
    return layout


def choose_layout(ranks: int, facts: Facts) -> Layout:
    """The layout of ``ranks`` that sends least: guidance halves first, then heads, then ring.

    Raises:
        RequestError: none is legal.
    """
    candidates = [
        Layout(ulysses, ranks // cfg // ulysses, cfg)
        for cfg in ((2, 1) if facts.guided else (1,))
        if ranks % cfg == 0
        for ulysses in range(ranks // cfg, 0, -1)
        if (ranks // cfg) % ulysses == 0
    ]
    for layout in candidates:
        if broken_rule(layout, facts) is None:
            return layout
    reason, legal = broken_rule(candidates[-1], facts) or ("", "")
    raise RequestError("parallel", "auto", f"{ranks} ranks cannot share this: {reason}", legal)


def usable_cores() -> int:
    """CPU cores that this process may use; without CUDA devices ``auto`` has a rank for each."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def most_ranks(there: int, facts: Facts) -> int:
    """The most ranks, of those that are there, that some layout can share this between."""
    for ranks in range(there, 1, -1):
        try:
            choose_layout(ranks, facts)
        except RequestError:
            continue
        return ranks
    return 1


def broken_rule(layout: Layout, facts: Facts) -> tuple[str, str] | None:
    """The first rule that a layout breaks, and what would be legal; None if there is none."""
    if facts.heads % layout.ulysses:
        legal = ", ".join(str(n) for n in range(1, facts.heads + 1) if facts.heads % n == 0)
        reason = f"ulysses={layout.ulysses} does not divide {facts.heads} heads"
        return reason, f"ulysses of {legal}; ring takes any number"
    if layout.cfg > 1 and not facts.guided:
        return "cfg=2 divides guidance, and guidance_scale is 1", "cfg=1"
    tokens = facts.frame_tokens
    if layout.ring > tokens:
        return f"ring={layout.ring} is more than a frame's {tokens} tokens", f"ring to {tokens}"
    if layout.ulysses > tokens // layout.ring:
        most = tokens // layout.ring
        reason = f"ulysses={layout.ulysses} is more than the {most} tokens of a frame's share"
        return reason, f"ulysses to {most}"
    if layout.ranks > facts.latent_rows:
        reason = f"{layout.ranks} ranks cannot divide VAE decode of {facts.latent_rows} rows"
        return reason, f"at most {facts.latent_rows} ranks"
    whole = [kind for kind in facts.readings if kind in WHOLE_FRAMES]
    if layout.ring > 1 and whole:
        return f"ring cuts frames, and attention={whole[0]} ranks whole ones", "ulysses alone"
    return None


def bytes_a_layer(
    layout: Layout, place: Place, tokens: int, seen: int, width: tuple[int, int, int, int]
) -> int:
    """Bytes that one rank sends in one layer's self-attention of one forward.

    Ulysses: a rank's queries, keys and values of its own tokens go to the ranks of its group, one
    share of the heads each, and the result comes back the same way::

        own x 3 x h x D + (all - own) x h x D      for each of the U - 1 others, h = H / U

    where ``own`` are its tokens outside attention and ``all`` those of its group. The KV cache
    stays where it is: what is seen does not enter. Ring: keys and values seen travel R - 1 times::

        (R - 1) hops x 2 x seen_part x h x D

    where a hop carries the part that a rank holds at that moment.

    Args:
        layout, place: whose bytes.
        tokens: of the chunk, a whole number of frames times the frame's tokens.
        seen: tokens in reach, own ones included.
        width: (tokens of a frame, heads, head dimension, bytes of one number times the batch).
    """
    frame_tokens, heads, dim, item = width
    head_bytes = heads // layout.ulysses * dim * item
    parts = share(frame_tokens, layout.ring)
    together = tokens // frame_tokens * parts[place.ring]
    own = share(together, layout.ulysses)[place.ulysses]
    others = layout.ulysses - 1
    heads_out = others * 3 * own * head_bytes
    tokens_back = (together - own) * head_bytes
    frames_seen = seen // frame_tokens
    held = [parts[(place.ring - hop) % layout.ring] for hop in range(layout.ring - 1)]
    passed = 2 * frames_seen * sum(held) * head_bytes
    return heads_out + tokens_back + passed
