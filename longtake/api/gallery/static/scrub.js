// A finger or pointer over a picture goes through the video, from its sprite sheet.

import { call, timecode } from "./util.js";

const known = new Map();
const LIMIT = 60;

async function sheet(frame) {
  const path = frame.dataset.sheet;
  if (!known.has(path)) {
    known.set(path, call("GET", path));
    if (known.size > LIMIT) known.delete(known.keys().next().value);
  }
  return known.get(path);
}

function end(frame) {
  frame.querySelector(".scrub")?.remove();
}

async function move(event) {
  const frame = event.target.closest?.(".frame[data-sheet]");
  if (!frame || frame.querySelector("video")) return;
  const box = frame.getBoundingClientRect();
  const share = Math.min(0.9999, Math.max(0, (event.clientX - box.left) / box.width));
  frame.dataset.at = String(share);
  let scrub = frame.querySelector(".scrub");
  if (!scrub) {
    scrub = document.createElement("div");
    scrub.className = "scrub";
    scrub.append(document.createElement("i"), document.createElement("b"), document.createElement("span"));
    frame.querySelector(".shot").append(scrub);
  }
  let at;
  try {
    at = await sheet(frame);
  } catch {
    end(frame);
    return;
  }
  if (!scrub.isConnected) return;
  const tile = Math.floor(Number(frame.dataset.at) * at.tiles);
  const [picture, bar, clock] = scrub.children;
  const ratio = at.tile_width / at.tile_height;
  picture.style.aspectRatio = String(ratio);
  picture.style.backgroundImage = `url("${at.url}")`;
  picture.style.backgroundSize = `${at.columns * 100}% ${at.rows * 100}%`;
  const x = at.columns > 1 ? ((tile % at.columns) * 100) / (at.columns - 1) : 0;
  const y = at.rows > 1 ? (Math.floor(tile / at.columns) * 100) / (at.rows - 1) : 0;
  picture.style.backgroundPosition = `${x}% ${y}%`;
  bar.style.width = `${Number(frame.dataset.at) * 100}%`;
  clock.textContent = timecode(tile * at.interval_s);
}

export function listenForScrub() {
  document.addEventListener("pointermove", move, { passive: true });
  document.addEventListener("pointerdown", move, { passive: true });
  document.addEventListener("pointerout", (event) => {
    const frame = event.target.closest?.(".frame[data-sheet]");
    if (frame && !frame.contains(event.relatedTarget)) end(frame);
  });
}
