// Elements with data-poll="seconds" and hx-trigger="poll" are requested again by this one scheduler:
// nothing in a hidden tab, at once when it shows again, less often while nothing changes, and slower and slower while
// the server can't be reached. An answer may name other parts of the page that have changed since (DW-Parts).
// (htmx's own `every 2s [filter]` needs eval, which the Content-Security-Policy forbids.)
import { clockText } from "./times.js";
import { word } from "./words.js";

const LOOK_MS = 200;
const SLOWEST_MS = 15000;
const GIVEN_UP_MS = 30000;
const CALM_MS = 4000;
const CALM_AFTER = [3, 8]; // answers without a change, after which pauses are half as long again, and twice as long
const PATIENCE = 4; // pauses are so many times as long as the answer took: many open pages leave a busy server room
const polls = new WeakMap(); // element → {dueAt, askedAt, busy, same: answers without a change in a row}
const stamps = new Map(); // id of a part of the page → what the server said of it last (DW-Parts)
const held = new Set();
let failures = 0;

/** What still changes: a fragment that holds [data-poll-over] has come to its end. */
const going = () => [...document.querySelectorAll("[data-poll]")].filter((e) => !e.querySelector("[data-poll-over]"));

/** The wait for the next request: longer after failures, and after an answer that took `tookMs` of a busy server. */
export const delayMs = (seconds, tookMs = 0) =>
  Math.min(Math.max(seconds * 1000 * 2 ** failures, PATIENCE * tookMs), Math.max(SLOWEST_MS, seconds * 1000));

/** While nothing changes, pauses grow to four seconds at most; longer ones stay as they are. */
function calmSeconds(seconds, same) {
  const factor = 1 + CALM_AFTER.filter((answers) => same >= answers).length / 2;
  return Math.min(seconds * factor, Math.max(seconds, CALM_MS / 1000));
}

function say(state, text, aloud = "") {
  if (document.hidden && state !== "paused") return; // an answer that was still on its way
  for (const live of document.querySelectorAll("[data-live]")) {
    live.dataset.state = state;
    live.querySelector("[data-live-text]").textContent = text;
  }
  const spoken = document.querySelector("[data-live-say]");
  if (spoken && spoken.textContent !== aloud) spoken.textContent = aloud;
}

/** Show how the last look at the server went; every poller on the page reports here. */
export function report(ok) {
  if (ok) {
    const wasLost = failures > 0;
    failures = 0;
    const aloud = wasLost ? word("back") : "";
    if (going().length) say("live", `${word("updated")} ${clockText(new Date())}`, aloud);
    else say("over", word("over"), aloud);
  } else {
    failures += 1;
    say("lost", word("lost"), word("lost"));
  }
}

/** Until it is released nothing on the page is replaced by a poll: a row is in someone's hand. */
export const hold = (why) => held.add(why);
export function release(why) {
  if (held.delete(why)) lookNow();
}

const outdated = new WeakSet(); // polled elements a part of which was held while the rest was renewed

/** Poll the whole element again, whatever version it shows: a part of it was not refreshed. */
export function forceRefresh(part) {
  const element = part.closest("[data-poll]");
  if (!element) return;
  outdated.add(element);
  lookNow();
}

document.addEventListener("htmx:config:request", (event) => {
  const { ctx } = event.detail;
  if (outdated.delete(ctx.sourceElement)) delete ctx.request.headers["HX-PTag"];
});

function pollOf(element) {
  if (!polls.has(element))
    polls.set(element, { dueAt: performance.now() + delayMs(Number(element.dataset.poll)), askedAt: 0, busy: false, same: 0 });
  return polls.get(element);
}

function look() {
  if (document.hidden || held.size) return;
  const now = performance.now();
  for (const element of going()) {
    const poll = pollOf(element);
    if (!element.hasAttribute("data-htmx-powered")) continue; // htmx has not come to it yet
    // An answer that never came, not even as an error, must not end the polling.
    if (now < poll.dueAt || (poll.busy && now - poll.askedAt < GIVEN_UP_MS)) continue;
    poll.busy = true;
    poll.askedAt = now;
    element.dispatchEvent(new CustomEvent("poll"));
  }
}

function lookNow() {
  for (const element of going()) Object.assign(pollOf(element), { dueAt: 0, same: 0 });
  look();
}

/** Parts of the page that this answer says have changed: polled ones are requested now, others are notified. */
function requestParts(header) {
  for (const [id, stamp] of Object.entries(JSON.parse(header ?? "{}"))) {
    const part = document.getElementById(id);
    if (!part || stamps.get(id) === stamp) continue;
    stamps.set(id, stamp);
    if (part.hasAttribute("data-poll")) pollOf(part).dueAt = 0;
    else part.dispatchEvent(new CustomEvent("changed"));
  }
}

function settled(element, response) {
  const ok = response !== undefined && response.status < 500;
  const poll = polls.get(element);
  if (!poll?.busy) {
    lookNow(); // the reader did something: show at once what came of it
    return;
  }
  poll.busy = false;
  report(ok);
  const now = performance.now();
  poll.same = response?.status === 204 ? poll.same + 1 : 0;
  poll.dueAt = now + delayMs(calmSeconds(Number(element.dataset.poll), poll.same), now - poll.askedAt);
  if (ok) requestParts(response.headers.get("DW-Parts"));
}

// What was on its way when the hold began is dropped before the page remembers its version: it is requested again.
document.addEventListener("htmx:before:response", (event) => {
  if (held.size && event.detail.ctx.sourceElement.hasAttribute("data-poll")) event.preventDefault();
});

document.addEventListener("htmx:finally:request", (event) => {
  const { ctx } = event.detail;
  settled(ctx.sourceElement, ctx.response);
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    say("paused", word("paused"));
    return;
  }
  lookNow();
});

window.addEventListener("online", lookNow);

if (document.querySelector("[data-live]")) report(true);
setInterval(look, LOOK_MS);
