// One line of a log on the page: its number as a link, its time, and its text.
import { groupOf, isRedrawn, levelOf, plain, rendered, shownOf } from "./log-lines.js";
import { clockText, timeZone } from "./times.js";
import { word } from "./words.js";

const STDERR = 1;
const clock = (ms) => `${clockText(new Date(ms))}.${String(ms % 1000).padStart(3, "0")}`;

/**
 * `found` is the line's bytes, undefined until they are there; `mark` when and by which stream it was written;
 * `hidden` how many lines of its closed group, if it begins one; `hit` whether the search found it; `href` its link.
 */
export function logRow({ line, found, mark, marked, hidden, hit, href }) {
  const row = document.createElement("div");
  row.dataset.line = line + 1;
  row.className = "log-line";
  row.append(numberLink(line, href));
  if (!found) {
    row.classList.add("log-coming");
    return row;
  }
  const text = shownOf(found);
  const shown = plain(text.slice(0, 400));
  const level = levelOf(shown);
  const group = groupOf(shown);
  if (level) row.classList.add(`log-${level}`);
  if (mark?.stream === STDERR) row.classList.add("log-stderr");
  if (marked) row.classList.add("log-marked");
  if (hit) row.classList.add(hit === "now" ? "log-hit-now" : "log-hit");
  const body = document.createElement("span");
  body.className = "log-body";
  if (group) body.append(groupButton(line, group, hidden));
  else if (group === "") row.classList.add("log-group-end");
  else body.append(rendered(text));
  if (found.last && !isRedrawn(found)) body.append(shortened());
  row.append(timeOf(mark), body);
  return row;
}

function numberLink(line, href) {
  const link = document.createElement("a");
  link.className = "log-number";
  link.href = href;
  link.dataset.number = line + 1;
  link.tabIndex = -1;
  link.setAttribute("aria-label", word("logLine").replace("%s", line + 1));
  return link;
}

function timeOf(mark) {
  const time = document.createElement("span");
  time.className = "log-time";
  if (mark) time.dataset.time = clock(mark.time);
  if (mark) time.title = new Date(mark.time).toLocaleString(undefined, { timeZone }) + (mark.stream === STDERR ? " · stderr" : "");
  return time;
}

function groupButton(line, title, hidden) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "log-group";
  button.dataset.group = line;
  button.setAttribute("aria-expanded", String(!hidden));
  button.textContent = title + (hidden ? word("logHidden").replace("%s", hidden) : "");
  return button;
}

function shortened() {
  const more = document.createElement("i");
  more.textContent = word("logLong");
  return more;
}
