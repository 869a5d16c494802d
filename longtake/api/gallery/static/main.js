// Starts what the page has; every event of the stream goes through here.

import { listenForActions } from "./actions.js";
import { cardOf, mark, preview, progress, setWall } from "./cards.js";
import { startCompare } from "./compare.js";
import { listenForKeys } from "./keys.js";
import * as live from "./live.js";
import { startMake } from "./make.js";
import { startNotify } from "./notify.js";
import { listenForScrub } from "./scrub.js";
import { picked, show } from "./select.js";
import { listen } from "./stream.js";
import { $, $$, localTimes, part } from "./util.js";
import { isHere, refreshVideo, startVideo } from "./video.js";
import { Wall } from "./wall.js";

const QUIET_MS = 400;
const STUCK_MS = 3000; // a worker that comes up tells nobody
// after these others wait for fewer, or for more
const MOVES_QUEUE = new Set(["queued", "requeued", "started", "cancelled", "updated", "deleted"].map((name) => `video.${name}`));
let wall = null;
let summing = 0;
let moved = false;
let watching = 0;

function startWall() {
  const section = $("#results");
  if (!section || wall?.section === section) return;
  wall?.close();
  wall = new Wall(section);
  setWall(wall);
  show();
}

// The line of the header and the lists of queue, workers and batches, once for a burst of events.
function refreshLines() {
  if (summing) return;
  summing = setTimeout(async () => {
    summing = 0;
    if (moved && wall) for (const card of $$("#grid > [data-state=queued]")) mark(card.dataset.id);
    moved = false;
    if ($("#live-part")) $("#live-part").dispatchEvent(new Event("refresh", { bubbles: true }));
    const line = await part("/gallery/summary").then((found) => $("#summary", found), () => null);
    if (line) $("#summary")?.replaceWith(line);
    watchStuck();
  }, QUIET_MS);
}

function watchStuck() {
  clearTimeout(watching);
  if ($("#summary[data-stuck]")) watching = setTimeout(refreshLines, STUCK_MS);
}

function happened({ detail: event }) {
  if (event.type === "video.progress") {
    if (progress(event)) return;
    if (!cardOf(event.id)) return;
  }
  if (event.type === "video.preview" && preview(event)) return;
  if (event.type === "video.chunk") live.grown(event.id);
  if (event.type === "video.deleted") picked.delete(event.id);
  if (isHere(event.id)) refreshVideo();
  else if (wall) mark(event.id);
  moved ||= MOVES_QUEUE.has(event.type);
  if (event.type !== "video.progress" && event.type !== "video.preview") refreshLines();
}

// After a gap in the stream everything that may move is asked for as it is now.
function resync() {
  for (const card of $$("article.card[data-id]")) {
    if (isHere(card.dataset.id)) refreshVideo();
    else if (!["completed"].includes(card.dataset.state)) mark(card.dataset.id);
  }
  refreshLines();
}

document.addEventListener("job", happened);
document.addEventListener("resync", resync);
document.addEventListener("htmx:after:swap", () => {
  startWall();
  localTimes();
});
listen();
listenForActions();
listenForKeys();
listenForScrub();
startNotify();
startMake();
startWall();
startVideo();
startCompare();
localTimes();
watchStuck();
document.documentElement.dataset.ready = "";
