"""Schedules: which sigma, which chunk, which prompt. Pure Python, no tensors."""
