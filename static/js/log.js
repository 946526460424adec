// The log of one job, live. Only the lines in view are on the page, and only the blocks around them in memory.
import { LogBytes } from "./log-bytes.js";
import { LogGroups } from "./log-groups.js";
import { LINE_CHARS } from "./log-lines.js";
import { drawNodes } from "./log-nodes.js";
import { logRow } from "./log-row.js";
import { LogSearch } from "./log-search.js";
import { LogWindow } from "./log-window.js";
import { delayMs, report } from "./polling.js";
import { word } from "./words.js";

const EVERY_S = 1;
const SLOWER = 1.4; // the pause grows so while nothing comes, up to SLOW_S
const SLOW_S = 4;
const QUIET_S = 60; // after QUIET_AFTER_MS without output: the page's own polls say when there is more
const QUIET_AFTER_MS = 10_000;
const SHORT = 8; // lines
const MOST_PX = 6_000_000; // browsers end near 17 million; above this, scrolling is scaled
const NEAR_END = 0.5; // rows of text
const CUTS = { job_limit: "logLimit", project_quota: "logQuota" };
const HASH = /^#(?:(\d+)\.(\d+)-)?L(\d+)(?:-L?(\d+))?$/;

const clamp = (value, least, most) => Math.max(least, Math.min(most, value));

class LogView {
  constructor(root) {
    this.root = root;
    this.view = root.querySelector("[data-log-text]");
    this.space = root.querySelector("[data-log-space]");
    this.rows = root.querySelector("[data-log-rows]");
    this.note = root.querySelector("[data-log-note]");
    this.window = new LogWindow(this, (row, kept) => this.rowFor(this.groups.lineAt(row), kept));
    this.below = root.querySelector("[data-log-below]");
    this.nodes = root.querySelector("[data-log-nodes]");
    this.search = new LogSearch(root, { goTo: (line) => this.showMatch(line), redraw: () => this.draw() });
    this.buttons = Object.fromEntries(
      ["follow", "wrap", "times", "tall"].map((name) => [name, root.querySelector(`[data-log-${name}]`)]),
    );
    this.following = true;
    this.chosen = false; // whether the reader picked a job; until then the newest attempt is shown
    this.timer = null;
    this.grewAt = 0; // performance.now() when output came last
    this.listen();
    this.fromHash();
    this.open();
  }

  get select() {
    return this.root.querySelector("[data-log-job]");
  }

  listen() {
    const { buttons, view } = this;
    buttons.follow.addEventListener("click", () => this.setFollow(!this.following));
    for (const name of ["wrap", "times", "tall"])
      buttons[name].addEventListener("click", () => this.toggle(name, buttons[name].ariaPressed !== "true"));
    this.toggle("wrap", localStorage.getItem("log-wrap") !== "no", true);
    this.toggle("times", localStorage.getItem("log-times") === "yes", true);
    this.below.addEventListener("click", () => this.setFollow(true));
    view.addEventListener("scroll", () => this.scrolled());
    view.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    view.addEventListener("keydown", (event) => this.key(event));
    this.rows.addEventListener("click", (event) => this.clicked(event));
    new ResizeObserver(() => this.drawAnew()).observe(view);
    this.root.addEventListener("change", (event) => {
      if (event.target !== this.select) return;
      this.chosen = true;
      this.open();
    });
    this.nodes.addEventListener("click", (event) => this.nodeClicked(event));
    document.addEventListener("htmx:after:swap", () => this.jobsChanged());
    this.root.addEventListener("changed", () => this.changed());
    document.addEventListener("visibilitychange", () => document.hidden || this.schedule(0));
    addEventListener("hashchange", () => this.fromHash() && this.open());
  }

  // Which job

  jobsChanged() {
    const newest = this.select?.options[0];
    if (newest && !this.chosen) newest.selected = true;
    if ((this.select?.value ?? "") !== this.job) this.open();
    else this.drawNodes();
  }

