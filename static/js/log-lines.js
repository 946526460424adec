// One line of a log as text for people: colours of terminals, levels, links. What a job wrote is never markup.

export const LINE_CHARS = 65_536; // what is shown of a longer line
const SGR = /\x1b\[([0-9;:]*)m/g;
// Other sequences of terminals: cursor moves, titles, hyperlinks, the clipboard. None of them is text.
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])/g;
// As lib/text.py: what can't be seen, and what changes the order of the text around it.
const INVISIBLE =
  /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const ACCENTS = /(\p{M}{4})\p{M}+/gu;
const URLS = /https?:\/\/[\w.~:/?#@!$&*+,;=%-]*[\w~/#&+=%-]/g;
const LEVEL_CHARS = 160;
const LEVELS = [
  ["error", /^::error\b|\b(?:ERROR|FATAL|CRITICAL|PANIC)\b|\blevel=["']?(?:error|fatal|critical)\b|\[(?:error|fatal)\]/],
  ["warning", /^::warning\b|\bWARN(?:ING)?\b|\blevel=["']?warn(?:ing)?\b|\[warn(?:ing)?\]/],
  ["debug", /^::debug\b|\b(?:DEBUG|TRACE)\b|\blevel=["']?(?:debug|trace)\b|\[(?:debug|trace)\]/],
];
const FLAGS = { 1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "inverse", 9: "strike" };
const FLAGS_OFF = { 22: ["bold", "dim"], 23: ["italic"], 24: ["underline"], 27: ["inverse"], 29: ["strike"] };

/** What a terminal shows of a line: a carriage return restarts it. */
function restarted(line) {
  let end = line.length;
  while (line[end - 1] === "\r") end -= 1; // a pattern would try each of a hundred thousand in a row, to its end
  const from = end ? line.lastIndexOf("\r", end - 1) + 1 : 0;
  return line.slice(from, end);
}

const visible = (text) => text.replace(ESCAPES, "").replace(INVISIBLE, "·").replace(ACCENTS, "$1…");

/** A line without colours. */
export const plain = (line) => visible(restarted(line));

/** "error", "warning", "debug" or "". */
export function levelOf(text) {
  const head = text.slice(0, LEVEL_CHARS);
  return LEVELS.find(([, pattern]) => pattern.test(head))?.[0] ?? "";
}

/** The title of a group that begins in a line, "" for its end, null for other lines. */
export function groupOf(text) {
  const found = /^(?:::|##\[)(group|endgroup)(?:::|\])(.*)/.exec(text);
  if (!found) return null;
  return found[1] === "group" ? found[2].trim() || "group" : "";
}

/** Colours 16 to 255 of a terminal as CSS. */
function cubeColour(n) {
  if (n >= 232) return `rgb(${Array(3).fill(8 + 10 * (n - 232))})`;
  const steps = [0, 95, 135, 175, 215, 255];
  return `rgb(${[steps[Math.floor((n - 16) / 36)], steps[Math.floor((n - 16) / 6) % 6], steps[(n - 16) % 6]]})`;
}

/** Apply the numbers of one sequence to a style {flags, fg, bg}; a colour is a name or CSS. */
function applied(style, codes) {
  const next = { flags: new Set(style.flags), fg: style.fg, bg: style.bg };
  for (let i = 0; i < codes.length; i += 1) {
    const code = codes[i];
    if (code === 0) Object.assign(next, { flags: new Set(), fg: "", bg: "" });
    else if (FLAGS[code]) next.flags.add(FLAGS[code]);
    else if (FLAGS_OFF[code]) FLAGS_OFF[code].forEach((flag) => next.flags.delete(flag));
    else if (code >= 30 && code <= 37) next.fg = `c${code - 30}`;
    else if (code >= 40 && code <= 47) next.bg = `c${code - 40}`;
    else if (code >= 90 && code <= 97) next.fg = `c${code - 82}`;
    else if (code >= 100 && code <= 107) next.bg = `c${code - 92}`;
    else if (code === 39) next.fg = "";
    else if (code === 49) next.bg = "";
    else if (code === 38 || code === 48) {
      const place = code === 38 ? "fg" : "bg";
      if (codes[i + 1] === 5) {
        const n = Math.min(255, codes[i + 2] ?? 0);
        next[place] = n < 16 ? `c${n}` : cubeColour(n);
        i += 2;
      } else if (codes[i + 1] === 2) {
        next[place] = `rgb(${[2, 3, 4].map((at) => Math.min(255, codes[i + at] ?? 0))})`;
        i += 4;
      }
    }
  }
  return next;
}

function styled(text, style) {
  if (!style.flags.size && !style.fg && !style.bg) return textWithLinks(text);
  const span = document.createElement("span");
  for (const flag of style.flags) span.classList.add(`ansi-${flag}`);
  for (const [place, property] of [["fg", "color"], ["bg", "backgroundColor"]]) {
    if (style[place].startsWith("c")) span.classList.add(`ansi-${place}-${style[place].slice(1)}`);
    else if (style[place]) span.style[property] = style[place];
  }
  span.append(textWithLinks(text));
  return span;
}

function textWithLinks(text) {
  if (!text.includes("://")) return document.createTextNode(text);
  const parts = document.createDocumentFragment();
  let at = 0;
  for (const found of text.matchAll(URLS)) {
    const link = document.createElement("a");
    link.href = link.textContent = found[0];
    link.rel = "noopener noreferrer nofollow";
    link.target = "_blank";
    link.tabIndex = -1;
    parts.append(text.slice(at, found.index), link);
    at = found.index + found[0].length;
  }
  parts.append(text.slice(at));
  return parts;
}

/** The line as nodes. Colours end with it: one that is never reset can't paint the rest of the log. */
export function rendered(line) {
  const text = restarted(line);
  if (!text.includes("\x1b[")) return textWithLinks(visible(text));
  const nodes = document.createDocumentFragment();
  let style = { flags: new Set(), fg: "", bg: "" };
  let at = 0;
  for (const found of text.matchAll(SGR)) {
    if (found.index > at) nodes.append(styled(visible(text.slice(at, found.index)), style));
    style = applied(style, found[1].split(/[;:]/).map(Number));
    at = found.index + found[0].length;
  }
  nodes.append(styled(visible(text.slice(at)), style));
  return nodes;
}

const decoder = new TextDecoder("utf-8");

/** Whether the end of a long line overwrites its beginning, as progress bars do. */
export const isRedrawn = ({ last }) => Boolean(last?.includes(13));

/** What to show of a line's bytes: of a long one its beginning, or its end where that overwrites it. */
export const shownOf = (found) => decoder.decode(isRedrawn(found) ? found.last : found.bytes);
