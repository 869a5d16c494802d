// The keyboard: everything that the pointer can do.

import { act } from "./actions.js";
import { pick, picked, pickNone } from "./select.js";
import { undoLast } from "./toast.js";
import { $, $$, base } from "./util.js";

const PAGES = { g: "/", q: "/queue", b: "/batches", w: "/workers" };
const LEADER_MS = 1500;
let leader = 0;

const current = () =>
  document.activeElement?.closest?.(".card[data-id]") ?? $("article.video[data-id]");

const ARROWS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };

function step([dx, dy]) {
  const cards = $$("#grid > .card");
  const here = cards.indexOf(document.activeElement?.closest?.("#grid > .card"));
  if (!cards.length) return false;
  const grid = getComputedStyle($("#grid")).gridTemplateColumns.split(" ").length;
  const onScreen = cards.findIndex((card) => card.getBoundingClientRect().bottom > 80);
  const to = here < 0 ? Math.max(0, onScreen) : here + dx + dy * grid;
  const card = cards[to];
  if (!card) return false;
  $("h3 a", card).focus({ preventScroll: true });
  card.scrollIntoView({ block: "nearest" });
  return true;
}

function frame(by) {
  const video = $("[data-player] video");
  if (!video) return false;
  video.pause();
  const fps = Number($("[data-player]").dataset.fps) || 16;
  video.currentTime = Math.max(0, video.currentTime + by / fps);
  return true;
}

function play() {
  const video = $("[data-player] video");
  if (!video) return false;
  if (video.paused) video.play();
  else video.pause();
  return true;
}

const go = (name, on = current()) => Boolean(on) && (act(name, on), true);

const KEYS = {
  "?": () => ($("#keys").showModal(), true),
  n: () => ($("#prompt") ? ($("#prompt").focus(), true) : (location.assign(`${base}/`), true)),
  "/": () => ($("#q") ? ($("#q").focus(), true) : false),
  s: () => go("star"),
  x: () => {
    const id = document.activeElement?.closest?.("article.card[data-id]")?.dataset.id;
    if (id) pick(id, !picked.has(id));
    return Boolean(id);
  },
  c: () => picked.size >= 2 && picked.size <= 4 && (act("compare", null), true),
  Delete: () => go("trash"),
  z: () => (undoLast(), true),
  " ": () => document.activeElement === document.body && play(),
  ",": () => frame(-1),
  ".": () => frame(1),
  Escape: () => (picked.size ? (pickNone(), true) : false),
};

export function listenForKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const typing = event.target.matches?.("input:not([type=checkbox]), textarea, select");
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if ($("dialog[open]")) return;
    if (Date.now() - leader < LEADER_MS && PAGES[event.key]) {
      event.preventDefault();
      location.assign(base + PAGES[event.key]);
      return;
    }
    leader = event.key === "g" ? Date.now() : 0;
    const onGrid = ARROWS[event.key] && !event.target.matches?.("video") && $("#grid");
    const done = onGrid ? step(ARROWS[event.key]) : KEYS[event.key]?.();
    if (done) event.preventDefault();
  });
}
