// GPU charts: utilization with the policy's minimum and the time below it, and memory. Their data is in
// <script type="application/json" id="gpu-data">, which polls replace. Canvases, readouts and the selected GPUs are
// excluded from the morph.
import { axis, cursor, fit, lonely, mixed, onTheme, timeMarks, tzDate, walk } from "./chart-parts.js";
import { clockText, timeZone } from "./times.js";

const locale = document.documentElement.lang || undefined;
const COLOURS = 8;
const DASHES = [[], [7, 3], [2, 3], [8, 3, 2, 3]]; // as in run-gpus.css
const STRIDE = 30;
const MINUTE_S = 60;
const HOUR_S = 3600;
const DAY_S = 86400;
const INCRS = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720].map((n) => n * MINUTE_S).concat([DAY_S, 2 * DAY_S, 7 * DAY_S]);
const day = new Intl.DateTimeFormat(locale, { weekday: "short", month: "short", day: "numeric", timeZone });
const gibibytes = (mib) => (mib / 1024).toLocaleString(locale, { maximumFractionDigits: 1 });

/** Per chart: its values, scale and axis labels, and the text for one GPU at one time. */
const KINDS = {
  utilization: {
    of: (gpu) => gpu.utilization,
    most: () => 100,
    splits: () => [0, 25, 50, 75, 100],
    mark: (percent) => `${percent} %`,
    describe: (percent) => `${Math.round(percent)} %`,
  },
  memory: {
    of: (gpu) => gpu.memory_used_mib,
    most: () => Math.max(1024, ...data.gpus.map((gpu) => gpu.memory_mib || Math.max(0, ...gpu.memory_used_mib))),
    splits: () => [0, 0.25, 0.5, 0.75, 1].map((part) => part * KINDS.memory.most()),
    mark: (mib) => `${gibibytes(mib)} GB`,
    describe: (mib, gpu, words) =>
      gpu.memory_mib ? words.memory.replace("%(used)s", gibibytes(mib)).replace("%(of)s", gibibytes(gpu.memory_mib)) : `${gibibytes(mib)} GB`,
  },
};

const colour = (place, alpha) => mixed(`--dw-gpu-${place % COLOURS}`, alpha);
const hidden = new Set(); // indexes of GPUs that the user switched off
const charts = new Map(); // kind → uPlot
let data = null;
let shown = null; // which GPUs the charts were made for

const root = () => document.querySelector("[data-gpu-charts]");

function read() {
  const source = document.getElementById("gpu-data");
  if (!source || source.textContent === data?.text) return false;
  data = { ...JSON.parse(source.textContent), text: source.textContent };
  return true;
}

/** uPlot's columns: the times, and each GPU's values at them. */
const columns = (kind) => [data.at_ms.map((ms) => ms / 1000), ...data.gpus.map((gpu) => KINDS[kind].of(gpu))];

const span = () => [data.since_ms / 1000, data.until_ms / 1000];

function series() {
  return data.gpus.map((_gpu, place) => ({
    scale: "y",
    show: !hidden.has(place),
    width: 2,
    dash: DASHES[Math.floor(place / 2) % DASHES.length],
    stroke: () => colour(place),
    points: { show: true, size: 5, fill: () => colour(place), filter: (u, index) => lonely(u.data[index]) },
  }));
}

