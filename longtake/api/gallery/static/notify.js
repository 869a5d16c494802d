// Tell the reader when a video is done, also while the page is in the background.

import { $, base } from "./util.js";

const KEY = "longtake-notify";
const wanted = () => localStorage.getItem(KEY) === "on" && Notification.permission === "granted";
const WORDS = { "video.completed": "Your video is done", "video.failed": "A video failed" };

export function startNotify() {
  const button = $("[data-do=notify]");
  if (!button) return;
  if (!("Notification" in window)) {
    button.hidden = true;
    return;
  }
  const show = () => button.setAttribute("aria-pressed", String(wanted()));
  show();
  button.addEventListener("click", async () => {
    if (wanted()) localStorage.setItem(KEY, "off");
    else if ((await Notification.requestPermission()) === "granted") localStorage.setItem(KEY, "on");
    show();
  });
  document.addEventListener("job", ({ detail }) => {
    if (!WORDS[detail.type] || !wanted()) return;
    const title = $(`#title-${CSS.escape(detail.id)}`)?.textContent.trim() ?? "";
    const note = new Notification(WORDS[detail.type], { body: title, tag: detail.id });
    note.addEventListener("click", () => {
      focus();
      location.assign(`${base}/videos/${detail.id}`);
    });
  });
}
