// The search in a log: the server finds the matches, a piece of the log at a time.
import { report } from "./polling.js";

const SEARCH_MS = 250;
const MATCHES = 5000;

export class LogSearch {
  /** `goTo(line)` shows a line, `redraw()` what is in view. */
  constructor(root, { goTo, redraw }) {
    this.field = root.querySelector("[data-log-find]");
    this.found = root.querySelector("[data-log-found]");
    this.buttons = ["previous", "next"].map((name) => root.querySelector(`[data-log-${name}]`));
    this.goTo = goTo;
    this.redraw = redraw;
    this.matches = []; // offsets, ascending
    this.now = -1;
    this.field.addEventListener("input", () => this.soon());
    this.field.addEventListener("keydown", (event) => this.key(event));
    for (const [at, by] of [-1, 1].entries()) this.buttons[at].addEventListener("click", () => this.step(by));
  }

  key(event) {
    if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") this.field.value = "";
    else return;
    event.preventDefault();
    if (event.key === "Escape") this.search();
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.search(), SEARCH_MS);
  }

  /** Search another log for what stands in the field; none while there is no job. */
  open(log) {
    this.log = log;
    this.search();
  }

  async search() {
    const { log } = this;
    const q = this.field.value;
    this.query = q;
    this.matches = [];
    this.now = -1;
    this.draw(false);
    if (q && log) {
      try {
        for (let from = 0; from !== null && this.matches.length < MATCHES; ) {
          const found = await log.search(q, from);
          if (log !== this.log || q !== this.query) return;
          const first = !this.matches.length && found.offsets.length;
          this.matches.push(...found.offsets);
          this.draw(found.next !== null);
          if (first) await this.step(1);
          from = found.next;
        }
      } catch (error) {
        if (error.name !== "AbortError") report(false);
        return;
      }
      this.draw(false);
    }
    this.redraw();
  }

  draw(going) {
    const { matches } = this;
    const many = matches.length.toLocaleString() + (going || matches.length >= MATCHES ? "+" : "");
    this.found.textContent = this.query ? `${this.now + 1} / ${many}` : "";
    for (const button of this.buttons) button.disabled = !matches.length;
  }

  async step(by) {
    const { matches, log } = this;
    if (!matches.length) return;
    this.now = (this.now + by + matches.length) % matches.length;
    const line = await log.lineOf(matches[this.now]);
    if (line === null || log !== this.log) return;
    this.draw(false);
    this.goTo(line);
  }

  /** Whether a line has a match: "now" for the one that was gone to, "hit" for others. */
  isHit({ offset, bytes }) {
    const { matches } = this;
    if (!matches.length) return "";
    const current = matches[this.now];
    if (current >= offset && current < offset + bytes.length) return "now";
    let low = 0;
    let high = matches.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (matches[middle] < offset) low = middle + 1;
      else high = middle;
    }
    return matches[low] < offset + bytes.length ? "hit" : "";
  }
}
