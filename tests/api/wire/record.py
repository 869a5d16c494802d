"""Record what OpenAI's SDK really sends: ``python tests/api/wire/record.py`` rewrites *.json here.

Each file is one request: method, path, the headers that matter, the body in base64. Ids stand as
``PLACE``, which has the length of a real one, so that a replay may put one in.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import openai

PLACE = "video_" + "a" * 24
KEPT = ("content-type", "accept", "x-stainless-retry-count", "x-stainless-poll-helper")
CLIP = ("clip.mp4", b"CLIP", "video/mp4")
IMAGE = ("start.webp", b"IMAGE", "image/webp")
VIDEO = {"id": PLACE, "object": "video", "status": "completed", "model": "papercut"}
PROMPT = "a red ball"


def calls(client: Any) -> dict[str, Callable[[], object]]:
    """What is recorded, by name."""
    videos = client.videos
    nothing = ("upload", b"")
    return {
        "create": lambda: videos.create(
            prompt=PROMPT, model="papercut", seconds="5", size="128x80"
        ),
        "create_extra_body": lambda: videos.create(
            prompt=PROMPT, extra_body={"seed": 42, "num_inference_steps": 6, "num_frames": 17}
        ),
        "create_nested_list": lambda: videos.create(
            prompt=PROMPT,
            extra_body={"prompts": [{"at": 1, "prompt": "x"}, {"at": 2, "prompt": "y"}]},
        ),
        "create_json_text": lambda: videos.create(
            prompt=PROMPT,
            seconds="5",
            extra_body={"prompts": json.dumps([{"at": 1, "prompt": "snow"}]), "tags": ["a", "b"]},
        ),
        "create_file": lambda: videos.create(prompt=PROMPT, input_reference=IMAGE),
        "create_bytes": lambda: videos.create(prompt=PROMPT, input_reference=b"IMAGE"),
        "create_reference": lambda: videos.create(
            prompt=PROMPT, extra_body={"input_reference": {"image_url": "data:IMAGE"}}
        ),
        "create_empty_file": lambda: videos.create(prompt=PROMPT, input_reference=nothing),
        "remix": lambda: videos.remix(PLACE, prompt="a blue ball"),
        "edit_file": lambda: videos.edit(prompt="snow", video=CLIP),
        "edit_id": lambda: videos.edit(
            prompt="snow", video=b"", extra_body={"video": {"id": PLACE}}
        ),
        "extend_file": lambda: videos.extend(prompt="snow", seconds="4", video=CLIP),
        "extend_id": lambda: videos.extend(
            prompt="snow", seconds="4", video=nothing, extra_body={"video": {"id": PLACE}}
        ),
        "retrieve": lambda: videos.retrieve(PLACE),
        "poll": lambda: videos.poll(PLACE, poll_interval_ms=5),
        "list": lambda: videos.list(limit=2, order="asc", after=PLACE),
        "content": lambda: videos.download_content(PLACE),
        "content_thumbnail": lambda: videos.download_content(PLACE, variant="thumbnail"),
        "content_spritesheet": lambda: videos.download_content(PLACE, variant="spritesheet"),
        "create_character": lambda: videos.create_character(name="x", video=CLIP),
        "get_character": lambda: videos.get_character("char_1"),
        "delete": lambda: videos.delete(PLACE),
    }


class Recorder(BaseHTTPRequestHandler):
    """Answers everything with a finished video, and keeps what came."""

    seen: list[dict[str, Any]]

    def answer(self) -> None:
        """Keep one request."""
        length = int(self.headers.get("content-length") or 0)
        headers = {k.lower(): v for k, v in self.headers.items() if k.lower() in KEPT}
        self.seen.append(
            {
                "method": self.command,
                "path": self.path,
                "headers": headers,
                "body": base64.b64encode(self.rfile.read(length)).decode(),
            }
        )
        data = json.dumps(VIDEO).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the names that the server looks for

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


def record(folder: Path) -> None:
    """Write one file for each call."""
    seen: list[dict[str, Any]] = []
    handler = type("Handler", (Recorder,), {"seen": seen})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
        for name, call in calls(client).items():
            seen.clear()
            with contextlib.suppress(openai.OpenAIError, AttributeError):
                call()
            text = json.dumps({"sdk": f"openai {openai.__version__}", **seen[0]}, indent=1)
            (folder / f"{name}.json").write_text(text + "\n")
        server.shutdown()


if __name__ == "__main__":
    record(Path(__file__).parent)
