// A video plays while it is made: its segments are appended through MediaSource as they come, and the
// finished file takes over at the same second.

import { $, base, call, still } from "./util.js";

const BEHIND_S = 1; // a card that joins late starts this far from the newest picture
const KEPT_S = 20; // what stays in memory behind the picture once memory runs short
const players = new Map();

export const active = (id) => players.has(id);

// Called whenever a card or the page's player has changed.
export function follow(card) {
  const id = card.dataset.id;
  const player = players.get(id);
  if (player) {
    if (!player.holder.isConnected) drop(id);
    else if (card.dataset.state === "completed") player.finish(card.dataset.version);
    else if (card.dataset.state === "in_progress") player.pump();
    else drop(id);
    return;
  }
  const holder = $(".shot, [data-player]", card);
  if (!holder || !("live" in card.dataset) || !("MediaSource" in window)) return;
  const main = holder.matches("[data-player]");
  if (still.matches && !main) return;
  const made = new Live(id, holder, main);
  players.set(id, made);
  made.start().catch(() => drop(id));
}

export function grown(id) {
  players.get(id)?.pump();
}

export function drop(id) {
  players.get(id)?.close();
  players.delete(id);
}

export function dropIn(element) {
  for (const [id, player] of players) if (element.contains(player.holder)) drop(id);
}

class Live {
  constructor(id, holder, main) {
    this.id = id;
    this.holder = holder;
    this.main = main;
    this.next = 0;
    this.busy = false;
    this.again = false;
    this.over = false;
    this.video = document.createElement("video");
    this.video.className = "live";
    this.video.muted = true;
    this.video.playsInline = true;
    this.video.controls = main;
    this.video.setAttribute("aria-label", "The video so far");
    if (!main) this.video.tabIndex = -1;
  }

  async start() {
    const list = await call("GET", `/v1/videos/${this.id}/segments`);
    const type = `video/mp4; codecs="${list.codecs}"`;
    if (!list.init || !list.codecs || !MediaSource.isTypeSupported(type)) throw new Error(type);
    this.source = new MediaSource();
    this.url = URL.createObjectURL(this.source);
    this.video.src = this.url;
    await new Promise((done) => this.source.addEventListener("sourceopen", done, { once: true }));
    this.buffer = this.source.addSourceBuffer(type);
    await this.append(list.init);
    const last = list.data.at(-1);
    const edge = last ? last.start + last.frames / list.fps : 0;
    this.from = this.main ? 0 : Math.max(0, edge - BEHIND_S);
    while (list.data[this.next + 1] && list.data[this.next + 1].start <= this.from) this.next += 1;
    await this.pump(list);
  }

  async append(url) {
    const answer = await fetch(url);
    if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
    const data = await answer.arrayBuffer();
    for (let tries = 0; ; tries += 1) {
      try {
        this.buffer.appendBuffer(data);
        break;
      } catch (error) {
        if (error.name !== "QuotaExceededError" || tries) throw error;
        this.buffer.remove(0, Math.max(0.1, this.video.currentTime - KEPT_S));
        await this.settled();
      }
    }
    await this.settled();
  }

  settled() {
    if (!this.buffer.updating) return Promise.resolve();
    return new Promise((done, failed) => {
      this.buffer.addEventListener("updateend", done, { once: true });
      this.buffer.addEventListener("error", failed, { once: true });
    });
  }

  // Append what is there and was not yet; one at a time, in order.
  async pump(known = null) {
    if (this.busy) {
      this.again = true;
      return;
    }
    if (!this.buffer || this.over) return;
    this.busy = true;
    try {
      do {
        this.again = false;
        const list = known ?? (await call("GET", `/v1/videos/${this.id}/segments`));
        known = null;
        for (const segment of list.data.slice(this.next)) {
          await this.append(segment.url);
          this.next = segment.chunk + 1;
          this.show();
        }
      } while (this.again && !this.over);
    } catch {
      // the next event tries again; the finished file comes anyway
    } finally {
      this.busy = false;
    }
  }

  show() {
    if (this.video.isConnected) return;
    this.holder.append(this.video);
    for (const other of this.holder.querySelectorAll(":scope > :not(video)")) {
      if (this.main) other.remove();
    }
    if (this.from) this.video.currentTime = this.from;
    if (!still.matches) this.video.play().catch(() => {});
  }

  // The finished file, from the second that the live picture is at.
  async finish(version) {
    if (this.over) return;
    this.over = true;
    const from = this.video;
    if (!from.isConnected) {
      drop(this.id);
      return;
    }
    const to = document.createElement("video");
    to.muted = from.muted;
    to.playsInline = true;
    to.controls = this.main;
    to.loop = this.main;
    to.preload = "auto";
    to.volume = from.volume;
    to.playbackRate = from.playbackRate;
    to.className = "taking-over";
    to.setAttribute("aria-label", this.main ? document.title : "The video");
    if (!this.main) to.tabIndex = -1;
    to.src = `${base}/v1/videos/${this.id}/content?v=${version}`;
    const ready = (name) => new Promise((done) => to.addEventListener(name, done, { once: true }));
    this.holder.append(to);
    await ready("canplay");
    const going = !from.paused && !still.matches;
    from.pause();
    const stood = from.currentTime;
    const sought = ready("seeked");
    to.currentTime = stood;
    await sought;
    to.dataset.tookOver = JSON.stringify([stood, to.currentTime]);
    if (going) to.play().catch(() => {});
    to.className = "";
    from.remove();
    this.release();
    this.video = to;
    if (this.main) {
      players.delete(this.id);
    } else {
      to.addEventListener("ended", () => drop(this.id), { once: true });
      if (to.paused || to.ended) drop(this.id);
    }
  }

  release() {
    if (this.url) URL.revokeObjectURL(this.url);
    this.url = null;
  }

  close() {
    this.over = true;
    this.video.pause();
    this.video.remove();
    this.holder.querySelectorAll(":scope > video.taking-over").forEach((video) => video.remove());
    this.release();
  }
}
