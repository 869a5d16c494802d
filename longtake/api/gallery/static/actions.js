// Everything that a button does to a video; what comes of it arrives by event, as for any reader.

import { ask } from "./ask.js";
import { mark } from "./cards.js";
import { numberOf } from "./numbers.js";
import { pick, picked, pickNone } from "./select.js";
import { toast, undoLast } from "./toast.js";
import { $, base, call, timecode } from "./util.js";

const video = (id, rest = "") => `/v1/videos/${id}${rest}`;

async function trash(ids) {
  await each(ids, (id) => call("POST", video(id, "/trash")));
  const text = ids.length === 1 ? "In the trash." : `${ids.length} videos are in the trash.`;
  toast(text, () => each(ids, (id) => call("POST", video(id, "/restore"))));
}

async function remove(ids) {
  const what = ids.length === 1 ? "this video" : `these ${ids.length} videos`;
  await ask(`Delete ${what} for good?`, [], "Delete", () => each(ids, (id) => call("DELETE", video(id))));
}

async function each(ids, run) {
  for (const id of ids) {
    await run(id);
    mark(id);
  }
}

async function again(id, change) {
  const { request } = await call("GET", video(id));
  const made = await call("POST", "/v1/videos", change(request));
  toast("Queued.");
  if (document.body.dataset.page === "gallery" && $("#grid")) mark(made.id);
  else location.assign(`${base}/videos/${made.id}`);
}

function extend(id, card) {
  const length = Number($("[data-player]", card)?.querySelector("video")?.duration || 0);
  const fields = [
    { name: "prompt", label: "Prompt", value: $("h1", card)?.textContent ?? "", rows: 3 },
    { name: "seconds", label: `Seconds of the whole (it is ${timecode(length)} now)`, value: String(Math.ceil(length) + 4), inputmode: "decimal" },
  ];
  return ask("Extend", fields, "Extend", async ({ prompt, seconds }) => {
    const made = await call("POST", "/v1/videos/extensions", { prompt, seconds: numberOf("seconds", seconds), video: { id } });
    location.assign(`${base}/videos/${made.id}`);
  });
}

function edit(id, button) {
  const { prompt, seconds, seed } = button.dataset;
  const fields = [
    { name: "prompt", label: "Prompt", value: prompt, rows: 3 },
    { name: "seconds", label: "Seconds", value: seconds, inputmode: "decimal" },
    { name: "seed", label: "Seed", value: seed, inputmode: "numeric" },
  ];
  return ask("Change it while it waits", fields, "Change", (given) => {
    const changes = {};
    if (given.prompt !== prompt) changes.prompt = given.prompt;
    if (given.seconds !== seconds) changes.seconds = numberOf("seconds", given.seconds);
    if (given.seed !== seed) changes.seed = numberOf("seed", given.seed);
    return call("PATCH", video(id), changes);
  });
}

function tag(ids, tags) {
  const fields = [{ name: "tags", label: "Tags, with commas between", value: tags.join(", ") }];
  return ask("Tags", fields, "Set", async (given) => {
    const list = given.tags.split(",").map((word) => word.trim()).filter(Boolean);
    await each(ids, (id) => call("PATCH", video(id), { tags: list }));
  });
}

async function copy(button) {
  const text = document.getElementById(button.dataset.copy).textContent;
  await navigator.clipboard.writeText(text);
  toast("Copied.");
}

const move = (id, position) => call("PATCH", video(id), { position });

const ON_CARD = {
  select: (id, card, box) => pick(id, box.checked),
  star: (id, card) => call("PATCH", video(id), { starred: !("starred" in card.dataset) }),
  trash: (id) => trash([id]),
  restore: (id) => call("POST", video(id, "/restore")),
  delete: async (id, card) => {
    await remove([id]);
    if (card.matches(".video")) location.assign(`${base}/`);
  },
  stop: (id) => call("POST", video(id, "/cancel"), { keep: true }),
  cancel: (id) => call("POST", video(id, "/cancel"), {}),
  retry: (id) => call("POST", video(id, "/retry")),
  again: (id) => again(id, (request) => request),
  "new-seed": (id) => again(id, ({ seed, ...request }) => request),
  extend: (id, card) => extend(id, card),
  edit: (id, card, button) => edit(id, button),
  tag: (id, card) => tag([id], JSON.parse($("[data-tags]", card).dataset.tags)),
  copy: (id, card, button) => copy(button),
  pause: (id) => call("PATCH", video(id), { paused: true }),
  resume: (id) => call("PATCH", video(id), { paused: false }),
  first: (id) => move(id, "first"),
  up: (id, card) => card.previousElementSibling && move(id, { before: card.previousElementSibling.dataset.id }),
  down: (id, card) => card.nextElementSibling && move(id, { after: card.nextElementSibling.dataset.id }),
  priority: (id, card, list) => call("PATCH", video(id), { priority: Number(list.value) }),
};

const inTrash = () => new URLSearchParams($("#results")?.dataset.query).has("trash");

const ON_PAGE = {
  keys: () => $("#keys").showModal(),
  compare: () => location.assign(`${base}/compare?ids=${[...picked].slice(0, 4).join(",")}`),
  "pick-none": () => pickNone(),
  "pick-star": () => each([...picked], (id) => call("PATCH", video(id), { starred: true })),
  "pick-tag": () => tag([...picked], []),
  "pick-trash": async () => {
    const ids = [...picked];
    await (inTrash() ? remove(ids) : trash(ids));
    pickNone();
  },
  "pick-restore": async () => {
    await each([...picked], (id) => call("POST", video(id, "/restore")));
    pickNone();
  },
};

export async function act(name, card, element = null) {
  const run = card ? ON_CARD[name] : ON_PAGE[name];
  if (!run) return;
  const id = card?.dataset.id;
  try {
    element?.setAttribute("aria-busy", "true");
    await run(id, card, element);
    if (id && name !== "select" && name !== "copy") mark(id);
  } catch (failure) {
    toast(failure.message);
  } finally {
    element?.removeAttribute("aria-busy");
  }
}

export function listenForActions() {
  const handle = (event) => {
    const element = event.target.closest?.("[data-do]");
    if (!element) return;
    // buttons act when pressed, boxes and lists when changed
    if ((event.type === "change") !== element.matches("input, select")) return;
    const card = element.closest(".card[data-id]");
    act(element.dataset.do, card && ON_CARD[element.dataset.do] ? card : null, element);
  };
  document.addEventListener("click", handle);
  document.addEventListener("change", handle);
}

export { undoLast };
