// − and + and the number between them, in the rows of the queue. Presses are gathered and sent as one change.
import { forceRefresh } from "./polling.js";
import { body, here, keyOf, prioOf, rowOf, rowOfRun, send, tokenOf } from "./rows.js";
import { toast } from "./toasts.js";

const GATHER_MS = 500;
const SAME_SPOT_PX = 6;
const SAME_HAND_MS = 2000;
const STRANGER_MS = 400;
const pending = new Map(); // run → {token, timer, sent}: what was pressed or typed and isn't true yet

const inputOf = (row) => prioOf(row).querySelector("input");

/** Until it is sent, no poll may change the number, and the etag is that of the row as it was read. */
function edit(row) {
  const key = keyOf(row);
  if (!pending.has(key)) pending.set(key, { token: tokenOf(row), timer: null, sent: null });
  prioOf(row).setAttribute("hx-morph-skip", "");
  return pending.get(key);
}

function letGo(key) {
  clearTimeout(pending.get(key)?.timer);
  pending.delete(key);
  const prio = prioOf(rowOfRun(key));
  if (!prio?.hasAttribute("hx-morph-skip")) return;
  prio.removeAttribute("hx-morph-skip");
  forceRefresh(prio); // polls in between skipped it
}

function takeBack(row) {
  const input = inputOf(row);
  input.value = input.defaultValue;
  letGo(keyOf(row));
}

function commit(row, soon) {
  const input = inputOf(row);
  const edited = edit(row);
  clearTimeout(edited.timer);
  if (!input.validity.valid) {
    toast(input.validationMessage, "error");
    return takeBack(row);
  }
  if (edited.sent !== null) return; // what was pressed since goes when the answer is there
  if (input.value === input.defaultValue) return letGo(keyOf(row));
  edited.timer = setTimeout(() => deliver(row, edited), soon);
}

async function deliver(row, edited) {
  const input = inputOf(row);
  edited.sent = input.value;
  const shown = await send({ do: "priority", run: edited.token, priority: edited.sent });
  if (!row.isConnected) return letGo(keyOf(row));
  if (!shown) return takeBack(row);
  if (!pending.has(keyOf(row))) return (input.value = input.defaultValue); // refused: back to what is true
  const changed = input.value !== edited.sent;
  if (changed) input.defaultValue = edited.sent;
  letGo(keyOf(row));
  if (changed) commit(row, GATHER_MS);
}

/** The answer may show the number it was sent for; one that was pressed on meanwhile stays, unless it was refused. */
function beforeAnswer(refused) {
  for (const [key, edited] of pending) {
    const row = rowOfRun(key);
    if (edited.sent === null || !row) continue;
    if (refused) letGo(key);
    else if (inputOf(row).value === edited.sent) prioOf(row).removeAttribute("hx-morph-skip");
  }
}

function press(row, by) {
  const input = inputOf(row);
  edit(row);
  const wanted = Number(input.value || 0) + by;
  input.value = String(Math.min(Number(input.max), Math.max(Number(input.min), wanted)));
  commit(row, GATHER_MS);
}

// Rows change places under a still pointer. A person who keeps pressing at the same spot means the run they were at;
// any other press just after another row has come there was meant for the one that has gone.
let hand = null; // {key, name, x, y, at}: the last press on − or +
let pointer = { x: -1, y: -1 };
let strangerAt = -Infinity;
let under = null;

const runUnder = () => rowOf(document.elementFromPoint(pointer.x, pointer.y))?.id ?? null;

function guard(event) {
  const control = event.target.closest?.("#waiting button, #waiting input");
  if (!control || event.detail === 0) return; // by keyboard: the focus stays with its run
  const now = performance.now();
  const row = rowOf(control);
  const still = hand && Math.hypot(event.clientX - hand.x, event.clientY - hand.y) < SAME_SPOT_PX;
  const following = still && keyOf(row) !== hand.key && now - hand.at < SAME_HAND_MS && rowOfRun(hand.key);
  if (!following && now - strangerAt > STRANGER_MS) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  if (!following) return;
  hand.at = now;
  press(following, hand.name === "raise" ? 1 : -1);
}

/** Without scripts the number is only shown; the limits of what is typed are the same in each row. */
function ready(root) {
  for (const input of root.querySelectorAll("#waiting .prio input[readonly]"))
    Object.assign(input, { readOnly: false, required: true, min: 0, max: input.closest("#waiting").dataset.max });
}

if (here) {
  document.addEventListener("pointermove", (event) => (pointer = { x: event.clientX, y: event.clientY }), { passive: true });
  document.addEventListener("click", guard, true);
  document.addEventListener("htmx:before:swap", (event) => {
    const { ctx } = event.detail;
    if (ctx.sourceElement.id === "queue-actions") beforeAnswer(ctx.response.status >= 400);
    under = runUnder();
    for (const { fragment } of event.detail.tasks) ready(fragment); // fields that are the same on the page are left alone
  });
  document.addEventListener("htmx:after:swap", () => {
    if (under && runUnder() !== under) strangerAt = performance.now();
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("#waiting button[name]");
    if (!button) return;
    event.preventDefault(); // without scripts it sends its form
    const row = rowOf(button);
    hand = { key: keyOf(row), name: button.name, x: event.clientX, y: event.clientY, at: performance.now() };
    press(row, button.name === "raise" ? 1 : -1);
  });
  document.addEventListener("input", (event) => {
    if (event.target.matches?.("#waiting .prio input")) edit(rowOf(event.target));
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches?.("#waiting .prio input")) commit(rowOf(event.target), 0);
  });
  document.addEventListener("focusout", (event) => {
    const row = event.target.matches?.("#waiting .prio input") && rowOf(event.target);
    if (row && event.target.value === event.target.defaultValue) letGo(keyOf(row));
  });
  document.addEventListener("keydown", (event) => {
    const row = event.target.matches?.("#waiting .prio input") && rowOf(event.target);
    if (!row || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault(); // Enter would press the form's first button
    if (event.key === "Escape") takeBack(row);
    else if (event.target.value !== event.target.defaultValue) commit(row, 0);
  });
  ready(document);
}
