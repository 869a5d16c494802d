// Two to four videos on one clock: they play, scrub and loop together.

import { $, $$, still, timecode } from "./util.js";

export function startCompare() {
  const box = $("#compare");
  if (!box) return;
  const videos = $$("video", box);
  const slider = $("[data-time]", box);
  const button = $("[data-do=play]", box);
  const use = $("use", button);
  let playing = false;
  let at = 0; // seconds on the common clock
  let stamp = 0;
  let speed = 1;

  const length = () => Math.max(0, ...videos.map((video) => video.duration || 0));
  const place = (video) => Math.min(at, Math.max(0, (video.duration || 0) - 0.001));

  const seek = (to) => {
    at = Math.max(0, Math.min(to, length()));
    for (const video of videos) video.currentTime = place(video);
    show();
  };
  const show = () => {
    slider.max = String(length());
    slider.value = String(at);
    $("[data-clock]", box).textContent = `${timecode(at)} of ${timecode(length())}`;
  };
  const set = (on) => {
    playing = on;
    stamp = performance.now();
    button.setAttribute("aria-label", on ? "Pause" : "Play");
    use.setAttribute("href", on ? "#i-pause" : "#i-play");
    if (on && at >= length() - 0.01) seek(0);
    for (const video of videos) {
      video.playbackRate = speed;
      if (on) video.play().catch(() => {});
      else video.pause();
    }
    if (on) requestAnimationFrame(tick);
    else seek(at);
  };
  // The clock goes by the videos, and waits for the one that waits.
  const tick = (now) => {
    if (!playing) return;
    const ready = videos.every((video) => video.readyState >= 2 || video.ended);
    if (ready) at += ((now - stamp) / 1000) * speed;
    stamp = now;
    if (at >= length()) {
      if (!$("[data-loop]", box).checked) {
        at = length();
        set(false);
        return;
      }
      seek(0);
      for (const video of videos) video.play().catch(() => {});
    }
    for (const video of videos) {
      const off = video.currentTime - place(video);
      const frame = 1 / (Number(video.dataset.fps) || 16);
      if (Math.abs(off) > 2 * frame && !video.seeking) video.currentTime = place(video);
      else video.playbackRate = speed * (Math.abs(off) > frame / 2 ? (off > 0 ? 0.97 : 1.03) : 1);
    }
    show();
    requestAnimationFrame(tick);
  };

  button.addEventListener("click", () => set(!playing));
  slider.addEventListener("input", () => {
    const on = playing;
    seek(Number(slider.value));
    if (on) stamp = performance.now();
  });
  $("[data-speed]", box).addEventListener("change", (event) => {
    speed = Number(event.target.value);
    for (const video of videos) video.playbackRate = speed;
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea, button, a")) return;
    const by = { ",": -1, ".": 1 }[event.key];
    if (event.key === " ") set(!playing);
    else if (by) seek(at + by / (Number(videos[0]?.dataset.fps) || 16));
    else return;
    event.preventDefault();
  });
  for (const video of videos) video.addEventListener("loadedmetadata", show);
  show();
  const loaded = videos.map((video) => video.readyState >= 2
    ? null : new Promise((done) => video.addEventListener("loadeddata", done, { once: true })));
  Promise.all(loaded).then(() => {
    box.dataset.ready = "";
    show();
    if (!still.matches && videos.length) set(true);
  });
}