  drawNodes() {
    drawNodes(this.nodes, [...(this.select?.options ?? [])].map((option) => option.value), this.job);
  }

  nodeClicked(event) {
    const value = event.target.closest("[data-job]")?.dataset.job;
    if (!value || value === this.job) return;
    this.select.value = value;
    this.chosen = true;
    this.open();
    this.nodes.querySelector(".active")?.focus();
  }

  /** Choose what the address names: `#L120`, `#L120-L140`, or `#2.1-L120` for node 1 of attempt 2. */
  fromHash() {
    const found = HASH.exec(location.hash);
    if (!found) return false;
    const [first, last] = [Number(found[3]), Number(found[4] ?? found[3])];
    this.marked = { first: Math.min(first, last), last: Math.max(first, last) };
    this.goTo = Math.max(0, this.marked.first - 1);
    this.setFollow(false);
    if (found[1] && this.select) {
      this.select.value = `${found[1]}.${found[2]}`;
      this.chosen = true;
    }
    return true;
  }

  open() {
    this.job = this.select?.value ?? "";
    this.request?.abort();
    const request = (this.request = new AbortController());
    this.log = new LogBytes((path, query) => this.ask(path, query, request.signal), () => this.draw());
    this.busy = false;
    this.over = false;
    this.pauseS = EVERY_S;
    this.top = 0; // the first line in view, counted without those of closed groups
    this.last = 0; // the highest `top`
    this.seen = 0; // how many lines there were when the end was in view last, or when the log was opened
    this.caughtUp = false; // whether all that there was when it was opened has been read
    this.window.forgetHeights();
    this.groups = new LogGroups();
    this.rows.replaceChildren();
    this.view.hidden = true; // until there is a line
    this.below.hidden = true;
    this.say(word("logEmpty"));
    this.drawNodes();
    const [attempt, node] = this.job.split(".");
    for (const link of this.root.querySelectorAll("[data-log-download], [data-log-raw]"))
      if (this.job) link.search = new URLSearchParams({ [link.dataset.logAs]: "1", attempt, node });
    this.schedule(0);
    this.search.open(this.job ? this.log : null);
  }

  async ask(path, query, signal) {
    const [attempt, node] = this.job.split(".");
    const all = new URLSearchParams({ attempt, node, ...query });
    const response = await fetch(`${this.root.dataset.log}${path}?${all}`, { signal, headers: { "HX-Request": "true" } });
    if (response.status === 401) location.reload();
    if (response.status === 410) throw Object.assign(new Error("gone"), { gone: await response.text() });
    if (!response.ok) throw new Error(String(response.status));
    return response;
  }

  // Live

  schedule(ms) {
    clearTimeout(this.timer);
    if (this.job && !this.over) this.timer = setTimeout(() => this.poll(), ms);
  }

  /** The page's own poll says that there is more, or that a job has ended. */
  changed() {
    this.grewAt = performance.now();
    this.pauseS = EVERY_S;
    this.schedule(0);
  }

  async poll() {
    if (document.hidden || this.busy) return;
    const { log } = this;
    this.busy = true;
    try {
      const before = log.end;
      const response = await log.advance();
      if (log !== this.log) return; // another job was chosen meanwhile
      this.over = log.complete;
      this.sayState(response.headers);
      if (!this.caughtUp) this.seen = log.lines;
      this.caughtUp ||= !log.more;
      this.grown();
      report(true);
      this.pauseS = log.end > before ? EVERY_S : Math.min(SLOW_S, this.pauseS * SLOWER);
      if (log.end > before) this.grewAt = performance.now();
      if (performance.now() - this.grewAt > QUIET_AFTER_MS) this.pauseS = QUIET_S;
      this.busy = false;
      this.schedule(log.more ? 0 : delayMs(this.pauseS));
    } catch (error) {
      if (log !== this.log || error.name === "AbortError") return;
      this.busy = false;
      if (error.gone) {
        this.over = true; // removed or lost: asking again would not bring it back
        this.say(error.gone);
        return;
      }
      report(false);
      this.schedule(delayMs(EVERY_S));
    }
  }

