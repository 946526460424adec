// Rows of the queue: which run each one is, and what is sent for it. Everything the reader does to waiting runs goes
// through one address; its answer is the list as it is then, also when it refuses.
const actions = document.getElementById("queue-actions");

export const here = actions !== null;
export const body = () => document.getElementById("waiting");
export const rows = () => [...(body()?.rows ?? [])].filter((row) => !row.classList.contains("sortable-fallback"));
export const rowOf = (element) => element?.closest?.("#waiting > tr") ?? null;
export const rowOfRun = (key) => document.getElementById(`run-${key}`);
export const keyOf = (row) => row.id.slice("run-".length);
export const gripOf = (row) => row?.querySelector(".grip") ?? null;
export const nameOf = (row) => row.querySelector(".q-run a").textContent;
export const prioOf = (row) => row.querySelector(".prio");
/** The run with its etag as the reader saw it: what a change is sent with, so that a stale one is refused. */
export const tokenOf = (row) => row.querySelector("[name=run]").value;

/** Do something to runs. Resolves to whether the list was shown anew, as it is after a refusal too. */
export async function send(values) {
  let shown = false;
  const note = (event) => {
    if (event.detail.ctx.sourceElement === actions) shown = true;
  };
  document.addEventListener("htmx:after:swap", note);
  try {
    await window.htmx.ajax("POST", actions.dataset.url, { source: actions, target: "#queue", values });
  } finally {
    document.removeEventListener("htmx:after:swap", note);
  }
  return shown;
}

/** What a move would do, by the function that will do it: {text, refused, places, priorities}. */
export async function ask(values, signal) {
  const url = `${actions.dataset.preview}?${new URLSearchParams(values)}`;
  const response = await fetch(url, { signal, headers: { "HX-Request": "true" } });
  if (!response.ok) throw new Error(String(response.status));
  return response.json();
}

/** Said to screen readers only. */
export function say(text) {
  const place = document.getElementById("say");
  if (place) place.textContent = text;
}
