// What grows stale while someone looks at it says so by itself: <span class="dw-fresh" data-until="…" data-stale="…">.
// No request is made; the next poll brings what came of it. Ages and countdowns are times.js's.
import { serverNow } from "./times.js";

function age() {
  const now = serverNow();
  for (const badge of document.querySelectorAll("[data-until]")) {
    if (badge.dataset.state !== "fresh" || Date.parse(badge.dataset.until) > now) continue;
    badge.dataset.state = "stale";
    badge.textContent = badge.dataset.stale;
  }
}

age();
document.addEventListener("htmx:after:swap", age);
setInterval(() => document.hidden || age(), 1000);
document.addEventListener("visibilitychange", () => document.hidden || age());
