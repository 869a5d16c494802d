"""Tokenizer and text encoder: one token a word of the closed vocabulary, a two-layer UMT5.

The pipeline pads embeddings with zeros and attends to them without a mask. One zero row with an
attention bias of log(number of pads) is exactly that and much cheaper, so training uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from training.papercut.vocabulary import words

TEXT_LENGTH = 32
TEXT_DIM = 96
_SPECIAL = ("<pad>", "</s>", "<unk>")


@dataclass(frozen=True, slots=True)
class Context:
    """Embeddings ``[B, L, D]``, one zero row for all pads; attention bias ``[B, 1, 1, L]``."""

    rows: Tensor
    bias: Tensor


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer; what it does not know becomes ``<unk>``."""
    numbers = {word: index for index, word in enumerate((*_SPECIAL, *words()))}
    inner = Tokenizer(models.WordLevel(numbers, unk_token=_SPECIAL[2]))
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=512, **names)


def make_encoder(vocabulary: int) -> UMT5EncoderModel:
    """An untrained text encoder of 0.2 M weights."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocabulary,
            d_model=TEXT_DIM,
            d_kv=24,
            d_ff=192,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=32,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            tie_word_embeddings=False,
        )
    )


def encode_prompts(
    tokenizer: PreTrainedTokenizerFast,
    encoder: UMT5EncoderModel,
    prompts: list[str],
    padded_length: int = TEXT_LENGTH,
) -> Context:
    """What the transformer's cross-attention sees of each prompt."""
    tokens = tokenizer(prompts, padding=True, return_tensors="pt").to(encoder.device)
    mask = tokens.attention_mask
    rows = encoder(tokens.input_ids, mask).last_hidden_state * mask[..., None]
    lengths = mask.sum(1)
    bias = torch.where(mask.bool(), 0.0, -1e4)
    pads = torch.log((padded_length - lengths).clamp(min=1).float())
    rows = torch.cat([rows, rows.new_zeros(len(prompts), 1, rows.shape[2])], 1)
    return Context(rows, torch.cat([bias, pads[:, None]], 1)[:, None, None])
