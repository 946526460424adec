// The menu that a row's handle opens when clicked, and the dialog that asks for a position by run name.
import { ask, gripOf, here, keyOf, nameOf, rowOf, rowOfRun, rows, send, tokenOf } from "./rows.js";
import { chosenRows, together } from "./selection.js";
import { word } from "./words.js";

const ASK_MS = 150;
const menu = document.getElementById("move-menu");
const dialog = document.getElementById("place");
let owner = null; // the run whose handle opened the menu; rows may move meanwhile
let moving = []; // what the dialog will move

const what = (picked) => (picked.length > 1 ? word("selected").replace("%s", picked.length) : nameOf(picked[0]));
const tokens = (picked) => picked.map(tokenOf).join(",");

function open(row) {
  owner = keyOf(row);
  menu.querySelector("[data-title]").textContent = what(together(row));
  menu.showPopover();
  stand();
  menu.querySelector("[role=menuitem]").focus();
}

/** Beside its handle, wherever that is by now. */
function stand() {
  const grip = gripOf(rowOfRun(owner));
  if (!grip) return menu.hidePopover();
  const at = grip.getBoundingClientRect();
  const top = at.bottom + menu.offsetHeight + 8 > innerHeight ? at.top - menu.offsetHeight - 4 : at.bottom + 4;
  menu.style.top = `${Math.max(4, top)}px`;
  menu.style.left = `${Math.max(4, Math.min(at.left, innerWidth - menu.offsetWidth - 8))}px`;
}

/** A handle is there for scripts only, and so is what it says of itself. */
function announce() {
  for (const grip of document.querySelectorAll("#waiting .grip")) grip.ariaHasPopup = "menu";
}

function choose(verb) {
  const picked = together(rowOfRun(owner));
  menu.hidePopover();
  if (verb === "before" || verb === "after") openDialog(picked, verb);
  else send({ do: verb, run: tokens(picked) });
}

function menuKey(event) {
  const items = [...menu.querySelectorAll("[role=menuitem]")];
  const at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1 + items.length, Home: 0, End: items.length - 1 }[event.key];
  if (event.key === "Tab") menu.hidePopover();
  if (to === undefined) return;
  event.preventDefault();
  items[to % items.length].focus();
}

export function openDialog(picked, verb) {
  moving = picked.map(keyOf);
  dialog.querySelector("[data-title]").textContent = word("moveWhat").replace("%s", what(picked));
  dialog.querySelector(`[name=where][value=${verb}]`).checked = true;
  dialog.querySelector("[name=anchor]").value = "";
  dialog.querySelector("[data-effect]").textContent = "";
  refused = false;
  const names = rows().filter((row) => !picked.includes(row)).map((row) => new Option(nameOf(row)));
  dialog.querySelector("datalist").replaceChildren(...names);
  dialog.showModal();
}

/** The target in the dialog's form, and the runs as currently shown: polling continues behind it. */
function formTarget() {
  const form = dialog.querySelector("form").elements;
  const picked = moving.map(rowOfRun).filter(Boolean);
  return { do: form.where.value, name: form.anchor.value.trim(), run: tokens(picked) };
}

let timer = null;
let asking = null;
let refused = false; // what the dialog names now
function preview() {
  clearTimeout(timer);
  asking?.abort();
  refused = false;
  timer = setTimeout(async () => {
    const effect = dialog.querySelector("[data-effect]");
    if (!formTarget().name) return (effect.textContent = "");
    const current = (asking = new AbortController());
    try {
      const answer = await ask(formTarget(), current.signal);
      if (current.signal.aborted) return;
      effect.textContent = answer.text;
      refused = Boolean(answer.refused);
    } catch {
      // something else was typed meanwhile, or the server is away
    }
  }, ASK_MS);
}

if (here && menu) {
  document.addEventListener("click", (event) => {
    const grip = event.target.closest?.("#waiting .grip");
    if (grip) open(rowOf(grip));
    const placed = event.target.closest?.("#bulk [data-place]");
    if (placed) openDialog(chosenRows(), placed.dataset.place);
  });
  menu.addEventListener("click", (event) => {
    const item = event.target.closest("[role=menuitem]");
    if (item) choose(item.dataset.do);
  });
  menu.addEventListener("keydown", menuKey);
  menu.addEventListener("toggle", (event) => {
    if (event.newState === "closed" && !dialog.open) gripOf(rowOfRun(owner))?.focus();
  });
  document.addEventListener("htmx:after:swap", () => {
    announce();
    if (menu.matches(":popover-open")) stand();
  });
  announce();
  window.addEventListener("scroll", () => menu.matches(":popover-open") && stand(), { passive: true });
  dialog.addEventListener("input", preview);
  dialog.querySelector("[data-cancel]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("submit", (event) => refused && event.preventDefault()); // the dialog shows why
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "move" && formTarget().name && formTarget().run) send(formTarget());
    dialog.returnValue = "";
    gripOf(rowOfRun(moving[0]))?.focus();
  });
}
