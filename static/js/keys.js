// Keys that work on every page: Ctrl+K opens the command palette, ? lists all keys, / searches, g and a letter goes to a
// page. What they open is loaded when it is first wanted.
import { confirmed } from "./actions.js";
import { toast } from "./toasts.js";
import { word } from "./words.js";

const NEXT_MS = 1500; // for the letter after g
const OFF = "dstackweb-keys-off";
const PAGES = { q: "queue", r: "runs", p: "progress", g: "gpus", u: "utilization", o: "offers", h: "hosts", e: "health" };
const source = document.querySelector("[data-palette]");
let loading = null;
let wentAt = -Infinity; // when g was pressed

async function load() {
  const response = await fetch(source.dataset.palette, { headers: { "HX-Request": "true" } });
  if (!response.ok) throw new Error(String(response.status));
  const place = document.createElement("div");
  place.innerHTML = await response.text(); // of this server, which escapes what people wrote
  document.body.append(place);
  const single = place.querySelector("[data-single-keys]");
  single.checked = !localStorage.getItem(OFF);
  single.addEventListener("change", () => (single.checked ? localStorage.removeItem(OFF) : localStorage.setItem(OFF, "1")));
  const palette = document.getElementById("palette");
  const { start } = await import(palette.dataset.script);
  return start(palette, { confirmed });
}

async function open(id) {
  try {
    const show = await (loading ??= load());
    if (id === "palette") show();
    else document.getElementById(id).showModal();
  } catch {
    loading = null;
    toast(`${word("failed")}. ${word("reload")}`, "error");
  }
}

const typed = (element) => element.closest?.("input:not([type=checkbox], [type=radio]), textarea, select, [contenteditable]");

function single(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || typed(event.target) || localStorage.getItem(OFF)) return false;
  if (document.querySelector("dialog[open]")) return false;
  const followsG = event.timeStamp - wentAt < NEXT_MS;
  wentAt = event.key === "g" && !followsG ? event.timeStamp : -Infinity;
  const page = followsG && source.querySelector(`a.nav-link[href$="/${PAGES[event.key]}/"]`);
  if (page) page.click();
  else if (event.key === "?") open("keys-help");
  else if (event.key === "/") search();
  else return false;
  return true;
}

/** The page's own search, else the palette. */
function search() {
  const field = [...document.querySelectorAll("main [type=search]")].find((one) => one.checkVisibility());
  if (field) field.focus();
  else open("palette");
}

if (source) {
  document.addEventListener("keydown", (event) => {
    const wanted = event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey;
    if (event.defaultPrevented || !(wanted ? !document.querySelector("dialog[open]") : single(event))) return;
    event.preventDefault();
    if (wanted) open("palette");
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-opens]");
    if (button) open(button.dataset.opens);
  });
}
