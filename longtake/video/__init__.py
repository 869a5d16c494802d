"""The engine: from a request to latents, frames and files.

Importing it fixes the environment that torch's libraries read when they load; torch itself is not
imported.
"""

from longtake.video.numerics import fix_environment

fix_environment()
