"""FlexAttention as one function: compiled on CUDA, the unfused form elsewhere.

Its block masks are made in ``attention_blocks.py``. FlexAttention: arXiv 2412.05496. Shapes: B
batch, S tokens, H heads, D head dimension.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from longtake.video.attention import Partial

# kernels in one process (by model, dtype and mask, not by number of keys); where there are more
# PyTorch runs the unfused form without a word
MOST_KERNELS = 64


def flex_function(device: torch.device, compiler: Any = None) -> Callable[..., Partial]:
    """FlexAttention on q, k, v [B, S, H, D], with a ``BlockMask`` and a score function or None.

    Compiled where there is a CUDA device and Triton; elsewhere the unfused form, which makes the
    whole matrix of scores. Sizes that change, as the number of keys does with every chunk, are left
    open in the second kernel, which then serves all of them (PyTorch's automatic dynamic shapes).

    Args:
        device: where it will run.
        compiler: backend of ``torch.compile`` to use in any case.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    call: Any = flex_attention
    if compiler is None and device.type == "cuda" and find_spec("triton") is not None:
        compiler = "inductor"
    if compiler is not None:
        import torch._dynamo.config as dynamo

        dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_KERNELS)
        call = torch.compile(flex_attention, backend=compiler)

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_mask: Any = None,
        score_mod: Any = None,
    ) -> Partial:
        heads_first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        with warnings.catch_warnings():
            # it says that the unfused form is slow; whoever named it was told by the bench
            warnings.filterwarnings("ignore", message="flex_attention called without")
            out, more = call(
                *heads_first,
                score_mod=score_mod,
                block_mask=block_mask,
                return_aux=AuxRequest(lse=True),
            )
        return Partial(out.transpose(1, 2), more.lse)

    return run


def adds_bias(bias: torch.Tensor) -> Any:
    """FlexAttention's form of a bias, each of whose dimensions may be 1 for all."""
    alike = [size == 1 for size in bias.shape]

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        at = [i * 0 if one else i for i, one in zip((b, h, q, kv), alike, strict=True)]
        return score + bias[at[0], at[1], at[2], at[3]]

    return score_mod
