// A video's page: asked for anew when its job moves on, with the player left where it is.

import * as live from "./live.js";
import { setWall } from "./cards.js";
import { $, $$, localTimes, part, wait } from "./util.js";

const PAUSE_MS = 120;
const RETRY_MS = 1500;
let page = null;
let asking = false;
let once = false; // something has happened while it was asked for

export function startVideo() {
  page = $("article.video");
  if (!page) return;
  setWall({ put: () => {} });
  const player = $("[data-player]", page);
  player.style.aspectRatio = player.dataset.ratio;
  live.follow(page);
  drift();
}

export const isHere = (id) => page?.dataset.id === id;

export async function refreshVideo() {
  if (asking) {
    once = true;
    return;
  }
  asking = true;
  do {
    once = false;
    await wait(PAUSE_MS);
    try {
      replace($("article.video", await part(`/videos/${page.dataset.id}`)));
    } catch (failure) {
      if (failure.status === 404) location.reload();
      await wait(RETRY_MS);
      once = true;
    }
  } while (once);
  asking = false;
}

function replace(fresh) {
  if (!fresh) return;
  if (Number(fresh.dataset.seq) < Number(page.dataset.seq)) {
    // more has happened since it was asked for
    once = true;
    return;
  }
  const open = $$("details[open]", page).map((one) => one.className);
  const doing = page.contains(document.activeElement) ? document.activeElement.dataset.do : null;
  const player = $("[data-player]", page);
  for (const { name } of [...page.attributes]) if (!fresh.hasAttribute(name)) page.removeAttribute(name);
  for (const { name, value } of fresh.attributes) page.setAttribute(name, value);
  const keep = live.active(page.dataset.id) || $("video:not(.live)", player);
  const next = $("[data-player]", fresh);
  const ended = ["cancelled", "failed"].includes(fresh.dataset.state);
  if (ended || !keep || !player.children.length) {
    live.drop(page.dataset.id);
    player.replaceChildren(...next.childNodes);
  }
  $("[data-under]", page).replaceWith($("[data-under]", fresh));
  $(".drift", page)?.remove();
  if ($(".drift", fresh)) $(".screen", page).append($(".drift", fresh));
  $(".about", page).replaceWith($(".about", fresh));
  $(".family", page)?.remove();
  if ($(".family", fresh)) page.append($(".family", fresh));
  for (const one of open) $(`details.${CSS.escape(one)}`, page)?.setAttribute("open", "");
  if (doing) $(`[data-do="${doing}"]`, page)?.focus({ preventScroll: true });
  localTimes(page);
  live.follow(page);
  drift();
}

// The chart's cursor goes in step with the player, and a press on the chart seeks.
function drift() {
  const chart = $("[data-drift] svg", page);
  const player = $("[data-player]", page);
  if (!chart) return;
  const cursor = $("[data-cursor]", chart);
  const draw = () => {
    const video = $("video", player);
    if (!chart.isConnected) return;
    if (video?.duration) {
      const x = String((1000 * video.currentTime) / video.duration);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
    }
    requestAnimationFrame(draw);
  };
  draw();
  chart.addEventListener("click", (event) => {
    const box = chart.getBoundingClientRect();
    const video = $("video", player);
    if (video?.duration) video.currentTime = (video.duration * (event.clientX - box.left)) / box.width;
  });
}