/** Below the lines: shade the time below the minimum. */
function shade(u) {
  if (!data.low_since_ms) return;
  const { ctx, bbox } = u;
  const left = Math.max(bbox.left, u.valToPos(data.low_since_ms / 1000, "x", true));
  const right = Math.min(bbox.left + bbox.width, u.valToPos(data.low_until_ms / 1000, "x", true));
  if (right <= left) return;
  ctx.save();
  ctx.fillStyle = mixed("--dw-gpu-low", 0.14);
  ctx.fillRect(left, bbox.top, right - left, bbox.height);
  ctx.strokeStyle = mixed("--dw-gpu-low", 0.9);
  ctx.lineWidth = devicePixelRatio;
  ctx.beginPath();
  ctx.moveTo(left, bbox.top);
  ctx.lineTo(left, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

/** Above the lines: draw the minimum. */
function minimum(u) {
  if (data.minimum === null) return;
  const { ctx, bbox } = u;
  const y = Math.round(u.valToPos(data.minimum, "y", true));
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = mixed("--dw-gpu-low");
  ctx.lineWidth = 2 * devicePixelRatio;
  ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `${12 * devicePixelRatio}px ${getComputedStyle(document.body).fontFamily}`;
  ctx.textAlign = "left";
  ctx.textBaseline = data.minimum > 85 ? "top" : "bottom";
  ctx.fillText(root().dataset.minimum.replace("%(min)s", data.minimum), bbox.left + 6 * devicePixelRatio, y + (data.minimum > 85 ? 3 : -3) * devicePixelRatio);
  ctx.restore();
}

function options(kind, element) {
  const { most, splits, mark } = KINDS[kind];
  const drawn = kind === "utilization" ? { drawClear: [shade], draw: [minimum] } : { drawClear: [shade] };
  return {
    width: element.clientWidth,
    height: element.clientHeight,
    legend: { show: false },
    tzDate,
    cursor: cursor("gpus"),
    scales: { x: { time: true, range: span }, y: { range: () => [0, most() * 1.02] } },
    axes: [
      { ...axis(), size: 30, space: 56, values: timeMarks, incrs: INCRS },
      { ...axis(), size: 56, splits, filter: (_u, at) => at, values: (_u, values) => values.map(mark) },
    ],
    series: [{}, ...series()],
    hooks: { ...drawn, setCursor: [(u) => describe(kind, u)] },
  };
}

function momentText(seconds) {
  const at = new Date(seconds * 1000);
  return Date.now() - at > 20 * HOUR_S * 1000 ? `${day.format(at)} ${clockText(at)}` : clockText(at);
}

/** Show the values at one time beside their GPUs, for pointer, keyboard and screen readers. */
function describe(kind, u) {
  const times = u.data[0];
  const last = times.length - 1;
  const i = Math.min(Math.max(u.cursor.idx ?? last, 0), last);
  const words = root().dataset;
  const said = [];
  const items = data.gpus.flatMap((gpu, place) => {
    if (hidden.has(place)) return [];
    const value = u.data[place + 1][i] ?? null;
    const text = value === null ? words.none : KINDS[kind].describe(value, gpu, words);
    const name = words.gpuName.replace("%s", gpu.index);
    said.push(`${name}: ${text}`);
    const item = document.createElement("li");
    const key = document.querySelector(`[data-gpu="${place}"] svg`).cloneNode(true);
    const label = document.createElement("b");
    label.textContent = name;
    item.append(key, label, text);
    return [item];
  });
  const moment = last < 0 ? "" : momentText(times[i]);
  document.querySelector(`[data-read="${kind}"]`).replaceChildren(...items);
  document.querySelector(`[data-at="${kind}"]`).textContent = moment;
  const slider = document.querySelector(`[data-chart="${kind}"]`);
  slider.setAttribute("aria-valuemax", Math.max(0, last));
  slider.setAttribute("aria-valuenow", Math.max(0, i));
  slider.setAttribute("aria-valuetext", `${moment}. ${said.join("; ")}`);
}

function draw() {
  const gpus = data.gpus.map((gpu) => gpu.uuid).join();
  for (const element of document.querySelectorAll("[data-gpu-charts] [data-chart]")) {
    const kind = element.dataset.chart;
    let u = charts.get(kind);
    if (u && element.contains(u.root) && gpus === shown) {
      u.setData(columns(kind));
    } else {
      const again = u && element.contains(u.root);
      if (again) u.destroy();
      u = new window.uPlot(options(kind, element), columns(kind), element);
      charts.set(kind, u);
      if (!again) {
        element.addEventListener("keydown", (event) => walk(event, charts.get(kind), STRIDE));
        fit(() => charts.get(kind), element);
      }
    }
    describe(kind, u);
  }
  shown = gpus;
}

function toggle(button) {
  const place = Number(button.dataset.gpu);
  const show = hidden.delete(place);
  if (!show) hidden.add(place);
  button.setAttribute("aria-pressed", String(show));
  for (const [kind, u] of charts) {
    u.setSeries(place + 1, { show });
    describe(kind, u);
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-gpu]");
  if (button) toggle(button);
});
document.addEventListener("htmx:after:swap", () => read() && data.gpus.length && draw());
onTheme(() => charts.forEach((u) => u.redraw(false)));

if (read() && data.gpus.length) draw();
