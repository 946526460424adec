// Theme switch, phone navigation, drop-downs (a <details>), copy buttons.
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

document.addEventListener("click", (event) => {
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

// A box that filters a list sends its form when it is ticked.
document.addEventListener("change", (event) => {
  if (event.target.matches?.("[data-submits]")) event.target.form.requestSubmit();
});

// An address says only what was chosen.
document.addEventListener("formdata", (event) => {
  if (!event.target.matches("[data-short]")) return;
  for (const [name, value] of [...event.formData]) if (value === "") event.formData.delete(name);
});

showTheme();
