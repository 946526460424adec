// Notices about the reader's own actions. What went well is one notice that counts; errors stay until dismissed.
import { forget, offer } from "./undo.js";
import { word } from "./words.js";

const SHOWN_MS = 6000;
const AT_ONCE = 4;

const cameFrom = new WeakMap(); // notice → what had the focus before it
const shown = new WeakMap(); // notice → {text, count, timer}

/** Take away a notice or a button in it, and give the focus back where it came from. */
function take(part, box) {
  const back = part.contains(document.activeElement) && cameFrom.get(box);
  part.remove();
  if (back?.isConnected) back.focus({ preventScroll: true });
}

function dismiss(box) {
  clearTimeout(shown.get(box)?.timer);
  forget(box);
  take(box, box);
}

function arm(box) {
  const close = document.createElement("button");
  close.type = "button";
  close.className = "btn-close";
  close.setAttribute("aria-label", word("dismiss"));
  close.addEventListener("click", () => dismiss(box));
  box.append(close);
  box.addEventListener("focusin", (event) => box.contains(event.relatedTarget) || cameFrom.set(box, event.relatedTarget));
  last(box);
}

const stays = (level) => ["error", "warning"].includes(level);

/** How long it is shown: while it can be undone, and else a few seconds. */
function last(box) {
  const state = shown.get(box) ?? {};
  clearTimeout(state.timer);
  state.timer = null;
  shown.set(box, state);
  if (stays(box.dataset.level) || box.querySelector(".dw-undo")) return;
  state.timer = setTimeout(() => dismiss(box), SHOWN_MS);
}

function make(level) {
  const box = document.createElement("div");
  const tally = document.createElement("b");
  const said = document.createElement("span");
  box.className = "dw-toast";
  box.dataset.level = level;
  tally.className = "dw-toast-count num";
  tally.hidden = true;
  said.dataset.said = "";
  box.append(tally, said);
  shown.set(box, { text: "", count: 0, timer: null });
  document.getElementById("toasts").append(box);
  return box;
}

/** The notice that this one joins: of what went well there is only one, of the same refusal too. */
function like(text, level) {
  return [...document.querySelectorAll("#toasts > .dw-toast")].find((box) => {
    const state = shown.get(box);
    if (!state?.count) return false;
    return stays(level) ? state.text === text : !stays(box.dataset.level);
  });
}

/** Say what came of something the reader did; with `undo` it can be taken back for as long as that says. */
export function toast(text, level = "info", undo = null) {
  const region = document.getElementById("toasts");
  const found = like(text, level);
  const box = found ?? make(level);
  const state = shown.get(box);
  const tally = box.querySelector(".dw-toast-count");
  state.text = text;
  state.count += 1;
  box.dataset.level = level;
  box.querySelector("[data-said]").textContent = text;
  tally.textContent = `${state.count}×`;
  tally.title = word("notices").replace("%s", state.count);
  tally.hidden = state.count < 2;
  if (undo) offer(box, undo, (button) => (take(button, box), last(box)));
  if (found) last(box);
  else arm(box);
  while (region.children.length > AT_ONCE) dismiss(region.firstElementChild);
}

// The server says it in a header: HX-Trigger: {"toast": {"text": …, "level": …}}
document.addEventListener("toast", (event) => toast(event.detail.text, event.detail.level, event.detail.undo));
document.querySelectorAll("[data-toast]").forEach(arm);
