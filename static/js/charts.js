// The two history charts. Their data is in <script type="application/json" id="history-data">, which polls replace.
// Canvases, readouts and the selected bands are excluded from the morph.
import { axis, cursor, fit, lonely, mixed, onTheme, timeMarks, tzDate, walk } from "./chart-parts.js";
import { forceRefresh } from "./polling.js";
import { durationText, timeZone } from "./times.js";

const locale = document.documentElement.lang || undefined;
const MARKS_S = [0, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 3 * 86400, 7 * 86400, 30 * 86400, 90 * 86400];
const DASHES = [[2, 3], [8, 3, 2, 3], [7, 3], []]; // as in charts.css
const DAY_S = 86400;
const clock = new Intl.DateTimeFormat(locale, { hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone });
const weekday = new Intl.DateTimeFormat(locale, { weekday: "short", month: "short", day: "numeric", timeZone });

const LABEL_PX = 14;

/** The marks whose labels have room below each other, the longest of them always. */
function spaced(u, marks) {
  const px = (mark) => u.valToPos(mark, "y");
  return marks.reduceRight((kept, mark) => (kept.length && px(mark) - px(kept[0]) < LABEL_PX ? kept : [mark, ...kept]), []);
}

/** Per chart: the line, the shading's upper edge, the axis labels, and the text for one band at one time. */
const KINDS = {
  wait: {
    line: "wait_median_s",
    edge: "wait_p90_s",
    scale: { distr: 4, asinh: 60, range: (_u, _min, max) => [0, MARKS_S.find((mark) => mark >= Math.max(max, 300)) ?? max] },
    splits: (u) => spaced(u, MARKS_S.filter((mark) => mark <= u.scales.y.max)),
    filter: (_u, splits) => splits, // uPlot's own filter keeps only powers of ten
    mark: (seconds) => (seconds ? durationText(seconds) : "0"),
    describe: (band, i, words) =>
      band.placed[i]
        ? words.wait
            .replace("%(median)s", durationText(band.wait_median_s[i]))
            .replace("%(p90)s", durationText(band.wait_p90_s[i]))
            .replace("%(n)s", band.placed[i].toLocaleString(locale))
        : words.none,
  },
  length: {
    line: "length",
    edge: "length_max",
    scale: { range: (_u, _min, max) => [0, Math.max(4, max * 1.1)] },
    splits: undefined,
    filter: undefined,
    mark: (runs) => (Number.isInteger(runs) ? runs.toLocaleString(locale) : ""),
    describe: (band, i, words) =>
      band.length[i] === null
        ? words.unknown
        : words.length
            .replace("%(n)s", band.length[i].toLocaleString(locale))
            .replace("%(most)s", band.length_max[i].toLocaleString(locale)),
  },
};

const colour = (band, alpha) => mixed(`--dw-band-${band}`, alpha);
const hidden = new Set(); // bands that the user switched off
const charts = new Map(); // kind → uPlot
let data = null;
let seconds = []; // the spans' beginnings, since the epoch

const root = () => document.querySelector("[data-history]");
const last = () => seconds.length - 1;

function read() {
  const source = document.getElementById("history-data");
  if (!source || source.textContent === data?.text) return false;
  data = { ...JSON.parse(source.textContent), text: source.textContent };
  seconds = data.times.map((at) => Date.parse(at) / 1000);
  return true;
}

/** uPlot's columns: time, then per band the edge above and the line below it. */
const columns = (kind) => [seconds, ...data.bands.flatMap((band) => [band[KINDS[kind].edge], band[KINDS[kind].line]])];

function series(kind) {
  const scale = "y";
  const shown = (band) => !hidden.has(band);
  return data.bands.flatMap((_band, band) => [
    { scale, show: shown(band), width: 0, points: { show: false } },
    {
      scale,
      show: shown(band),
      width: 2,
      dash: DASHES[band],
      stroke: () => colour(band),
      points: {
        show: true,
        size: 5,
        fill: () => colour(band),
        filter: (u, index) => lonely(u.data[index]),
      },
    },
  ]);
}

/** The shading of a single point would have no width: draw a thin bar instead. */
function bars(u) {
  const { ctx } = u;
  ctx.save();
  ctx.lineWidth = 2 * devicePixelRatio;
  data.bands.forEach((_band, band) => {
    if (hidden.has(band)) return;
    ctx.strokeStyle = colour(band, 0.4);
    const [edge, line] = [u.data[2 * band + 1], u.data[2 * band + 2]];
    for (const i of lonely(line)) {
      const x = u.valToPos(seconds[i], "x", true);
      ctx.beginPath();
      ctx.moveTo(x, u.valToPos(line[i], "y", true));
      ctx.lineTo(x, u.valToPos(edge[i], "y", true));
      ctx.stroke();
    }
  });
  ctx.restore();
}

