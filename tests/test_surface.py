"""What users hold on to: routes and settings. A change here is a change of the public surface.

The table schema is frozen in tests/queue.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from longtake.api.app import create_app
from longtake.settings import Settings

ROUTES = """
DELETE /v1/videos/{video_id}
DELETE /v1/webhooks/{webhook_id}
GET /healthz
GET /metrics
GET /readyz
GET /v1/batches
GET /v1/batches/{batch_id}
GET /v1/events
GET /v1/models
GET /v1/models/{name}
GET /v1/videos
GET /v1/videos/characters/{character_id}
GET /v1/videos/{video_id}
GET /v1/videos/{video_id}/content
GET /v1/videos/{video_id}/events
GET /v1/videos/{video_id}/preview
GET /v1/videos/{video_id}/receipt
GET /v1/videos/{video_id}/segments
GET /v1/videos/{video_id}/segments/{name}
GET /v1/webhook_event_types
GET /v1/webhooks
GET /v1/webhooks/{webhook_id}
GET /v1/webhooks/{webhook_id}/deliveries
GET /v1/workers
PATCH /v1/videos/{video_id}
POST /v1/batches
POST /v1/batches/{batch_id}/cancel
POST /v1/videos
POST /v1/videos/characters
POST /v1/videos/edits
POST /v1/videos/extensions
POST /v1/videos/plan
POST /v1/videos/{video_id}/cancel
POST /v1/videos/{video_id}/remix
POST /v1/videos/{video_id}/restore
POST /v1/videos/{video_id}/retry
POST /v1/videos/{video_id}/trash
POST /v1/webhooks
POST /v1/webhooks/{webhook_id}
POST /v1/webhooks/{webhook_id}/rotate_secret
POST /v1/webhooks/{webhook_id}/test
"""
SETTINGS = """
affinity_s
allow_open
allow_private_addresses
allow_remote_references
artifacts_url
backend
base_path
cors_origins
data_dir
database_url
decode_limit_s
default_model
device
dtype
engine_max_growth
engine_max_jobs
finish_limit_s
gpus
heartbeat_s
host
idempotency_s
kv_cache
lease_s
load_limit_s
log_level
max_attempts
max_body_bytes
max_bytes
max_queued
max_running_s
max_upload_bytes
max_upload_frames
max_upload_pixels
min_free_bytes
models
parallel
poison_limit
poll_s
port
preload
profile
queue
reconcile_s
redis_url
renew_s
requests_per_minute
require_keys
retention_bytes
retention_s
retry_delay_s
scratch_dir
session_secret
start_limit_s
step_limit_s
stop_grace_s
threads
trash_s
upload_decode_s
upload_memory_bytes
webhook_timeout_s
"""


def test_routes_are_frozen(tmp_path: Path) -> None:
    paths = create_app(Settings(data_dir=tmp_path)).openapi()["paths"]
    found = [f"{method.upper()} {path}" for path, answers in paths.items() for method in answers]
    assert sorted(found) == ROUTES.split("\n")[1:-1]


def test_settings_are_frozen() -> None:
    assert sorted(Settings.model_fields) == SETTINGS.split()


def test_api_and_client_import_no_torch() -> None:
    code = (
        "import sys, longtake.api.app, longtake.queue.client\n"
        "sys.exit(bool({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run((sys.executable, "-c", code), check=True)
