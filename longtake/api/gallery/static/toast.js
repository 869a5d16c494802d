// Short messages at the edge of the page, some with a way back.

import { $ } from "./util.js";

const SHOWN_MS = 8000;
let undoing = null;

export function toast(text, undo = null) {
  const box = document.createElement("div");
  box.className = "toast";
  const words = document.createElement("p");
  words.textContent = text;
  box.append(words);
  const close = () => {
    box.remove();
    if (undoing === run) undoing = null;
  };
  const run = async () => {
    close();
    await undo();
  };
  if (undo) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Undo";
    button.addEventListener("click", run);
    box.append(button);
    undoing = run;
  }
  $("#toasts").append(box);
  setTimeout(close, SHOWN_MS);
}

export function undoLast() {
  undoing?.();
}
