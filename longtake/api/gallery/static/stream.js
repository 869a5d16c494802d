// The page's one event stream: hx-sse connects and comes back with Last-Event-ID, here each event
// becomes a "job" event of the document, once.

import { $ } from "./util.js";

const TYPES = [
  "queued", "requeued", "started", "progress", "chunk", "preview", "cancelling", "cancelled",
  "failed", "completed", "updated", "deleted",
].map((name) => `video.${name}`);

const PATIENCE_MS = 8000; // for the first connection, which hx-sse tries but once
let seen = 0;

function take(event) {
  const { data, id } = event.detail ?? {};
  const seq = Number(id);
  // a reconnect may tell again what was told
  if (!data || !(seq > seen)) return;
  seen = seq;
  document.dispatchEvent(new CustomEvent("job", { detail: JSON.parse(data) }));
}

export function listen() {
  const stream = $("#stream");
  if (!stream) return;
  const away = $("#away");
  let lost = false;
  let connected = false;
  for (const type of TYPES) stream.addEventListener(type, take);
  document.body.addEventListener("htmx:sse:error", () => {
    lost = true;
    away.hidden = false;
  });
  stream.addEventListener("htmx:sse:close", () => {
    lost = true;
  });
  stream.addEventListener("htmx:sse:after:connection", (event) => {
    const status = event.detail?.connection?.status ?? 200;
    if (status === 401) location.reload();
  });
  // told first on every connection: from here on nothing is missed
  stream.addEventListener("stream.ready", () => {
    away.hidden = true;
    if (lost) document.dispatchEvent(new CustomEvent("resync"));
    lost = false;
    connected = true;
  });
  const patience = setInterval(() => {
    if (connected) clearInterval(patience);
    else stream.dispatchEvent(new Event("again"));
  }, PATIENCE_MS);
}
