// A row being dragged: by mouse or touch (SortableJS, loaded when a pointer first reaches a handle), or by the arrow
// keys on its handle. Meanwhile no poll changes the list, and the server previews the move, which is sent on drop.
import { hold, release } from "./polling.js";
import { actions, ask, body, gripOf, here, keyOf, nameOf, nowhere, prioOf, rowOf, rows, say, send, tokenOf } from "./rows.js";
import { together, toggle } from "./selection.js";
import { toast } from "./toasts.js";
import { word } from "./words.js";

const ASK_MS = 120;
let drag = null; // {row, others, order, moving (by keys), no, effect, timer, asking}

function lift(row) {
  const all = rows();
  const others = together(row).filter((other) => other !== row);
  drag = { row, others, order: all, effect: null, timer: null, asking: null };
  hold("row");
  row.classList.add("carried");
  for (const other of others) other.classList.add("also");
}

/** The row's position, relative to a neighbour that stays. */
function target() {
  const stays = (row) => row && (drag.others.includes(row) ? null : row);
  const all = rows().filter((row) => row === drag.row || stays(row));
  const at = all.indexOf(drag.row);
  if (all[at + 1]) return { do: "before", anchor: keyOf(all[at + 1]) };
  return all[at - 1] ? { do: "after", anchor: keyOf(all[at - 1]) } : null;
}

const byKeys = () => "moving" in drag;
const moved = () => rows().some((row, index) => row !== drag.order[index]);
const tokens = () => drag.order.filter((row) => row === drag.row || drag.others.includes(row)).map(tokenOf).join(",");

function preview() {
  clearTimeout(drag.timer);
  drag.asking?.abort();
  const held = drag;
  drag.timer = setTimeout(async () => {
    if (!moved()) return show({ text: word("stays"), places: {}, priorities: {} });
    const asking = (held.asking = new AbortController());
    try {
      const effect = await ask({ ...target(), run: tokens() }, asking.signal);
      if (drag === held && !asking.signal.aborted) show(effect);
    } catch {
      // The row is over another place now, or the server is away: dropping shows the result.
    }
  }, ASK_MS);
}

function show(effect) {
  unmark();
  drag.effect = effect;
  const line = document.createElement("div");
  line.className = "would";
  line.textContent = effect.text;
  const cell = drag.row.querySelector(".q-run");
  cell.insertBefore(line, cell.querySelector(".q-fold, .why"));
  drag.row.classList.toggle("refused", Boolean(effect.refused));
  for (const row of rows()) {
    const key = keyOf(row);
    if (key in effect.places) row.querySelector(".pos").dataset.would = effect.places[key];
    if (key in effect.priorities) prioOf(row)?.setAttribute("data-would", effect.priorities[key]);
  }
  say(effect.text);
}

function unmark() {
  for (const line of document.querySelectorAll("#waiting .would")) line.remove();
  for (const cell of document.querySelectorAll("#waiting [data-would]")) delete cell.dataset.would;
}

function putDown() {
  clearTimeout(drag.timer);
  drag.asking?.abort();
  unmark();
  for (const row of [drag.row, ...drag.others]) row.classList.remove("carried", "also", "refused");
  drag = null;
}

function cancel() {
  const { row, order } = drag;
  const focused = document.activeElement;
  drag.moving = true; // the handle loses the focus on its way back too
  body()?.append(...order.filter((one) => one.isConnected));
  if (row.contains(focused)) focused.focus();
  putDown();
  release("row");
}

/** Escape, or the focus went elsewhere: the row goes back, and that is said. */
function putBack() {
  const { row } = drag;
  cancel();
  say(word("putBack").replace("%s", nameOf(row)));
}

/** Escape while the pointer still drags: SortableJS must finish before others change the rows. */
function letGo() {
  drag.no = true;
  for (const type of ["pointerup", "mouseup", "touchend"]) document.dispatchEvent(new Event(type));
}

async function drop() {
  const { row, effect } = drag;
  if (!moved()) return cancel();
  if (effect?.refused) {
    cancel();
    return toast(effect.text, "error");
  }
  const values = { ...target(), run: tokens() };
  const before = drag.order;
  putDown();
  let shown = false;
  try {
    shown = await send(values);
  } finally {
    if (!shown) body()?.append(...before.filter((one) => one.isConnected)); // nothing was done: restore the order
    if (nowhere()) gripOf(row.isConnected ? row : null)?.focus({ preventScroll: true });
    release("row");
  }
}

/** One position up or down, not sent yet. */
function step(by) {
  const all = rows().filter((row) => !drag.others.includes(row));
  const other = all[all.indexOf(drag.row) + by];
  if (!other) return;
  drag.moving = true; // taking an element out and putting it in again takes the focus from it
  if (by < 0) other.before(drag.row);
  else other.after(drag.row);
  gripOf(drag.row).focus();
  drag.moving = false;
  drag.row.scrollIntoView({ block: "nearest" });
  preview();
}

function gripKey(event, row) {
  const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (by && event.altKey && !drag) send({ do: by < 0 ? "up" : "down", run: together(row).map(tokenOf).join(",") });
  else if (by) {
    if (!drag) lift(row);
    step(by);
  } else if (drag && ["Enter", " "].includes(event.key)) drop();
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

let loading = null;
let pressed = null; // the press that waits for SortableJS

/** A press that comes before SortableJS is there is repeated, unless it has ended: so the first drag works too. */
async function prepare(event) {
  const grip = event.target.closest?.("#waiting .grip");
  if (!grip) return;
  if (window.Sortable) return makeSortable(); // before the list gets the event
  if (event.type === "pointerdown") pressed = event;
  try {
    await (loading ??= import(actions.dataset.sortable));
  } catch {
    loading = null;
    if (event.type === "pointerdown") toast(`${word("failed")}. ${word("reload")}`, "error");
    return;
  }
  makeSortable();
  if (pressed === event && grip.isConnected) grip.dispatchEvent(new PointerEvent("pointerdown", event));
}

function makeSortable() {
  const list = body();
  if (window.Sortable.get(list)) return;
  window.Sortable.create(list, {
    handle: ".grip",
    draggable: "tr",
    ghostClass: "dw-ghost",
    forceFallback: true, // the same for mouse and finger
    fallbackTolerance: 4, // less is a click, which opens the menu
    animation: 120,
    scrollSensitivity: 80,
    onStart: (event) => lift(event.item),
    onChange: () => drag && preview(),
    onEnd: () => drag && (drag.no ? putBack() : drop()),
  });
}

if (here) {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && drag) {
      event.preventDefault();
      return byKeys() ? putBack() : letGo();
    }
    const row = rowOf(event.target);
    if (!row) return;
    if (event.target.matches(".grip")) gripKey(event, row);
    if (!event.defaultPrevented) listKey(event, row);
  });
  document.addEventListener("focusout", (event) => {
    if (drag && byKeys() && !drag.moving && event.target === gripOf(drag.row)) putBack();
  });
  for (const type of ["pointerover", "pointerdown"]) document.addEventListener(type, prepare, true);
  for (const type of ["pointerup", "pointercancel"]) document.addEventListener(type, () => (pressed = null));
}
