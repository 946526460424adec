// Notices about the reader's own actions. Errors stay until dismissed.
import { word } from "./words.js";

const SHOWN_MS = 6000;

function arm(box) {
  const close = document.createElement("button");
  close.type = "button";
  close.className = "btn-close";
  close.setAttribute("aria-label", word("dismiss"));
  close.addEventListener("click", () => box.remove());
  box.append(close);
  if (!["error", "warning"].includes(box.dataset.level)) setTimeout(() => box.remove(), SHOWN_MS);
}

export function toast(text, level = "info") {
  const box = document.createElement("div");
  box.className = "dw-toast";
  box.dataset.level = level;
  box.textContent = text;
  document.getElementById("toasts").append(box);
  arm(box);
}

// The server says it in a header: HX-Trigger: {"toast": {"text": …, "level": …}}
document.addEventListener("toast", (event) => toast(event.detail.text, event.detail.level));
document.querySelectorAll("[data-toast]").forEach(arm);