  sayState(headers) {
    const missing = headers.get("X-Log-Missing");
    const cut = CUTS[headers.get("X-Log-Cut")];
    const { over, log } = this;
    if (cut) this.say(word(cut) + (over && missing ? word("logLost").replace("%s", missing) : ""));
    else if (over && missing) this.say(word("logCut").replace("%s", missing));
    else if (over) this.say(word(log.end ? "logComplete" : "logNone"));
    else this.say(word(log.end ? "logLive" : "logEmpty"));
  }

  say(text) {
    if (this.note.textContent !== text) this.note.textContent = text;
  }

  grown() {
    if (!this.log.lines) return;
    this.view.hidden = false;
    if (this.goTo !== undefined && (this.goTo < this.log.lines || this.over)) {
      this.top = Math.max(0, this.groups.rowOf(Math.min(this.goTo, this.log.lines - 1)) - 3);
      this.goTo = undefined;
    }
    this.draw();
  }

  async toggleGroup(line) {
    await this.groups.toggle(line, this.log);
    this.draw();
  }

  // Drawing

  /** Draw where lines may wrap differently. */
  drawAnew() {
    this.window.forgetHeights();
    this.draw();
  }

  draw() {
    if (this.view.hidden || this.drawing) return;
    this.drawing = true; // what is missing is fetched meanwhile, and draws again
    const { view, rows } = this;
    const { rowPx } = this.window;
    const fits = Math.ceil(this.window.fits);
    const count = this.groups.rowsOf(this.log.lines);
    const digits = String(this.log.lines).length;
    if (view.dataset.digits !== String(digits)) {
      view.dataset.digits = digits;
      view.style.setProperty("--log-digits", digits);
    }
    view.classList.toggle("log-short", count <= SHORT);
    rows.style.height = `${view.clientHeight}px`;
    this.last = Math.max(0, count - this.window.fitsAtEnd(count, this.log.lines));
    const atEnd = this.following || this.top >= this.last - 0.01;
    const first = Math.floor(atEnd ? Math.max(0, count - fits) : clamp(this.top, 0, this.last));
    this.window.fill(first, Math.min(count, first + fits + 1));
    if (atEnd) this.last = Math.max(0, count - this.window.measureEnd(this.log.lines));
    this.top = atEnd ? this.last : clamp(this.top, 0, this.last);
    const inner = rows.firstElementChild;
    const overflow = Math.max(0, (inner?.offsetHeight ?? 0) - view.clientHeight);
    const shift = atEnd ? overflow : (this.top - first) * (inner?.firstElementChild?.offsetHeight ?? 0);
    if (inner) inner.style.transform = `translateY(${-shift}px)`;
    this.scaled = this.last * rowPx > MOST_PX;
    const px = Math.min(this.last * rowPx, MOST_PX);
    this.space.style.height = `${Math.ceil(px + view.clientHeight)}px`;
    this.scrolledTo = this.last ? Math.round((this.top / this.last) * px) : 0;
    if (Math.abs(view.scrollTop - this.scrolledTo) >= 1) view.scrollTop = this.scrolledTo;
    this.scrolledTo = view.scrollTop;
    this.drawBelow(atEnd);
    this.drawing = false;
  }

  /** Before a move: the log may have grown while its end was not in view. */
  refreshEnd() {
    if (this.window.isStale(this.log.lines)) this.drawAnew();
  }

  /** The row of a line: the one that shows the same already, or a new one. */
  rowFor(line, kept) {
    const found = this.log.line(line, LINE_CHARS);
    const marked = this.marked && line + 1 >= this.marked.first && line + 1 <= this.marked.last;
    const mark = found && this.log.markAt(found.offset);
    const hidden = this.groups.hiddenAt(line);
    const hit = found && this.search.isHit(found);
    const state = [found?.bytes.length, found?.last?.length, mark?.time, mark?.stream, marked, hidden, hit];
    const key = `${line} ${state}`;
    const old = kept.get(key);
    if (old) return old;
    const href = this.hashOf({ first: line + 1, last: line + 1 });
    const row = logRow({ line, found, mark, marked, hidden, hit, href });
    row.dataset.key = key;
    return row;
  }