function options(kind, element) {
  const { scale, splits, filter, mark } = KINDS[kind];
  return {
    width: element.clientWidth,
    height: element.clientHeight,
    legend: { show: false },
    tzDate,
    cursor: cursor("history"),
    scales: { x: { time: true }, y: scale },
    axes: [
      { ...axis(), size: 30, space: 64, values: timeMarks, incrs: [300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, DAY_S, 2 * DAY_S, 4 * DAY_S, 7 * DAY_S] },
      { ...axis(), size: kind === "wait" ? 60 : 48, splits, filter, values: (_u, values) => values.map(mark) },
    ],
    series: [{}, ...series(kind)],
    bands: data.bands.map((_band, band) => ({ series: [2 * band + 1, 2 * band + 2], fill: () => colour(band, 0.16) })),
    hooks: { draw: [bars], setCursor: [(u) => describe(kind, u.cursor.idx ?? last())] },
  };
}

const spanText = (i) => {
  const at = new Date(seconds[i] * 1000);
  if (data.step === "day") return weekday.format(at);
  const end = new Date(at.getTime() + (data.step === "hour" ? 3600e3 : 300e3));
  return `${weekday.format(at)} ${clock.format(at)}–${clock.format(end)}`;
};

/** The queue as it was in the middle of a span. */
function pastLink(i, words) {
  const link = document.createElement("a");
  const end = seconds[i + 1] ?? Date.now() / 1000 - 1;
  const at = new Date(1000 * Math.min((seconds[i] + end) / 2, Date.now() / 1000 - 1));
  link.href = `${words.past}?t=${at.toISOString()}`;
  link.textContent = words.pastText;
  return link;
}

/** Show the values at one time beside their bands, for pointer, keyboard and screen readers. */
function describe(kind, index) {
  const i = Math.min(Math.max(index, 0), last());
  const words = root().dataset;
  const said = [];
  const items = data.bands.flatMap((band, number) => {
    if (hidden.has(number)) return [];
    const name = `${band.low}–${band.high}`;
    const text = KINDS[kind].describe(band, i, words);
    said.unshift(`${name}: ${text}`);
    const item = document.createElement("li");
    const key = document.querySelector(`[data-band="${number}"] svg`).cloneNode(true);
    const label = document.createElement("b");
    label.textContent = name;
    item.append(key, label, text);
    return [item];
  });
  document.querySelector(`[data-read="${kind}"]`).replaceChildren(...items.reverse());
  const place = document.querySelector(`[data-at="${kind}"]`);
  place.textContent = spanText(i);
  if (words.past) place.append(" · ", pastLink(i, words));
  const slider = document.querySelector(`[data-chart="${kind}"]`);
  slider.setAttribute("aria-valuemax", last());
  slider.setAttribute("aria-valuenow", i);
  slider.setAttribute("aria-valuetext", `${spanText(i)}. ${said.join("; ")}`);
}

function draw() {
  for (const element of document.querySelectorAll("[data-chart]")) {
    const kind = element.dataset.chart;
    const old = charts.get(kind);
    if (old && element.contains(old.root)) {
      old.setData(columns(kind));
    } else {
      const u = new window.uPlot(options(kind, element), columns(kind), element);
      charts.set(kind, u);
      element.addEventListener("keydown", (event) => {
        if (event.key === "Enter") document.querySelector(`[data-at="${kind}"] a`)?.click();
        else walk(event, charts.get(kind), 24);
      });
      fit(() => charts.get(kind), element);
    }
    describe(kind, charts.get(kind).cursor.idx ?? last());
  }
}

function toggle(button) {
  const band = Number(button.dataset.band);
  const show = hidden.delete(band);
  if (!show) hidden.add(band);
  button.setAttribute("aria-pressed", String(show));
  for (const [kind, u] of charts) {
    u.setSeries(2 * band + 1, { show });
    u.setSeries(2 * band + 2, { show });
    describe(kind, u.cursor.idx ?? last());
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-band]");
  if (button) toggle(button);
});
document.addEventListener("htmx:after:swap", () => read() && draw());
onTheme(() => charts.forEach((u) => u.redraw(false)));

if (read()) draw();
// The first visit with this browser was rendered in UTC: load it again now that the time zone is known.
if (root() && root().dataset.zone !== timeZone) forceRefresh(root());
