// Theme switch, navigation, drop-downs (a <details>) and their search, copy buttons.
import { toast } from "./toasts.js";
import { word } from "./words.js";

function showTheme() {
  const wish = window.dstackwebTheme?.read() ?? "auto";
  for (const button of document.querySelectorAll("[data-theme-set]")) {
    const on = button.dataset.themeSet === wish;
    button.setAttribute("aria-checked", String(on));
    button.tabIndex = on ? 0 : -1; // one stop for the whole group; arrows move inside it
  }
}

function chooseTheme(button) {
  window.dstackwebTheme?.set(button.dataset.themeSet);
  showTheme();
}

async function copy(button) {
  const source = button.dataset.copyFrom && document.querySelector(button.dataset.copyFrom);
  const text = source ? (source.value ?? source.textContent) : button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
    toast(word("copied"), "success");
  } catch {
    toast(word("copyFailed"), "warning"); // no permission, or a plain-http origin
  }
}

/** The server shows a group of pages as the reader left it: a cookie has those that are closed. */
function remember(summary) {
  const closed = new Set(/(?:^|; )closed=([\w.]*)/.exec(document.cookie)?.[1].split(".").filter(Boolean));
  if (summary.parentElement.open) closed.add(summary.dataset.group); // it is closed after this event
  else closed.delete(summary.dataset.group);
  document.cookie = `closed=${[...closed].join(".")}; path=/; max-age=31536000; samesite=lax`;
}

/** What a drop-down's search leaves of its list; the links below it are reached by arrow keys. */
const found = (menu) => [...menu.querySelectorAll("li:not([hidden]) > a")];

function search(input) {
  const menu = input.closest("details");
  const text = input.value.trim().toLowerCase();
  for (const item of menu.querySelectorAll("li")) item.hidden = !item.textContent.toLowerCase().includes(text);
  const none = menu.querySelector("[data-none]");
  none.textContent = found(menu).length ? "" : none.dataset.none;
}

function searchKey(event, menu) {
  const links = found(menu);
  const at = links.indexOf(document.activeElement); // -1 for the search itself
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) (links[at + step] ?? menu.querySelector("[data-search]")).focus();
  else if (event.key === "Enter" && at < 0 && !event.isComposing && event.target.value.trim()) links[0]?.click();
  else return;
  event.preventDefault();
}

document.addEventListener("click", (event) => {
  const group = event.target.closest("summary[data-group]");
  if (group) remember(group);
  const toggle = event.target.closest("[data-toggle]");
  if (toggle) {
    const open = document.querySelector(toggle.dataset.toggle).classList.toggle("show");
    toggle.setAttribute("aria-expanded", String(open));
  }
  const theme = event.target.closest("[data-theme-set]");
  if (theme) chooseTheme(theme);
  const copyButton = event.target.closest("[data-copy], [data-copy-from]");
  if (copyButton) copy(copyButton);
  for (const menu of document.querySelectorAll("details.dw-menu[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    const menu = document.querySelector("details.dw-menu[open]");
    if (menu) {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  }
  const searched = event.target.closest?.("details:has([data-search])");
  if (searched?.open && event.target.matches("a, [data-search]")) searchKey(event, searched);
  const theme = event.target.closest?.("[data-theme-set]");
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (theme && step) {
    const all = [...theme.parentElement.children];
    const next = all[(all.indexOf(theme) + step + all.length) % all.length];
    chooseTheme(next);
    next.focus();
    event.preventDefault();
  }
});

document.addEventListener("input", (event) => event.target.matches?.("[data-search]") && search(event.target));

// A drop-down's search has the focus when it opens.
document.addEventListener(
  "toggle",
  (event) => event.newState === "open" && event.target.querySelector?.(":scope [data-search]")?.focus(),
  true,
);

// A box that filters a list sends its form when it is ticked.
document.addEventListener("change", (event) => {
  if (event.target.matches?.("[data-submits]")) event.target.form.requestSubmit();
});

// An address says only what was chosen.
document.addEventListener("formdata", (event) => {
  if (!event.target.matches("[data-short]")) return;
  for (const [name, value] of [...event.formData]) if (value === "") event.formData.delete(name);
  if (String(event.formData.getAll("columns")) === event.target.dataset.usualColumns) event.formData.delete("columns");
});

showTheme();
