// Cards follow their jobs: progress is written into them at once, anything else is asked for anew.

import * as live from "./live.js";
import { $, $$, base, duration, localTimes, part, wait } from "./util.js";

const PAUSE_MS = 150; // events of a burst become one request
const RETRY_MS = 1500;
const LIMIT = 100;
const dirty = new Set();
let busy = false;
let wall = null; // what keeps the order of cards, on the gallery

export function setWall(keeper) {
  wall = keeper;
}

export const cardOf = (id) => document.getElementById(`card-${id}`);

export function mark(id) {
  dirty.add(id);
  if (!busy) flush();
}

async function flush() {
  busy = true;
  while (dirty.size) {
    await wait(PAUSE_MS);
    const ids = [...dirty].slice(0, LIMIT);
    ids.forEach((id) => dirty.delete(id));
    try {
      await refresh(ids);
    } catch {
      ids.forEach((id) => dirty.add(id));
      await wait(RETRY_MS);
    }
  }
  busy = false;
}

async function refresh(ids) {
  const query = $("#results")?.dataset.query ?? "";
  const fresh = await part(`/gallery/cards?${query}&ids=${ids.join(",")}`);
  if (query !== ($("#results")?.dataset.query ?? "")) return;
  const found = new Map($$("article.card", fresh).map((card) => [card.dataset.id, card]));
  for (const id of ids) {
    const card = found.get(id);
    if (wall) wall.put(id, card ?? null);
    else if (card && cardOf(id)) update(cardOf(id), card);
  }
}

// Make `old` what `fresh` is, and keep what the reader is at: focus, selection, a playing picture.
export function update(old, fresh) {
  if (Number(fresh.dataset.seq) < Number(old.dataset.seq)) {
    // more has happened since it was asked for
    mark(old.dataset.id);
    return;
  }
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const doing = focused?.dataset.do;
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "data-picked") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  updateFrame($(".frame", old), $(".frame", fresh));
  const rest = [...fresh.children].filter((child) => !child.matches(".frame"));
  const had = [...old.children].filter((child) => !child.matches(".frame"));
  if (had.map((c) => c.outerHTML).join("") !== rest.map((c) => c.outerHTML).join("")) {
    had.forEach((child) => child.remove());
    old.append(...rest);
    if (focused && !focused.isConnected) {
      ($(`[data-do="${doing}"]`, old) ?? $("h3 a", old))?.focus({ preventScroll: true });
    }
  }
  localTimes(old);
  live.follow(old);
}

function updateFrame(old, fresh) {
  if (fresh.dataset.sheet) old.dataset.sheet = fresh.dataset.sheet;
  else delete old.dataset.sheet;
  const cover = $(".cover", old);
  if (cover.outerHTML !== $(".cover", fresh).outerHTML) cover.replaceWith($(".cover", fresh));
  const shot = $(".shot", old);
  const before = $(":scope > .poster", shot);
  const after = $(".shot > .poster", fresh);
  if (before && after) {
    // the picture stays until the next one is there
    before.className = after.className;
    const src = after.getAttribute("src");
    if (before.getAttribute("src") !== src) before.src = src;
  } else if (Boolean(before) !== Boolean(after)) {
    shot.replaceChildren(...$(".shot", fresh).childNodes, ...$$("video", shot));
  }
}

export function progress(event) {
  const at = event.x_progress ?? event.progress;
  const card = cardOf(event.id);
  const box = card && $("[data-progress]", card);
  if (!at || !box) return false;
  if (Number(card.dataset.seq) >= event.seq) return true;
  card.dataset.seq = event.seq;
  const write = (name, text) => {
    const place = $(`[data-p="${name}"]`, box);
    if (place && place.textContent !== text) place.textContent = text;
  };
  const steps = at.steps || 1;
  const chunks = at.chunks || 1;
  write("chunk", String(Math.min(at.chunk + 1, chunks)));
  write("chunks", String(chunks));
  write("step", String(at.step));
  write("steps", String(steps));
  write("fps", at.fps ? `${at.fps} fps` : "");
  write("eta", at.eta_seconds == null ? "" : `${duration(at.eta_seconds)} left`);
  write("phase", PHASES[at.phase] ?? at.phase);
  const done = Math.floor((100 * (at.chunk * steps + Math.min(at.step, steps))) / (chunks * steps));
  $("progress", box).value = Math.min(done, 99);
  return true;
}

const PHASES = {
  starting: "starting",
  loading: "loading the model",
  encoding: "reading the input",
  generating: "making pictures",
  decoding: "decoding",
  finishing: "finishing",
  cancelling: "stopping",
};

export function preview(event) {
  const image = $(`#card-${CSS.escape(event.id)} .preview`);
  if (image) image.src = `${base}/v1/videos/${event.id}/preview?v=${event.seq}`;
  return Boolean(image);
}
