"""The gallery: pages on which videos are asked for, watched being made, found and compared."""

from longtake.api.gallery.gate import install

__all__ = ["install"]
