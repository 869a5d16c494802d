// What every module needs: the server's address, requests, words for times.

export const base = document.documentElement.dataset.base ?? "";
export const still = matchMedia("(prefers-reduced-motion: reduce)");
export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

export class Refused extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? body?.detail ?? `The server answers ${status}.`);
    this.status = status;
    this.param = body?.error?.param ?? null;
  }
}

function login() {
  const here = location.pathname.slice(base.length) + location.search;
  location.assign(`${base}/login?next=${encodeURIComponent(here)}`);
}

export async function call(method, path, body, headers = {}) {
  const options = { method, headers: { accept: "application/json", ...headers } };
  if (body instanceof FormData) {
    options.body = body;
  } else if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["content-type"] = "application/json";
  }
  let answer;
  try {
    answer = await fetch(base + path, options);
  } catch {
    throw new Refused(0, { detail: "The server does not answer." });
  }
  if (answer.status === 401) login();
  const data = answer.status === 204 ? null : await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(answer.status, data);
  return data;
}

// A part of a page, as elements that belong to no page yet. Scripts in it would not run.
export async function part(path) {
  const answer = await fetch(base + path, { headers: { accept: "text/html", "hx-request": "true" } });
  if (answer.status === 401) login();
  if (!answer.ok) throw new Refused(answer.status, null);
  const holder = document.createElement("template");
  holder.innerHTML = await answer.text();
  return holder.content;
}

export function duration(s) {
  if (s < 10) return `${s.toFixed(1)} s`;
  const whole = Math.round(s);
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function timecode(s) {
  const tenths = Math.round(s * 10);
  const rest = ((tenths % 600) / 10).toFixed(1).padStart(4, "0");
  return `${Math.floor(tenths / 600)}:${rest}`;
}

export function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000) return `${unit === "B" ? n : n.toFixed(1)} ${unit}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} TB`;
}

// Times of the server as the reader's own.
export function localTimes(root = document) {
  const shown = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  for (const time of $$("time[datetime]:not([data-local])", root)) {
    const when = new Date(time.dateTime);
    if (Number.isNaN(when.getTime())) continue;
    time.dataset.local = "";
    time.textContent = shown.format(when);
  }
}

export const wait = (ms) => new Promise((done) => setTimeout(done, ms));
