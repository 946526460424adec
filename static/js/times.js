// <time datetime="…" data-when="clock|hour|moment|ago|for|elapsed|in"> in the reader's own zone; the server renders UTC.
// "ago", "for", "elapsed" and "in" count on by themselves, by the server's clock, so that a poll need not send them again.
import { word } from "./words.js";

const units = JSON.parse(word("units") || "null") ?? { s: "%s s", min: "%s min", h: "%s h", d: "%s d" };
const counted = (number, unit) => units[unit].replace("%s", number);
const skewMs = Number(document.documentElement.dataset.now) - Date.now();
const locale = document.documentElement.lang || undefined;
const { zone: ownZone } = document.documentElement.dataset; // that of the reader's account; else the browser's
/** The reader's time zone. */
export const timeZone = ownZone || Intl.DateTimeFormat().resolvedOptions().timeZone;
const clock = new Intl.DateTimeFormat(locale, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23", timeZone });
const hour = new Intl.DateTimeFormat(locale, { hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone });
const moment = new Intl.DateTimeFormat(locale, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone });
const full = new Intl.DateTimeFormat(locale, { dateStyle: "full", timeStyle: "long", timeZone });

/** Now, by the server's clock: milliseconds since the epoch. */
export const serverNow = () => Date.now() + skewMs;

export const clockText = (date) => clock.format(date);

// Writes what `dstackweb.wording.units.duration` writes.
export function durationText(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return counted(s, "s");
  if (s < 3600) return counted(Math.floor(s / 60), "min");
  const [first, firstS, second, secondS] = s < 86400 ? ["h", 3600, "min", 60] : ["d", 86400, "h", 3600];
  const rest = Math.floor((s % firstS) / secondS);
  return counted(Math.floor(s / firstS), first) + (rest ? ` ${counted(rest, second)}` : "");
}

// Writes what `dstackweb.wording.units.elapsed` writes.
export function elapsedText(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  return s >= 60 && s < 3600 ? `${counted(Math.floor(s / 60), "min")} ${counted(s % 60, "s")}` : durationText(s);
}

/** What is left, to the second in its last hour: `4:12`, `2 h 5 min`; in Chinese with units, as a word follows. */
function leftText(seconds) {
  const s = Math.max(0, Math.ceil(seconds));
  if (document.documentElement.lang.startsWith("zh")) return elapsedText(s);
  return s < 3600 ? `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}` : durationText(s);
}

function text(element, now) {
  const at = new Date(element.dateTime);
  if (Number.isNaN(at.getTime())) return element.textContent;
  const age = (now - at.getTime()) / 1000;
  switch (element.dataset.when) {
    case "ago":
      return element.dataset.ago.replace("%s", durationText(age));
    case "for":
      return durationText(age);
    case "elapsed":
      return elapsedText(age);
    case "in":
      return age < 0 ? element.dataset.in.replace("%s", leftText(-age)) : element.dataset.due;
    case "clock":
      return age < 20 * 3600 ? clock.format(at) : moment.format(at);
    case "hour":
      return Math.abs(age) < 20 * 3600 ? hour.format(at) : moment.format(at);
    default:
      return moment.format(at);
  }
}

// Days are counted by the server: a cookie gives it the reader's zone.
if (timeZone) document.cookie = `zone=${timeZone}; path=/; max-age=31536000; samesite=lax`;

const titles = new Map(); // datetime → the whole moment in words: making them takes long

function titleOf({ dateTime }) {
  if (titles.size > 1000) titles.clear();
  if (!titles.has(dateTime)) titles.set(dateTime, full.format(new Date(dateTime)));
  return titles.get(dateTime);
}

function localise(root = document) {
  const now = serverNow();
  for (const element of root.querySelectorAll("time[data-when]")) {
    const words = text(element, now);
    if (element.textContent !== words) element.textContent = words;
    if (!element.title) element.title = titleOf(element);
  }
}

localise();
// Before it is on the page, so that times which are the same there are left alone.
document.addEventListener("htmx:before:swap", ({ detail }) => detail.tasks.forEach(({ fragment }) => localise(fragment)));
setInterval(() => document.hidden || localise(), 1000);
document.addEventListener("visibilitychange", () => document.hidden || localise());
