// The menu of a row (by ⋯, a right click, its handle, or keys), and the dialog that asks for a position by run name.
import { ask, gripOf, here, keyOf, nameOf, prioOf, rowOf, rowOfRun, rows, send, toQueue, tokenOf } from "./rows.js";
import { askPriority, chosenRows, stop, together } from "./selection.js";
import { word } from "./words.js";

const ASK_MS = 150;
const menu = document.getElementById("move-menu");
const dialog = document.getElementById("place");
let owner = null; // {key, by, x, y}: the menu's run, how it was opened, and where in the row; rows may move meanwhile
let moving = []; // what the dialog will move

const what = (picked) => (picked.length > 1 ? word("selected").replace("%s", picked.length) : nameOf(picked[0]));
const tokens = (picked) => picked.map(tokenOf).join(",");
const moreOf = (row) => row?.querySelector(".q-more button") ?? null;
const mayChange = (row) => row.querySelector("[name=run]") !== null;
const items = () => [...menu.querySelectorAll("[role=menuitem]")].filter((item) => !item.hidden);

/** `by` is the element that opened it, and has the focus again afterwards; with `at` it opens at the pointer. */
function open(row, by, at = null) {
  const from = row.getBoundingClientRect();
  owner = { key: keyOf(row), by, x: at ? at.clientX - from.left : null, y: at ? at.clientY - from.top : null };
  const picked = together(row);
  menu.querySelector("[data-title]").textContent = what(picked);
  for (const part of menu.querySelectorAll("[data-one]")) part.hidden = picked.length > 1;
  for (const part of menu.querySelectorAll("[data-change]")) part.hidden = !mayChange(row);
  fill(row);
  menu.showPopover();
  stand();
  items()[0].focus();
}

/** What only this run's menu has: its addresses. */
function fill(row) {
  const { id, page = `${menu.dataset.runs}${id}/`, why = `${page}why/` } = moreOf(row).dataset;
  menu.querySelector("[data-why]").href = why;
  const texts = { name: nameOf(row), id, link: new URL(page, location.href).href };
  for (const item of menu.querySelectorAll("[data-what]")) item.dataset.copy = texts[item.dataset.what];
}

/** Beside what opened it, wherever that is by now. */
function stand() {
  const row = rowOfRun(owner.key);
  if (!row) return menu.hidePopover();
  const box = row.getBoundingClientRect();
  const by = (owner.by?.isConnected ? owner.by : moreOf(row)).getBoundingClientRect();
  const at = owner.x === null ? by : new DOMRect(box.left + owner.x, box.top + owner.y, 0, 0);
  const top = at.bottom + menu.offsetHeight + 8 > innerHeight ? at.top - menu.offsetHeight - 4 : at.bottom + 4;
  menu.style.top = `${Math.max(4, Math.min(top, innerHeight - menu.offsetHeight - 4))}px`;
  menu.style.left = `${Math.max(4, Math.min(at.left, innerWidth - menu.offsetWidth - 8))}px`;
}

/** The buttons are there for scripts only, and so is what they say of themselves. */
function announce() {
  for (const button of document.querySelectorAll("#waiting :is(.grip, .q-more button)")) button.ariaHasPopup = "menu";
}

/** Where the focus goes back to. */
function back() {
  const row = rowOfRun(owner?.key);
  (owner?.by?.isConnected ? owner.by : (gripOf(row) ?? moreOf(row)))?.focus({ preventScroll: true });
}

function choose(verb) {
  const row = rowOfRun(owner.key);
  menu.hidePopover();
  if (!row) return; // it left the queue while the menu was open
  back();
  const picked = together(row);
  if (verb === "before" || verb === "after") openDialog(picked, verb);
  else if (verb === "stop") stop(picked);
  else if (verb === "queue") toQueue(picked);
  else if (verb === "priority") editPriority(row, picked);
  else send({ do: verb, run: tokens(picked) });
}

function editPriority(row, picked) {
  const input = prioOf(row)?.querySelector("input");
  if (picked.length > 1 || !input) return askPriority(row);
  input.focus();
  input.select();
}

function menuKey(event) {
  const all = items();
  const at = all.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1 + all.length, Home: 0, End: all.length - 1 }[event.key];
  if (event.key === "Tab") menu.hidePopover();
  if (to === undefined) return;
  event.preventDefault();
  all[to % all.length].focus();
}

/** m, Shift+F10 and the menu key, wherever in a row the focus is; in a field they are the browser's. */
function rowKey(event) {
  const row = rowOf(event.target);
  if (!row || event.defaultPrevented || event.target.matches("[type=number]")) return;
  const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
  const asked = event.key === "ContextMenu" || (event.key === "F10" && event.shiftKey) || event.key === "m";
  if (!plain || !asked) return;
  event.preventDefault();
  open(row, event.target);
}

/** On links, in fields, with selected text or Shift the browser's own menu is more useful. */
function rightClick(event) {
  const row = rowOf(event.target);
  if (!row || event.shiftKey || row.classList.contains("carried")) return;
  if (event.target.closest("a, input[type=number]") || String(getSelection())) return;
  event.preventDefault();
  open(row, moreOf(row), event);
}

function openDialog(picked, verb) {
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

if (menu) {
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("#waiting :is(.grip, .q-more button)");
    if (button) open(rowOf(button), button);
  });
  document.addEventListener("contextmenu", rightClick);
  document.addEventListener("keydown", rowKey);
  menu.addEventListener("click", (event) => {
    const item = event.target.closest("[role=menuitem]");
    if (item?.dataset.do) choose(item.dataset.do);
    else if (item) menu.hidePopover();
  });
  menu.addEventListener("keydown", menuKey);
  menu.addEventListener("toggle", (event) => {
    const lost = document.activeElement === document.body || menu.contains(document.activeElement);
    if (event.newState === "closed" && lost) back();
  });
  document.addEventListener("htmx:after:swap", () => {
    announce();
    if (menu.matches(":popover-open")) stand();
  });
  announce();
  window.addEventListener("scroll", () => menu.matches(":popover-open") && stand(), { passive: true });
}

if (here && dialog) {
  document.addEventListener("click", (event) => {
    const placed = event.target.closest?.("#bulk [data-place]");
    if (placed) openDialog(chosenRows(), placed.dataset.place);
  });
  dialog.addEventListener("input", preview);
  dialog.querySelector("[data-cancel]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("submit", (event) => refused && event.preventDefault()); // the dialog shows why
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "move" && formTarget().name && formTarget().run) send(formTarget());
    dialog.returnValue = "";
    const row = rowOfRun(moving[0]);
    (gripOf(row) ?? moreOf(row))?.focus();
  });
}
