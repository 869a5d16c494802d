// Which videos are selected; cards come and go, the choice stays.

import { $, $$ } from "./util.js";

export const picked = new Set();

export function pick(id, on) {
  if (on) picked.add(id);
  else picked.delete(id);
  show();
}

export function pickNone() {
  picked.clear();
  show();
}

export function show() {
  for (const card of $$("article.card[data-id]")) {
    const on = picked.has(card.dataset.id);
    card.toggleAttribute("data-picked", on);
    const box = $("[data-do=select]", card);
    if (box) box.checked = on;
  }
  const bar = $("#pickbar");
  if (!bar) return;
  bar.hidden = picked.size === 0;
  $("[data-count]", bar).textContent = String(picked.size);
  $("[data-do=compare]", bar).disabled = picked.size < 2 || picked.size > 4;
  const inTrash = new URLSearchParams($("#results")?.dataset.query).has("trash");
  $("[data-do=pick-restore]", bar).hidden = !inTrash;
  $("[data-do=pick-trash]", bar).textContent = inTrash ? "Delete for good" : "Trash";
}
