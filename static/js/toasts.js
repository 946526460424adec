// Notices about the reader's own actions. Errors stay until dismissed.
import { offer } from "./undo.js";
import { word } from "./words.js";

const SHOWN_MS = 6000;
const AT_ONCE = 4;

const cameFrom = new WeakMap(); // notice → what had the focus before it

/** Take a notice away, and give the focus back where it came from. */
export function dismiss(box) {
  const back = box.contains(document.activeElement) && cameFrom.get(box);
  box.remove();
  if (back?.isConnected) back.focus({ preventScroll: true });
}

function arm(box) {
  const close = document.createElement("button");
  close.type = "button";
  close.className = "btn-close";
  close.setAttribute("aria-label", word("dismiss"));
  close.addEventListener("click", () => dismiss(box));
  box.append(close);
  box.addEventListener("focusin", (event) => box.contains(event.relatedTarget) || cameFrom.set(box, event.relatedTarget));
  const stays = ["error", "warning"].includes(box.dataset.level) || box.querySelector(".dw-undo");
  if (!stays) setTimeout(() => dismiss(box), SHOWN_MS);
}

/** Say what came of something the reader did; with `undo` it can be taken back for as long as that says. */
export function toast(text, level = "info", undo = null) {
  const region = document.getElementById("toasts");
  const box = document.createElement("div");
  const said = document.createElement("span");
  box.className = "dw-toast";
  box.dataset.level = level;
  said.textContent = text;
  box.append(said);
  region.append(box);
  if (undo) offer(box, undo, () => dismiss(box));
  arm(box);
  while (region.children.length > AT_ONCE) dismiss(region.firstElementChild);
}

// The server says it in a header: HX-Trigger: {"toast": {"text": …, "level": …}}
document.addEventListener("toast", (event) => toast(event.detail.text, event.detail.level, event.detail.undo));
document.querySelectorAll("[data-toast]").forEach(arm);
