// The form: what it would make is planned while it is filled in, and asked for when it is sent.

import { mark } from "./cards.js";
import { numberOf } from "./numbers.js";
import { toast } from "./toast.js";
import { $, $$, bytes, call, duration } from "./util.js";

const PLAN_MS = 250;
const FIELDS = {
  seconds: Number, seed: Number, size: String, num_inference_steps: Number, guidance_scale: Number,
  negative_prompt: String, mode: String,
};

let form;
let models = [];
let image = null;
let source = null;
let timer = 0;
let asked = 0;

export function startMake() {
  form = $("#make");
  if (!form) return;
  models = JSON.parse(form.dataset.models);
  source = form.dataset.source ? JSON.parse(form.dataset.source) : null;
  form.addEventListener("input", changed);
  form.addEventListener("change", (event) => {
    if (event.target.name === "model") chosen();
    changed();
  });
  form.addEventListener("submit", send);
  form.addEventListener("click", pressed);
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  listenForImages();
  chosen();
  if (source) prefill();
  // what the browser kept of the form over a reload is planned too
  changed();
}

const options = () => $("[data-options]", form);
const model = () => models.find((one) => one.name === form.elements.model.value) ?? models[0];

function chosen() {
  const now = model();
  if (!now) return;
  const modes = form.elements.mode;
  modes.replaceChildren(new Option("its own", ""), ...now.modes.map((mode) => new Option(mode, mode)));
  $("#sizes").replaceChildren(...now.sizes.map((size) => new Option(size)));
  form.elements.size.placeholder = now.size;
  form.elements.seconds.placeholder = now.seconds ? String(Math.round(now.seconds * 10) / 10) : "";
  form.elements.prompt.placeholder = now.example || "what you want to see";
  const words = $("[data-words]", form);
  words.hidden = now.words.length === 0;
  $("[data-list]", words).replaceChildren(
    ...now.words.map((word) => {
      const chip = document.createElement("button");
      chip.type = "button";
      chip.className = "chip";
      chip.dataset.word = word;
      chip.textContent = word;
      return chip;
    }),
  );
}

function prefill() {
  const { request, action } = source;
  const set = (name, value) => {
    if (value !== undefined && value !== null) form.elements[name].value = value;
  };
  set("prompt", request.prompt);
  set("model", request.model);
  chosen();
  for (const name of Object.keys(FIELDS)) set(name, request[name]);
  if (request.num_frames) form.elements.seconds.placeholder = String(Math.round(source.seconds * 10) / 10);
  for (const timed of request.prompts ?? []) addPrompt(timed.at, timed.prompt);
  const words = { remix: "Remix of", extend: "Going on from", edit: "Redrawing", again: "Again:", "new-seed": "With a new seed:" };
  $("[data-from-text]", form).textContent = words[action];
  if (action === "new-seed") form.elements.seed.value = "";
  if (request.size || request.mode || request.prompts || request.input_reference) options().open = true;
}

function addPrompt(at = "", text = "") {
  const row = $("#timed").content.firstElementChild.cloneNode(true);
  $("[data-at]", row).value = at;
  $("[data-text]", row).value = text;
  $("[data-rows]", form).append(row);
  return row;
}

function pressed(event) {
  const word = event.target.closest("[data-word]")?.dataset.word;
  const button = event.target.closest("[data-do]");
  if (word) {
    const box = form.elements.prompt;
    box.setRangeText(/\S$/.test(box.value.slice(0, box.selectionEnd)) ? ` ${word}` : word, box.selectionEnd, box.selectionEnd, "end");
    changed();
  } else if (button?.dataset.do === "add-prompt") {
    $("[data-at]", addPrompt()).focus();
  } else if (button?.dataset.do === "no-prompt") {
    button.closest(".timed").remove();
    changed();
  } else if (button?.dataset.do === "no-image") {
    setImage(null);
  } else if (event.target.closest("[data-fix]")) {
    const { fix, value } = event.target.closest("[data-fix]").dataset;
    form.elements[fix].value = value;
    changed();
  }
}

// The request as the form has it; throws what is wrong with a field.
function read() {
  const request = { ...kept(), prompt: form.elements.prompt.value.trim() };
  if (form.elements.model.value) request.model = form.elements.model.value;
  for (const [name, kind] of Object.entries(FIELDS)) {
    const text = form.elements[name].value.trim();
    if (text) request[name] = kind === String ? text : numberOf(name, text);
  }
  const timed = $$(".timed", form)
    .filter((row) => $("[data-text]", row).value.trim())
    .map((row) => ({ at: numberOf("at", $("[data-at]", row).value, "prompts"), prompt: $("[data-text]", row).value.trim() }));
  if (timed.length) request.prompts = timed;
  if (request.seconds !== undefined) delete request.num_frames;
  if (image) delete request.input_reference;
  return request;
}

// What the video that the form starts from was asked for, as far as the form has no field for it.
function kept() {
  const shown = new Set(["prompt", "prompts", "model", ...Object.keys(FIELDS)]);
  const asked = Object.entries(source?.request ?? {});
  return Object.fromEntries(asked.filter(([name]) => !shown.has(name)));
}

function body(request) {
  if (!image) return request;
  const data = new FormData();
  for (const [name, value] of Object.entries(request)) {
    data.append(name, typeof value === "object" ? JSON.stringify(value) : String(value));
  }
  data.append("input_reference", image, image.name || "image.png");
  return data;
}

