// Shared by all charts: theme colours, axes, isolated points, keyboard control.
import { timeZone } from "./times.js";

const locale = document.documentElement.lang || undefined;
const clock = new Intl.DateTimeFormat(locale, { hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone });
const day = new Intl.DateTimeFormat(locale, { month: "short", day: "numeric", timeZone });

const MIDNIGHT = new Intl.DateTimeFormat(locale, { hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone: "UTC" }).format(0);

/** For uPlot: a moment in the reader's time zone. */
export const tzDate = (at) => window.uPlot.tzDate(new Date(at * 1000), timeZone);

/** A CSS custom property in the current theme. */
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const mixed = (name, alpha = 1) => `color-mix(in srgb, ${css(name)} ${alpha * 100}%, transparent)`;

/** Indexes of values without neighbours on both sides: a line would not show them. */
export function lonely(values) {
  const has = (i) => values[i] !== null && values[i] !== undefined;
  return values.flatMap((_value, i) => (has(i) && !has(i - 1) && !has(i + 1) ? [i] : []));
}

/** Labels of the time axis: the hour, and at midnight the day. */
export function timeMarks(_u, splits) {
  return splits.map((at) => {
    const time = clock.format(at * 1000);
    return time === MIDNIGHT ? day.format(at * 1000) : time;
  });
}

export const axis = () => ({
  stroke: () => css("--dw-chart-text"),
  grid: { stroke: () => css("--dw-chart-grid"), width: 1 },
  ticks: { show: false },
  font: `12px ${getComputedStyle(document.body).fontFamily}`,
});

/** A cursor that all charts of a page with this key share. */
export const cursor = (key) => ({
  y: false,
  drag: { setScale: false, x: false, y: false },
  sync: { key, setSeries: false },
  points: { size: 8 },
});

const STEPS = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, Home: -Infinity, End: Infinity };

/** Arrow keys move along a chart, PageUp and PageDown in larger steps; Escape returns to the newest value. */
export function walk(event, u, stride) {
  const step = event.key === "Escape" ? 0 : { ...STEPS, PageUp: stride, PageDown: -stride }[event.key];
  if (step === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const times = u.data[0];
  const last = times.length - 1;
  if (event.key === "Escape") {
    u.setCursor({ left: -10, top: -10 });
    return;
  }
  const i = Math.min(Math.max((u.cursor.idx ?? last) + step, 0), last);
  u.setCursor({ left: u.valToPos(times[i], "x"), top: u.over.clientHeight / 2 });
}

/** Keep a chart as wide as its container; `chart` returns the current one. */
export const fit = (chart, element) =>
  new ResizeObserver(() => element.clientWidth && chart().setSize({ width: element.clientWidth, height: element.clientHeight })).observe(element);

/** Redraw when the theme changes: colours are drawn into the canvas. */
export const onTheme = (act) =>
  new MutationObserver(act).observe(document.documentElement, { attributes: true, attributeFilter: ["data-bs-theme"] });
