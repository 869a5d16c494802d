// A question in a dialog: fields in, their values out, or null.

import { $, $$ } from "./util.js";

// fields: {name, label, value, rows, inputmode}; run(values) may throw a message to show.
export function ask(title, fields, yes, run) {
  const dialog = $("#ask");
  const form = $("form", dialog);
  const error = $("[data-error]", form);
  $("h2", form).textContent = title;
  $("[data-yes]", form).textContent = yes;
  error.textContent = "";
  $("[data-fields]", form).replaceChildren(...fields.map(row));
  dialog.returnValue = "";
  return new Promise((done) => {
    const send = async (event) => {
      if (event.submitter?.value !== "yes") return;
      event.preventDefault();
      const values = Object.fromEntries($$("[name]", form).map((field) => [field.name, field.value]));
      try {
        await run(values);
        dialog.close("yes");
      } catch (failure) {
        error.textContent = failure.message;
      }
    };
    form.addEventListener("submit", send);
    dialog.addEventListener("close", () => {
      form.removeEventListener("submit", send);
      done(dialog.returnValue === "yes");
    }, { once: true });
    dialog.showModal();
    $("[name]", form)?.select?.();
  });
}

function row({ name, label, value = "", rows = 0, inputmode = "text" }) {
  const box = document.createElement("div");
  box.className = "field";
  const words = document.createElement("label");
  words.htmlFor = `ask-${name}`;
  words.textContent = label;
  const field = document.createElement(rows ? "textarea" : "input");
  field.id = `ask-${name}`;
  field.name = name;
  if (rows) field.rows = rows;
  else field.inputMode = inputmode;
  field.value = value;
  box.append(words, field);
  return box;
}
