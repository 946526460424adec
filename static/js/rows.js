// Rows of the queue: which run each one is, and what is sent for it. Everything the reader does to waiting runs goes
// through one address; its answer is the list as it is then, also when it refuses.
export const actions = document.getElementById("queue-actions");

export const here = actions !== null;
export const body = () => document.getElementById("waiting");
export const rows = () => [...(body()?.rows ?? [])].filter((row) => row.matches(":not(.sortable-fallback, .q-group)"));
export const rowOf = (element) => element?.closest?.("#waiting > tr:not(.q-group)") ?? null;
export const rowOfRun = (key) => document.getElementById(`run-${key}`);
export const keyOf = (row) => row.id.slice("run-".length);
export const gripOf = (row) => row?.querySelector(".grip") ?? null;
export const nameOf = (row) => row.querySelector(".q-run a").textContent;
export const prioOf = (row) => row?.querySelector(".prio") ?? null;
/** The run with its etag as the reader saw it: what a change is sent with, so that a stale one is refused. */
export const tokenOf = (row) => row.querySelector("[name=run]").value;

/** A list has a version; a proxy's error page or a CSRF error doesn't, and must not replace the list. */
const isList = (response) => response.headers.has("HX-PTag");

/** Apply an action to runs. Resolves to whether the list was replaced, which it is after a refusal too. */
export async function send(values) {
  let shown = false;
  const note = (event) => {
    const { ctx } = event.detail;
    if (ctx.sourceElement === actions) shown = isList(ctx.response);
  };
  document.addEventListener("htmx:after:swap", note);
  try {
    await window.htmx.ajax("POST", actions.dataset.url, { source: actions, target: "#queue", values });
  } finally {
    document.removeEventListener("htmx:after:swap", note);
  }
  return shown;
}

/** The page that moves runs to another queue, as the reader saw them. */
export function toQueue(picked) {
  location.assign(`${actions.dataset.transfer}?${new URLSearchParams({ run: picked.map(tokenOf).join(",") })}`);
}

/** What a move would do, by the function that will do it: {text, refused, places, priorities}. */
export async function ask(values, signal) {
  const url = `${actions.dataset.preview}?${new URLSearchParams(values)}`;
  const response = await fetch(url, { signal, headers: { "HX-Request": "true" } });
  if (!response.ok) throw new Error(String(response.status));
  return response.json();
}

/** Whether nothing has the focus: what had it is gone. */
export const nowhere = () => document.activeElement === null || document.activeElement === document.body;

const MARKED_MS = 5000;
const marked = new Set(); // runs that were moved a moment ago: their rows stay marked when a poll comes

function mark(answered) {
  const moved = answered ? [...document.querySelectorAll("#waiting tr.moved")].map(keyOf) : [];
  for (const key of moved) {
    if (!marked.has(key)) setTimeout(() => (marked.delete(key), rowOfRun(key)?.classList.remove("moved")), MARKED_MS);
    marked.add(key);
  }
  for (const key of marked) rowOfRun(key)?.classList.add("moved");
}

let focused = null; // {row, at}: where in the list the focus was when an answer came

if (here) {
  document.addEventListener("htmx:before:swap", (event) => {
    const { ctx } = event.detail;
    if (ctx.sourceElement === actions && !isList(ctx.response)) return event.preventDefault();
    const row = rowOf(document.activeElement);
    focused = row && { row, at: rows().indexOf(row) };
  });
  document.addEventListener("htmx:after:swap", (event) => {
    mark(event.detail.ctx.sourceElement === actions);
    if (!focused || focused.row.isConnected || !nowhere()) return;
    const next = rows()[focused.at] ?? rows().at(-1); // the run left this page: go on at the row in its place
    (gripOf(next) ?? next?.querySelector("a"))?.focus({ preventScroll: true });
  });
}

/** Said to screen readers only. */
export function say(text) {
  const place = document.getElementById("say");
  if (place) place.textContent = text;
}
