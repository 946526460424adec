// Progress pages: a tooltip with all states of a bar, for pointer, touch and keyboard.
// The server renders the bars; polling.js fetches those that changed.
const words = document.getElementById("progress-words");
const states = [...(words?.content.querySelectorAll("data") ?? [])];
const locale = document.documentElement.lang || undefined;
const numbers = new Intl.NumberFormat(locale);
const GAP = 12;
const SVG = "http://www.w3.org/2000/svg";

let tip = null;
let shownFor = null; // the bar of the tooltip
let at = null; // position of the pointer; null for the keyboard

function cell(row, content) {
  const td = row.insertCell();
  td.append(content);
  return td;
}

function swatch(bar, code) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("width", "12");
  svg.setAttribute("height", "12");
  svg.setAttribute("class", [...bar.classList].filter((name) => name !== "pg-bar").join(" "));
  const rect = document.createElementNS(SVG, "rect");
  rect.setAttribute("class", `pg-${code}`);
  rect.setAttribute("width", "100%");
  rect.setAttribute("height", "100%");
  svg.append(rect);
  return svg;
}

/** A percentage that is 0 % only for nothing and 100 % only for everything. */
function percent(n, total) {
  const share = (100 * n) / total;
  if (share > 0 && share < 0.1) return "< 0.1 %";
  if (share < 100 && share > 99.9) return "> 99.9 %";
  return `${share.toLocaleString(locale, { maximumFractionDigits: 1 })} %`;
}

function fill(bar) {
  const counts = bar.dataset.n.split(",").map(Number);
  const total = counts.reduce((sum, n) => sum + n, 0);
  const table = document.createElement("table");
  counts.forEach((n, place) => {
    if (!n) return;
    const row = table.insertRow();
    cell(row, swatch(bar, states[place].value));
    cell(row, states[place].textContent);
    cell(row, numbers.format(n));
    cell(row, percent(n, total));
  });
  const title = document.createElement("b");
  title.textContent = bar.closest("tr")?.querySelector("th a")?.textContent ?? "";
  const parts = title.textContent ? [title, table] : [table];
  if (bar.dataset.mean) {
    const mean = document.createElement("small");
    mean.textContent = words.dataset.mean.replace("%s", bar.dataset.mean);
    parts.push(mean);
  }
  tip.replaceChildren(...parts);
}

/** Place the tooltip beside the pointer or below the bar, within the window. */
function place() {
  const box = shownFor.getBoundingClientRect();
  const x = at ? at.x + GAP : box.left;
  const y = at ? at.y + GAP : box.bottom + 4;
  const left = Math.max(4, Math.min(x, innerWidth - tip.offsetWidth - 4));
  const below = y + tip.offsetHeight < innerHeight - 4;
  const top = below ? y : Math.max(4, (at ? at.y : box.top) - tip.offsetHeight - GAP / 2);
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

function show(bar, pointer) {
  if (!tip) {
    tip = document.createElement("div");
    tip.className = "pg-tip";
    tip.setAttribute("aria-hidden", "true"); // the bar's label has the same content
    document.body.append(tip);
  }
  const another = shownFor !== bar;
  shownFor = bar;
  at = pointer;
  tip.hidden = false;
  if (another) fill(bar);
  place();
}

function hide() {
  shownFor = null;
  if (tip) tip.hidden = true;
}

const barOf = (target) => (target instanceof Element ? target.closest(".pg-bar") : null);

document.addEventListener("pointermove", (event) => {
  const bar = barOf(event.target);
  if (bar) show(bar, { x: event.clientX, y: event.clientY });
  else if (shownFor && at) hide();
});
document.addEventListener("pointerdown", (event) => {
  const bar = barOf(event.target);
  if (bar) show(bar, { x: event.clientX, y: event.clientY });
  else hide();
});
document.addEventListener("focusin", (event) => {
  const bar = event.target.matches?.(":focus-visible") ? event.target.closest("tr")?.querySelector(".pg-bar") : null;
  if (bar) show(bar, null);
  else hide();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
document.addEventListener("scroll", hide, { passive: true });
document.addEventListener("htmx:after:swap", () => {
  if (!shownFor) return;
  if (!shownFor.isConnected) hide();
  else fill(shownFor); // counts changed while the tooltip is shown
});
