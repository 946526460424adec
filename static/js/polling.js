// Elements with data-poll="seconds" and hx-trigger="poll" are asked for again by this one scheduler:
// nothing in a hidden tab, at once when it shows again, and slower and slower while the server can't be reached.
// (htmx's own `every 2s [filter]` needs eval, which the Content-Security-Policy forbids.)
import { clockText } from "./times.js";
import { word } from "./words.js";

const LOOK_MS = 200;
const SLOWEST_MS = 15000;
const polls = new WeakMap(); // element → {dueAt, busy}
let failures = 0;

export const delayMs = (seconds) => Math.min(seconds * 1000 * 2 ** failures, Math.max(SLOWEST_MS, seconds * 1000));

function say(state, text, aloud = "") {
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
    say("live", `${word("updated")} ${clockText(new Date())}`, wasLost ? word("back") : "");
  } else {
    failures += 1;
    say("lost", word("lost"), word("lost"));
  }
}

function look() {
  if (document.hidden) return;
  const now = performance.now();
  for (const element of document.querySelectorAll("[data-poll]")) {
    let poll = polls.get(element);
    if (!poll) polls.set(element, (poll = { dueAt: now + delayMs(Number(element.dataset.poll)), busy: false }));
    if (poll.busy || now < poll.dueAt) continue;
    poll.busy = true;
    element.dispatchEvent(new CustomEvent("poll"));
  }
}

function settled(element, ok) {
  const poll = polls.get(element);
  if (!poll?.busy) return; // an action of the reader that has the same source
  poll.busy = false;
  report(ok);
  if (element.dataset.poll) poll.dueAt = performance.now() + delayMs(Number(element.dataset.poll));
}

document.addEventListener("htmx:finally:request", (event) => {
  const { ctx } = event.detail;
  settled(ctx.sourceElement, ctx.response !== undefined && ctx.response.status < 500);
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    say("paused", word("paused"));
    return;
  }
  for (const element of document.querySelectorAll("[data-poll]")) {
    const poll = polls.get(element);
    if (poll) poll.dueAt = 0;
  }
  look();
});

if (document.querySelector("[data-poll]")) say("live", `${word("updated")} ${clockText(new Date())}`);
setInterval(look, LOOK_MS);
