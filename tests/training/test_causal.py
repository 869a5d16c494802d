"""The chunk-parallel training forward is the stock transformer, and the engine's cached rollout."""

from __future__ import annotations

import torch
from diffusers import WanTransformer3DModel

from longtake.video.causal_wan import CausalWan, Session
from training.papercut import causal, text

PROMPTS = ["a red ball bouncing over a meadow", ""]


def perturbed() -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = causal.make_transformer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    return model.eval()


def alone(latents: torch.Tensor, sigmas: torch.Tensor) -> causal.Chunks:
    rows = torch.arange(len(latents))
    return causal.Chunks(latents, sigmas, rows, ((rows, rows.new_zeros(len(rows), 0)),), 0)


@torch.no_grad()
def test_one_chunk_equals_the_stock_forward() -> None:
    model = perturbed()
    tokenizer = text.make_tokenizer()
    encoder = text.make_encoder(len(tokenizer)).eval()
    latents, sigmas = torch.randn(2, 16, 3, 10, 16), torch.tensor([0.7, 0.2])
    short = text.encode_prompts(tokenizer, encoder, PROMPTS)
    whole = {"padding": "max_length", "max_length": text.TEXT_LENGTH}
    tokens = tokenizer(PROMPTS, return_tensors="pt", **whole)
    rows = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    rows = rows * tokens.attention_mask[..., None]
    stock = model(latents, 1000 * sigmas, rows, return_dict=False)[0]
    made = causal.forward(model, alone(latents, sigmas), short)
    torch.testing.assert_close(made, stock, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_sequences_equal_the_cached_rollout() -> None:
    """Four chunks: the last sees the sink, its predecessor and itself, not the second chunk."""
    model = perturbed()
    tokenizer = text.make_tokenizer()
    encoder = text.make_encoder(len(tokenizer)).eval()
    chunks = torch.randn(4, 1, 16, causal.CHUNK, 10, 16)
    noisy = torch.randn(1, 16, causal.CHUNK, 10, 16)
    context = text.encode_prompts(tokenizer, encoder, PROMPTS[:1])
    flat = torch.cat([chunks[0], chunks[1], chunks[2], noisy])
    sees = (
        (torch.tensor([0]), torch.zeros(1, 0, dtype=torch.long)),
        (torch.tensor([1]), torch.tensor([[0]])),
        (torch.tensor([2, 3]), torch.tensor([[0, 1], [0, 2]])),
    )
    sigmas = torch.tensor([0.1, 0.1, 0.1, 0.75])
    batch = causal.Chunks(flat, sigmas, torch.zeros(4, dtype=torch.long), sees, 3)
    made = causal.forward(model, batch, context)

    wan = CausalWan(model)
    tokens = tokenizer(PROMPTS[0], return_tensors="pt")
    rows = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
    cache = wan.new_cache(1, causal.WINDOW, (10, 16))
    session = Session(cache, wan.encode_text([rows], text.TEXT_LENGTH))
    for index in range(3):
        own = range(3 * index, 3 * index + 3)
        cache.begin(range(own[0]), own)
        cache.recording = True
        wan.forward(session, chunks[index], 0.1)
        cache.recording = False
    cache.begin([0, 1, 2, 6, 7, 8], range(9, 12))
    cached = wan.forward(session, noisy, 0.75)
    torch.testing.assert_close(made, cached, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_untrained_transformer_returns_its_input() -> None:
    model = causal.make_transformer().eval()
    latents = torch.randn(2, 16, 3, 10, 16)
    rows = torch.zeros(2, 4, text.TEXT_DIM)
    made = model(latents, torch.tensor([1000.0, 900.0]), rows, return_dict=False)[0]
    assert float((made - latents).pow(2).mean()) < 0.1