function changed() {
  clearTimeout(timer);
  timer = setTimeout(plan, PLAN_MS);
}

async function plan() {
  const mine = ++asked;
  let request;
  try {
    request = read();
    numberOf("takes", form.elements.takes.value);
  } catch (slip) {
    $("#plan").textContent = "";
    complain(slip);
    return;
  }
  if (!request.prompt) {
    complain(null);
    $("#plan").textContent = "";
    return;
  }
  try {
    const found = await call("POST", "/v1/videos/plan", body(request));
    if (mine !== asked) return;
    complain(null);
    tell(found);
  } catch (failure) {
    if (mine !== asked) return;
    $("#plan").textContent = "";
    complain(failure);
  }
}

function tell(found) {
  // as the newest video of the model was made, or those before the page was loaded
  const made = model() && $(`#grid > [data-pace][data-model="${CSS.escape(model().name)}"]`);
  const pace = made ? Number(made.dataset.pace) : model()?.pace_s;
  const time = found.cost?.seconds?.total ?? (pace ? pace * found.num_frames : null);
  const parts = [`${found.num_frames} frames, ${duration(found.seconds)}`, found.size];
  if (found.chunks > 1) parts.push(`${found.chunks} chunks`);
  if (time !== null) parts.push(`about ${duration(time)} to make`);
  const memory = found.cost?.bytes?.total;
  if (memory) parts.push(`${bytes(memory)} of memory`);
  const line = document.createElement("p");
  line.textContent = parts.join(" · ");
  const notes = found.warnings.map((text) => {
    const note = document.createElement("p");
    note.className = "warning";
    note.textContent = text;
    return note;
  });
  $("#plan").replaceChildren(line, ...notes);
}

// Say what is refused at the field it is about, with what would be legal as buttons.
function complain(failure) {
  for (const place of $$("[data-error]", form)) place.replaceChildren();
  for (const field of $$("[aria-invalid]", form)) field.removeAttribute("aria-invalid");
  if (!failure) return;
  const name = failure.param ?? "rest";
  const place = $(`[data-error="${CSS.escape(name)}"]`, form) ?? $("[data-error=rest]", form);
  if (place.closest("details")) place.closest("details").open = true;
  place.textContent = failure.message;
  const field = form.elements[name];
  if (!(field instanceof HTMLElement)) return;
  field.setAttribute("aria-invalid", "true");
  const [reason, ...rest] = failure.message.split("; ");
  const legal = rest.join("; ");
  const values = legal.match(/^[\w.-]+(?: or [\w.-]+)+$|^\d+x\d+$/) ? legal.split(" or ") : [];
  // the buttons say what is legal, the text does not say it again
  if (values.length) place.textContent = `${reason}: `;
  for (const value of values) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "chip";
    button.dataset.fix = name;
    button.dataset.value = value;
    button.textContent = value;
    place.append(" ", button);
  }
}

async function send(event) {
  event.preventDefault();
  const button = $("#generate");
  if (button.getAttribute("aria-busy")) return;
  clearTimeout(timer);
  asked += 1;
  button.setAttribute("aria-busy", "true");
  try {
    const request = { ...read(), priority: Number(form.elements.priority.value) };
    const takes = numberOf("takes", form.elements.takes.value);
    for (let k = 0; k < takes; k += 1) {
      // further takes of a given seed have the next ones
      const one = k && typeof request.seed === "number" ? { ...request, seed: request.seed + k } : request;
      const key = { "idempotency-key": crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}` };
      const made = await submit(one, key);
      mark(made.id);
    }
    complain(null);
  } catch (failure) {
    complain(failure);
    if (!failure.param) toast(failure.message);
    (form.elements[failure.param] instanceof HTMLElement ? form.elements[failure.param] : form.elements.prompt).focus();
  } finally {
    button.removeAttribute("aria-busy");
  }
}

function submit(request, headers) {
  if (source?.action === "remix" && !image) {
    const { input_reference: same, ...rest } = request;
    return call("POST", `/v1/videos/${source.id}/remix`, rest, headers);
  }
  return call("POST", "/v1/videos", body(request), headers);
}

function setImage(file) {
  image = file;
  const given = $("[data-given]", form);
  const picture = $("img", given);
  if (picture.src.startsWith("blob:")) URL.revokeObjectURL(picture.src);
  given.hidden = !file;
  $("[data-kept]", form)?.toggleAttribute("hidden", Boolean(file));
  picture.removeAttribute("src");
  if (file) {
    options().open = true;
    picture.src = URL.createObjectURL(file);
    $("[data-name]", given).textContent = file.name;
  } else {
    $("#image").value = "";
  }
  changed();
}

function listenForImages() {
  const drop = $("[data-drop]", form);
  const first = (files) => [...(files ?? [])].find((file) => file.type.startsWith("image/")) ?? null;
  $("#image").addEventListener("change", (event) => setImage(first(event.target.files)));
  document.addEventListener("paste", (event) => {
    const file = first(event.clipboardData?.files);
    if (file) setImage(file);
  });
  for (const name of ["dragover", "dragleave", "drop"]) {
    form.addEventListener(name, (event) => {
      event.preventDefault();
      drop.toggleAttribute("data-over", name === "dragover");
      const file = name === "drop" ? first(event.dataTransfer.files) : null;
      if (file) setImage(file);
    });
  }
}

