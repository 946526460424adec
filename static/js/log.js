// The log of one job, live: only new bytes travel, addressed by their offset in the job's stream.
import { delayMs, report } from "./polling.js";
import { word } from "./words.js";

const EVERY_S = 1;
const TAIL_LINES = 2000;
const KEEP_CHARS = 2_000_000;
const NEAR_END_PX = 24;
const LINE_CHARS = 65_536; // a longer line is broken, since an unfinished one is drawn again with each piece
const CUTS = { job_limit: "logLimit", project_quota: "logQuota" };
// Colours and cursor moves of terminals, hyperlinks and titles; what is left is shown as text.
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])/g;
// As lib/text.py: what can't be seen, and what changes the order of the text around it.
const INVISIBLE =
  /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const ACCENTS = /(\p{M}{4})\p{M}+/gu;

/** What a terminal shows of a finished line: a carriage return restarts it. */
function shown(line) {
  const plain = line.replace(ESCAPES, "");
  let end = plain.length;
  while (plain[end - 1] === "\r") end -= 1; // a pattern would try each of a hundred thousand in a row, to its end
  const from = end ? plain.lastIndexOf("\r", end - 1) + 1 : 0;
  return plain.slice(from, end).replace(INVISIBLE, "·").replace(ACCENTS, "$1…");
}

class LogView {
  constructor(root) {
    this.root = root;
    this.view = root.querySelector("[data-log-text]");
    this.note = root.querySelector("[data-log-note]");
    this.download = root.querySelector("[data-log-download]");
    this.follow = root.querySelector("[data-log-follow]");
    this.following = true;
    this.chosen = false; // whether the reader picked a job; until then the newest attempt is shown
    this.timer = null;
    this.follow.addEventListener("click", () => this.setFollow(!this.following));
    this.view.addEventListener("scroll", () => this.scrolled());
    root.addEventListener("change", (event) => {
      if (event.target !== this.select) return;
      this.chosen = true;
      this.open();
    });
    document.addEventListener("htmx:after:swap", () => this.jobsChanged());
    document.addEventListener("visibilitychange", () => document.hidden || this.schedule(0));
    this.open();
  }

  get select() {
    return this.root.querySelector("[data-log-job]");
  }

  jobsChanged() {
    const newest = this.select?.options[0];
    if (newest && !this.chosen) newest.selected = true;
    if ((this.select?.value ?? "") !== this.job) this.open();
  }

  open() {
    this.job = this.select?.value ?? "";
    this.request?.abort();
    this.request = null;
    this.offset = null;
    this.complete = false;
    this.decoder = new TextDecoder("utf-8");
    this.rest = "";
    this.chars = 0;
    this.view.replaceChildren();
    this.current = document.createElement("span");
    this.view.append(this.current);
    this.view.hidden = true; // until there is a line
    this.root.querySelector("[data-log-earlier]").hidden = true;
    this.say(word("logEmpty"));
    const [attempt, node] = this.job.split(".");
    if (this.job) this.download.search = new URLSearchParams({ download: "1", attempt, node });
    this.schedule(0);
  }

  schedule(ms) {
    clearTimeout(this.timer);
    if (this.job && !this.complete) this.timer = setTimeout(() => this.fetch(), ms);
  }

  async fetch() {
    if (document.hidden || this.request) return;
    const job = this.job;
    const request = (this.request = new AbortController());
    try {
      const more = await this.read(job, request.signal);
      this.request = null;
      report(true);
      this.schedule(more ? 0 : delayMs(EVERY_S));
    } catch {
      if (this.request !== request) return; // another job was chosen meanwhile
      this.request = null;
      report(false);
      this.schedule(delayMs(EVERY_S));
    }
  }

  /** Ask for what follows the offset. Resolves to whether there is likely more at once. */
  async read(job, signal) {
    const [attempt, node] = job.split(".");
    const query = new URLSearchParams({ attempt, node });
    if (this.offset === null) query.set("tail", String(TAIL_LINES));
    else query.set("offset", String(this.offset));
    const response = await fetch(`${this.root.dataset.log}?${query}`, { signal, headers: { "HX-Request": "true" } });
    if (response.status === 401) location.reload();
    if (response.status === 410) {
      this.complete = true; // removed or lost: asking again would not bring it back
      this.say(await response.text());
      return false;
    }
    if (!response.ok) throw new Error(String(response.status));
    const bytes = new Uint8Array(await response.arrayBuffer());
    const start = Number(response.headers.get("X-Start-Offset"));
    if (this.offset === null && start > 0) this.earlier();
    this.offset = Number(response.headers.get("X-Next-Offset"));
    this.complete = response.headers.get("X-Log-Complete") === "true";
    this.append(this.decoder.decode(bytes, { stream: !this.complete }));
    const missing = response.headers.get("X-Log-Missing");
    const cut = CUTS[response.headers.get("X-Log-Cut")];
    if (cut) this.say(word(cut) + (this.complete && missing ? word("logLost").replace("%s", missing) : ""));
    else if (this.complete && missing) this.say(word("logCut").replace("%s", missing));
    else if (this.complete) this.say(word(this.offset ? "logComplete" : "logNone"));
    else this.say(word(this.offset ? "logLive" : "logEmpty"));
    return bytes.length > 0 && response.headers.get("X-Log-More") === "true";
  }

  append(text) {
    if (!text) return;
    this.view.hidden = false;
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    if (this.rest.length > LINE_CHARS) {
      lines.push(this.rest);
      this.rest = "";
    }
    if (lines.length) {
      const finished = new Text(lines.map(shown).join("\n") + "\n");
      this.current.before(finished);
      this.chars += finished.length;
    }
    this.current.textContent = shown(this.rest);
    while (this.chars > KEEP_CHARS && this.view.firstChild !== this.current) {
      this.chars -= this.view.firstChild.length;
      this.view.firstChild.remove();
      this.earlier();
    }
    if (this.following) this.view.scrollTop = this.view.scrollHeight;
  }

  earlier() {
    this.root.querySelector("[data-log-earlier]").hidden = false;
  }

  say(text) {
    if (this.note.textContent !== text) this.note.textContent = text;
  }

  setFollow(on) {
    this.following = on;
    this.follow.setAttribute("aria-pressed", String(on));
    this.follow.classList.toggle("active", on);
    if (on) this.view.scrollTop = this.view.scrollHeight;
  }

  scrolled() {
    const fromEnd = this.view.scrollHeight - this.view.clientHeight - this.view.scrollTop;
    if (fromEnd > NEAR_END_PX === this.following) this.setFollow(!this.following);
  }
}

for (const root of document.querySelectorAll("[data-log]")) new LogView(root);
