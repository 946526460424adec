// Rows chosen with their boxes, and the bar of what can be done to all of them at once. The choice outlives polls.
import { body, gripOf, here, keyOf, nameOf, rowOf, rowOfRun, rows, send, toQueue, tokenOf } from "./rows.js";
import { confirmed } from "./actions.js";
import { word } from "./words.js";

const chosen = new Set();
let last = null; // where a range chosen with Shift begins

const boxOf = (row) => row.querySelector("[name=run]");

/** The chosen rows in the order of the list. */
export const chosenRows = () => rows().filter((row) => chosen.has(keyOf(row)));

/** What a move of this row takes along: the whole choice when it is part of it. */
export const together = (row) => (chosen.has(keyOf(row)) ? chosenRows() : [row]);

export function toggle(row, on = !chosen.has(keyOf(row))) {
  if (!boxOf(row)) return;
  if (on) chosen.add(keyOf(row));
  else chosen.delete(keyOf(row));
  show();
}

function show() {
  const all = rows().filter(boxOf);
  for (const row of all) {
    boxOf(row).checked = chosen.has(keyOf(row));
    row.classList.toggle("chosen", chosen.has(keyOf(row)));
  }
  const bar = document.getElementById("bulk");
  bar.classList.toggle("show", chosen.size > 0);
  document.body.classList.toggle("choosing", chosen.size > 0); // other parts of the page make room
  bar.querySelector("[data-count]").textContent = chosen.size ? word("selected").replace("%s", chosen.size) : "";
  const every = document.getElementById("choose-all");
  if (!every) return;
  every.checked = all.length > 0 && chosen.size === all.length;
  every.indeterminate = chosen.size > 0 && !every.checked;
}

function clear() {
  const inside = document.getElementById("bulk").contains(document.activeElement);
  const first = chosenRows()[0];
  chosen.clear();
  show();
  if (inside) gripOf(first)?.focus(); // the bar goes away, and must not take the focus with it
}

function range(from, to) {
  const all = rows();
  const [a, b] = [all.indexOf(rowOfRun(from)), all.indexOf(to)].sort((x, y) => x - y);
  return a < 0 ? [] : all.slice(a, b + 1).filter(boxOf);
}

/** Ask, then stop them as the reader saw them: rows may change meanwhile. */
export async function stop(picked) {
  const run = picked.map(tokenOf).join(",");
  const [question, yes] =
    picked.length > 1
      ? [word("stopChosen").replace("%s", picked.length), word("stopThem")]
      : [word("stopOne").replace("%s", nameOf(picked[0])), word("stopIt")];
  const more = picked.map((row) => row.dataset.stop).filter(Boolean); // what that does to a sweep
  if (await confirmed([question, ...more].join(" "), yes)) await send({ do: "stop", run });
}

/** The bar's field for the priority of all that are chosen, and of this row. */
export function askPriority(row) {
  toggle(row, true);
  document.querySelector("#bulk [name=priority]").focus();
}

async function act(button) {
  const { value } = button;
  const picked = chosenRows();
  if (value === "stop") return stop(picked);
  if (value === "queue") return toQueue(picked);
  const values = { do: value, run: picked.map(tokenOf).join(",") };
  if (value === "priority") {
    const field = button.form.elements.priority;
    if (!field.value || !field.reportValidity()) return field.focus();
    values.priority = field.value;
  }
  await send(values);
}

if (here) {
  document.addEventListener("click", (event) => {
    const box = event.target.closest?.("#waiting [name=run]");
    if (!box) return;
    const row = rowOf(box);
    if (event.shiftKey && last) for (const other of range(last, row)) toggle(other, box.checked);
    toggle(row, box.checked);
    last = keyOf(row);
  });
  document.addEventListener("change", (event) => {
    if (event.target.id !== "choose-all") return;
    for (const row of rows()) toggle(row, event.target.checked);
    if (!body()) chosen.clear();
  });
  document.addEventListener("submit", (event) => {
    const button = event.submitter;
    if (event.target.id !== "queue-form" || !button?.closest("#bulk")) return;
    event.preventDefault();
    if (button.value === "clear") clear();
    else act(button);
  });
  document.addEventListener("htmx:after:swap", () => {
    for (const key of chosen) if (!rowOfRun(key)) chosen.delete(key);
    show();
  });
  show(); // a page that comes back from the browser's memory may have boxes ticked
}
