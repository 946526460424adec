// Groups of a log that the reader has closed. They hide lines: rows are the lines that are left.
import { LINE_CHARS, groupOf, plain, shownOf } from "./log-lines.js";

export class LogGroups {
  constructor() {
    this.closed = []; // ascending: [first hidden line, line behind the last]
  }

  /** How many rows so many lines have. */
  rowsOf(lines) {
    return lines - this.closed.reduce((sum, [first, behind]) => sum + behind - first, 0);
  }

  lineAt(row) {
    let line = row;
    for (const [first, behind] of this.closed) if (first <= line) line += behind - first;
    return line;
  }

  rowOf(line) {
    let row = line;
    for (const [first, behind] of this.closed) if (first <= line) row -= Math.min(behind, line + 1) - first;
    return row;
  }

  /** How many lines are hidden of the group that begins at a line; undefined while it is open. */
  hiddenAt(line) {
    const found = this.closed.find(([first]) => first === line + 1);
    return found && found[1] - found[0];
  }

  /** Open what hides a line. */
  reveal(line) {
    this.closed = this.closed.filter(([first, behind]) => line < first || line >= behind);
  }

  /** Close or open the group that begins at a line. Its end is found by the server, wherever it is. */
  async toggle(line, log) {
    const open = this.closed.findIndex(([first]) => first === line + 1);
    if (open >= 0) {
      this.closed.splice(open, 1);
      return;
    }
    const own = log.line(line, LINE_CHARS);
    if (!own) return;
    const behind = (await endOfGroup(log, own.offset + own.bytes.length)) ?? log.lines;
    if (behind <= line + 1) return;
    this.closed = this.closed.filter(([first]) => first <= line || first >= behind);
    this.closed.push([line + 1, behind]);
    this.closed.sort(([a], [b]) => a - b);
  }
}

/** The line behind the group that is open at an offset: its own end, or the next group's beginning. */
async function endOfGroup(log, start) {
  for (let from = start; from !== null; ) {
    const found = await log.search("group", from);
    for (const offset of found.offsets) {
      const line = await log.lineOf(offset);
      const bytes = line === null ? null : log.line(line, LINE_CHARS);
      const kind = bytes ? groupOf(plain(shownOf(bytes))) : null;
      if (kind !== null) return kind === "" ? line + 1 : line;
    }
    from = found.next;
  }
  return null;
}
