"""The engine: from a request to latents, frames and files."""
