"""longtake: long videos from causal video diffusion models, made chunk by chunk."""

__version__ = "0.1.0"