  drawBelow(atEnd) {
    if (atEnd) this.seen = this.log.lines;
    const behind = this.log.lines - this.seen;
    this.below.hidden = atEnd || behind <= 0;
    if (!this.below.hidden) this.below.textContent = word("logBelow").replace("%s", behind.toLocaleString());
  }

  // Moving

  setFollow(on) {
    this.following = on;
    this.buttons.follow.setAttribute("aria-pressed", String(on));
    this.buttons.follow.classList.toggle("active", on);
    if (on) this.draw();
  }

  moveTo(top) {
    const last = Math.max(0, this.last);
    this.top = clamp(top, 0, last);
    const atEnd = this.top >= last - (NEAR_END * this.window.rowPx) / this.window.heightOf(Math.floor(last));
    if (atEnd !== this.following) this.setFollow(atEnd);
    this.draw();
  }

  /** The `top` so many pixels below, or above. */
  topAfter(px) {
    return this.window.after(this.top, px, this.groups.rowsOf(this.log.lines));
  }

  scrolled() {
    const { view } = this;
    if (this.drawing || Math.abs(view.scrollTop - this.scrolledTo) < 1) return;
    const share = view.scrollTop / Math.max(1, this.space.offsetHeight - view.clientHeight);
    this.refreshEnd();
    this.moveTo(share * this.last);
  }

  /** Where a pixel of the bar is many lines, or a line has many pixels, this moves by what is in view. */
  wheel(event) {
    if (!(this.scaled || this.window.wraps) || event.ctrlKey || !event.deltaY) return;
    const unit = [1, this.window.rowPx, this.view.clientHeight][event.deltaMode];
    this.refreshEnd();
    const before = this.top;
    this.moveTo(this.topAfter(event.deltaY * unit));
    if (this.top !== before) event.preventDefault();
  }

  key(event) {
    if (event.target !== this.view || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = this.view.clientHeight - this.window.rowPx;
    const px = { PageUp: -page, PageDown: page }[event.key];
    const by = { ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity }[event.key];
    if (px === undefined && by === undefined) return;
    event.preventDefault();
    this.refreshEnd();
    this.moveTo(px === undefined ? this.top + by : this.topAfter(px));
  }

  toggle(name, on, silently = false) {
    const button = this.buttons[name];
    button.ariaPressed = String(on);
    button.classList.toggle("active", on);
    this.root.classList.toggle(`log-${name}`, on);
    if (name === "tall") document.documentElement.classList.toggle("log-is-tall", on);
    else if (!silently) localStorage.setItem(`log-${name}`, on ? "yes" : "no");
    if (!silently) this.drawAnew();
  }

  // Links to lines

  hashOf({ first, last }) {
    const several = (this.select?.options.length ?? 0) > 1;
    return `#${several ? `${this.job}-` : ""}L${first}${last === first ? "" : `-L${last}`}`;
  }

  clicked(event) {
    const group = event.target.closest("[data-group]");
    if (group) {
      this.toggleGroup(Number(group.dataset.group));
      return;
    }
    const link = event.target.closest(".log-number");
    if (!link || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const line = Number(link.dataset.number);
    const from = event.shiftKey && this.marked ? this.from : line;
    this.from = from;
    this.marked = { first: Math.min(from, line), last: Math.max(from, line) };
    history.replaceState(history.state, "", this.hashOf(this.marked));
    this.draw();
  }

  showMatch(line) {
    this.groups.reveal(line);
    this.setFollow(false);
    this.top = clamp(this.groups.rowOf(line) - Math.floor(this.window.fits / 3), 0, this.last);
    this.draw();
  }
}

for (const root of document.querySelectorAll("[data-log]")) new LogView(root);
