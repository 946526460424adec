// Undo for a few seconds: a button in the notice, or Ctrl+Z outside of inputs. The newest change is undone first.
import { word } from "./words.js";

const offers = []; // {box, url, move, seconds, over}, the newest last
let ticking = null;

const buttonOf = (box) => box.querySelector(".dw-undo");
const newestOf = (box) => offers.findLast((one) => one.box === box);

/** Offer it in a notice. `undo` is {url, move, seconds}, as the server sent it; `over` gets the button when none is left. */
export function offer(box, undo, over) {
  offers.push({ box, ...undo, over });
  if (!buttonOf(box)) box.querySelector("[data-said]").after(make(box));
  show(box);
  ticking ??= setInterval(tick, 1000);
}

/** The notice goes, and what it offered with it. */
export function forget(box) {
  for (const one of offers.filter((each) => each.box === box)) offers.splice(offers.indexOf(one), 1);
}

function make(box) {
  const button = document.createElement("button");
  const left = document.createElement("span");
  button.type = "button";
  button.className = "btn btn-sm dw-undo";
  button.textContent = word("undo");
  left.setAttribute("aria-hidden", "true"); // or screen readers read it every second
  left.className = "num";
  button.append(left);
  button.addEventListener("click", () => undo(newestOf(box)));
  return button;
}

/** The seconds that are left for the newest change. */
function show(box) {
  buttonOf(box).querySelector(".num").textContent = newestOf(box).seconds;
}

function tick() {
  for (const one of [...offers]) {
    one.seconds -= 1;
    if (one.seconds <= 0) end(one);
    else show(one.box);
  }
  if (offers.length) return;
  clearInterval(ticking);
  ticking = null;
}

function end(one) {
  offers.splice(offers.indexOf(one), 1);
  if (newestOf(one.box)) show(one.box);
  else one.over(buttonOf(one.box));
}

function undo(one) {
  end(one);
  const list = document.getElementById("queue-actions");
  const how = list ? { source: list, target: "#queue" } : { source: document.getElementById("toasts"), swap: "none" };
  window.htmx.ajax("POST", one.url, { ...how, values: { move: one.move } });
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches?.("input:not([type=checkbox]), textarea, select, [contenteditable]");
  if (event.key !== "z" || !(event.ctrlKey || event.metaKey) || event.shiftKey || typing || !offers.length) return;
  event.preventDefault();
  undo(offers.at(-1));
});
