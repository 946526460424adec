// A row in somebody's hand: by mouse or finger (SortableJS), or by the arrow keys on its handle. While it is held no
// poll changes the list, and the server says what letting go would do; only then the move is sent.
import { hold, release } from "./polling.js";
import { ask, body, gripOf, here, keyOf, nameOf, nowhere, prioOf, rowOf, rows, say, send, tokenOf } from "./rows.js";
import { together, toggle } from "./selection.js";
import { toast } from "./toasts.js";
import { word } from "./words.js";

const ASK_MS = 120;
let hand = null; // {row, others, order, moving (by keys), no, told, timer, asking}

function lift(row) {
  const all = rows();
  const others = together(row).filter((other) => other !== row);
  hand = { row, others, order: all, told: null, timer: null, asking: null };
  hold("row");
  row.classList.add("carried");
  for (const other of others) other.classList.add("also");
}

/** Where the row is now, told by a neighbour that stays. */
function target() {
  const stays = (row) => row && (hand.others.includes(row) ? null : row);
  const all = rows().filter((row) => row === hand.row || stays(row));
  const at = all.indexOf(hand.row);
  if (all[at + 1]) return { do: "before", anchor: keyOf(all[at + 1]) };
  return all[at - 1] ? { do: "after", anchor: keyOf(all[at - 1]) } : null;
}

const byKeys = () => "moving" in hand;
const moved = () => rows().some((row, index) => row !== hand.order[index]);
const tokens = () => hand.order.filter((row) => row === hand.row || hand.others.includes(row)).map(tokenOf).join(",");

function preview() {
  clearTimeout(hand.timer);
  hand.asking?.abort();
  const held = hand;
  hand.timer = setTimeout(async () => {
    if (!moved()) return show({ text: word("stays"), places: {}, priorities: {} });
    const asking = (held.asking = new AbortController());
    try {
      const told = await ask({ ...target(), run: tokens() }, asking.signal);
      if (hand === held && !asking.signal.aborted) show(told);
    } catch {
      // Another place was asked about, or the server is away: letting go will tell.
    }
  }, ASK_MS);
}

function show(told) {
  unmark();
  hand.told = told;
  const line = document.createElement("div");
  line.className = "would";
  line.textContent = told.text;
  hand.row.querySelector(".q-run").append(line);
  hand.row.classList.toggle("refused", Boolean(told.refused));
  for (const row of rows()) {
    const key = keyOf(row);
    if (key in told.places) row.querySelector(".pos").dataset.would = told.places[key];
    if (key in told.priorities) prioOf(row)?.setAttribute("data-would", told.priorities[key]);
  }
  say(told.text);
}

function unmark() {
  for (const line of document.querySelectorAll("#waiting .would")) line.remove();
  for (const cell of document.querySelectorAll("#waiting [data-would]")) delete cell.dataset.would;
}

function putDown() {
  clearTimeout(hand.timer);
  hand.asking?.abort();
  unmark();
  for (const row of [hand.row, ...hand.others]) row.classList.remove("carried", "also", "refused");
  hand = null;
}

function cancel() {
  const { row, order } = hand;
  const focused = document.activeElement;
  hand.moving = true; // the handle loses the focus on its way back too
  body()?.append(...order.filter((one) => one.isConnected));
  if (row.contains(focused)) focused.focus();
  putDown();
  release("row");
}

/** Escape, or the focus went elsewhere: the row goes back, and that is said. */
function putBack() {
  const { row } = hand;
  cancel();
  say(word("putBack").replace("%s", nameOf(row)));
}

/** Escape while the pointer still drags: SortableJS must have ended before the rows are anybody else's. */
function letGo() {
  hand.no = true;
  for (const type of ["pointerup", "mouseup", "touchend"]) document.dispatchEvent(new Event(type));
}

async function drop() {
  const { row, told } = hand;
  if (!moved()) return cancel();
  if (told?.refused) {
    cancel();
    return toast(told.text, "error");
  }
  const values = { ...target(), run: tokens() };
  const before = hand.order;
  putDown();
  let shown = false;
  try {
    shown = await send(values);
  } finally {
    if (!shown) body()?.append(...before.filter((one) => one.isConnected)); // nothing was done: back to what is true
    if (nowhere()) gripOf(row.isConnected ? row : null)?.focus({ preventScroll: true });
    release("row");
  }
}

/** One place up or down, in the hand only. */
function step(by) {
  const all = rows().filter((row) => !hand.others.includes(row));
  const other = all[all.indexOf(hand.row) + by];
  if (!other) return;
  hand.moving = true; // taking an element out and putting it in again takes the focus from it
  if (by < 0) other.before(hand.row);
  else other.after(hand.row);
  gripOf(hand.row).focus();
  hand.moving = false;
  hand.row.scrollIntoView({ block: "nearest" });
  preview();
}

function gripKey(event, row) {
  const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (by && event.altKey && !hand) send({ do: by < 0 ? "up" : "down", run: together(row).map(tokenOf).join(",") });
  else if (by) {
    if (!hand) lift(row);
    step(by);
  } else if (hand && ["Enter", " "].includes(event.key)) drop();
  else return;
  event.preventDefault();
}

/** j and k go from row to row, x chooses, J and K move: only while the list has the focus and nothing is typed. */
function listKey(event, row) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("[type=number]")) return;
  const by = { j: 1, k: -1 }[event.key.toLowerCase()];
  if (by && event.shiftKey) {
    if (gripOf(row)) send({ do: by < 0 ? "up" : "down", run: together(row).map(tokenOf).join(",") });
  } else if (by) {
    const all = rows();
    const next = all[all.indexOf(row) + by];
    (gripOf(next) ?? next?.querySelector("a"))?.focus();
  } else if (event.key === "x") toggle(row);
  else return;
  event.preventDefault();
}

function makeSortable() {
  const list = body();
  if (!list?.querySelector(".grip") || window.Sortable.get(list)) return;
  window.Sortable.create(list, {
    handle: ".grip",
    draggable: "tr",
    forceFallback: true, // the same for mouse and finger
    fallbackTolerance: 4, // less is a click, which opens the menu
    animation: 120,
    scrollSensitivity: 80,
    onStart: (event) => lift(event.item),
    onChange: () => hand && preview(),
    onEnd: () => hand && (hand.no ? putBack() : drop()),
  });
}

if (here) {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && hand) {
      event.preventDefault();
      return byKeys() ? putBack() : letGo();
    }
    const row = rowOf(event.target);
    if (!row) return;
    if (event.target.matches(".grip")) gripKey(event, row);
    if (!event.defaultPrevented) listKey(event, row);
  });
  document.addEventListener("focusout", (event) => {
    if (hand && byKeys() && !hand.moving && event.target === gripOf(hand.row)) putBack();
  });
  document.addEventListener("htmx:after:swap", makeSortable);
  document.addEventListener("DOMContentLoaded", makeSortable); // the page loads SortableJS after this module
}
