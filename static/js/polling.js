// Elements with data-poll="seconds" and hx-trigger="poll" are requested again by this one scheduler:
// nothing in a hidden tab, at once when it shows again, and slower and slower while the server can't be reached.
// (htmx's own `every 2s [filter]` needs eval, which the Content-Security-Policy forbids.)
import { clockText } from "./times.js";
import { word } from "./words.js";

const LOOK_MS = 200;
const SLOWEST_MS = 15000;
const GIVEN_UP_MS = 30000;
const PATIENCE = 4; // pauses are so many times as long as the answer took: many open pages leave a busy server room
const polls = new WeakMap(); // element → {dueAt, askedAt, busy}
const held = new Set();
let failures = 0;

/** What still changes: a fragment that holds [data-poll-over] has come to its end. */
const going = () => [...document.querySelectorAll("[data-poll]")].filter((e) => !e.querySelector("[data-poll-over]"));

/** The wait for the next request: longer after failures, and after an answer that took `tookMs` of a busy server. */
export const delayMs = (seconds, tookMs = 0) =>
  Math.min(Math.max(seconds * 1000 * 2 ** failures, PATIENCE * tookMs), Math.max(SLOWEST_MS, seconds * 1000));

function say(state, text, aloud = "") {
  if (document.hidden && state !== "paused") return; // an answer that was still on its way
  for (const live of document.querySelectorAll("[data-live]")) {
    live.dataset.state = state;
    live.querySelector("[data-live-text]").textContent = text;
  }
  const spoken = document.querySelector("[data-live-say]");
  if (spoken && spoken.textContent !== aloud) spoken.textContent = aloud;
}

/** Tell the reader how the last look at the server went; every poller on the page reports here. */
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

/** Until it is released nothing on the page is replaced by a poll: a row is in somebody's hand. */
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
    polls.set(element, { dueAt: performance.now() + delayMs(Number(element.dataset.poll)), askedAt: 0, busy: false });
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
  for (const element of going()) pollOf(element).dueAt = 0;
  look();
}

function settled(element, ok) {
  const poll = polls.get(element);
  if (!poll?.busy) {
    lookNow(); // the reader did something: show at once what came of it
    return;
  }
  poll.busy = false;
  report(ok);
  const now = performance.now();
  poll.dueAt = now + delayMs(Number(element.dataset.poll), now - poll.askedAt);
}

// What was on its way when the hold began is dropped before the page remembers its version: it is requested again.
document.addEventListener("htmx:before:response", (event) => {
  if (held.size && event.detail.ctx.sourceElement.hasAttribute("data-poll")) event.preventDefault();
});

document.addEventListener("htmx:finally:request", (event) => {
  const { ctx } = event.detail;
  settled(ctx.sourceElement, ctx.response !== undefined && ctx.response.status < 500);
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
