// What runs costs more with each second: <span data-cost="dollars" data-rate="dollars an hour" data-at="when that was so">.
import { serverNow } from "./times.js";

const locale = document.documentElement.lang || undefined;
const format = (dollars) =>
  `$${dollars.toLocaleString(locale, dollars < 1 ? { minimumFractionDigits: 4, maximumFractionDigits: 4 } : { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;

function count() {
  const now = serverNow();
  for (const element of document.querySelectorAll("[data-cost]")) {
    const rate = Number(element.dataset.rate) || 0;
    if (!rate) continue;
    const hours = Math.max(0, now - Date.parse(element.dataset.at)) / 3600e3;
    const text = format(Number(element.dataset.cost) + rate * hours);
    if (element.textContent !== text) element.textContent = text;
  }
}

count();
document.addEventListener("htmx:after:swap", count);
setInterval(() => document.hidden || count(), 1000);
document.addEventListener("visibilitychange", () => document.hidden || count());
