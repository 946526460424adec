// The bytes of one log, as far as they are needed: blocks of it, how many lines each has, and when lines were written.
// A log of a gigabyte costs a number per block and the blocks that were last looked at.

const KEPT_BLOCKS = 24;
const NEWLINE = 10;
const RECORD = 16;
const MARKS_MS = 4000;
const JUMP = 4; // so many blocks behind, lines are counted by the server instead of being fetched

/** Positions of line ends. */
function endsOf(bytes) {
  const found = [];
  for (let at = bytes.indexOf(NEWLINE); at >= 0; at = bytes.indexOf(NEWLINE, at + 1)) found.push(at);
  return found;
}

function joined(first, second) {
  const both = new Uint8Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}

/** The index of the last of ascending numbers that is at most `value`, -1 if none is. */
function lastAtMost(numbers, value, length = numbers.length) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export class LogBytes {
  /** `ask(path, query)` resolves to a response; `changed()` is called when a block or marks have come. */
  constructor(ask, changed) {
    this.ask = ask;
    this.changed = changed;
    this.before = [0]; // line ends before each block, and before the tail
    this.tail = { bytes: new Uint8Array(0), ends: [] }; // what is behind the last counted block, never empty where there is output
    this.blocks = new Map(); // the last used is the last
    this.pending = new Set();
    this.marks = { offsets: [], times: [], streams: [], bytes: 0 };
    this.marksDue = 0;
    this.size = 0; // of the log at the server
    this.opened = false;
    this.complete = false;
    this.more = false;
  }

  get block() {
    return this.blockSize ?? 1 << 18;
  }

  get full() {
    return this.before.length - 1; // complete blocks
  }

  /** The offset behind what is known. */
  get end() {
    return this.full * this.block + this.tail.bytes.length;
  }

  /** Lines so far; one that has no end yet counts. */
  get lines() {
    const last = this.tail.ends.at(-1) ?? -1;
    return this.before[this.full] + this.tail.ends.length + (this.tail.bytes.length > last + 1 ? 1 : 0);
  }

  /** Ask for what is new. Resolves to the response for its headers. */
  async advance() {
    if (!this.opened || this.size - this.end > JUMP * this.block) await this.count();
    const response = await this.ask("", { offset: this.end });
    const bytes = new Uint8Array(await response.arrayBuffer());
    this.size = Number(response.headers.get("X-Log-Size"));
    this.append(bytes);
    this.complete = response.headers.get("X-Log-Complete") === "true";
    this.more = bytes.length > 0 && this.end < this.size;
    const due = bytes.length > 0 && performance.now() > this.marksDue;
    if (due || (this.complete && !this.marksComplete)) await this.readMarks();
    return response;
  }

  /** Have the server count lines up to the last complete block. */
  async count() {
    for (;;) {
      const response = await this.ask("lines/", { first: this.full });
      const found = await response.json();
      this.blockSize = found.block;
      if (found.counts.length) this.tail = { bytes: new Uint8Array(0), ends: [] };
      for (const count of found.counts) this.before.push(this.before.at(-1) + count);
      this.size = found.size;
      if (!found.more) break;
    }
    this.opened = true;
  }

  append(bytes) {
    if (!bytes.length) return;
    let all = joined(this.tail.bytes, bytes);
    while (all.length > this.block) {
      const whole = { bytes: all.slice(0, this.block) };
      whole.ends = endsOf(whole.bytes);
      this.keep(this.full, whole);
      this.before.push(this.before.at(-1) + whole.ends.length);
      all = all.slice(this.block);
    }
    this.tail = { bytes: all, ends: endsOf(all) };
  }

  keep(number, block) {
    this.blocks.delete(number);
    this.blocks.set(number, block);
    if (this.blocks.size > KEPT_BLOCKS) this.blocks.delete(this.blocks.keys().next().value);
  }

  /** A block, if it is here; else it is fetched. */
  at(number) {
    if (number === this.full) return this.tail;
    const found = this.blocks.get(number);
    if (found) this.keep(number, found);
    else this.load(number);
    return found;
  }

  async load(number) {
    if (number > this.full || this.pending.has(number)) return;
    this.pending.add(number);
    try {
      const response = await this.ask("", { offset: number * this.block });
      const bytes = new Uint8Array(await response.arrayBuffer());
      this.keep(number, { bytes, ends: endsOf(bytes) });
      this.changed();
    } finally {
      this.pending.delete(number);
    }
  }

  /**
   * Line `number` from 0 as {offset, bytes, last}; null while its block is on its way. Of one longer than `most` bytes,
   * `bytes` are the first and `last` its last ones.
   */
  line(number, most) {
    let at = number ? lastAtMost(this.before, number - 1, this.full + 1) : 0;
    if (at < 0) return null;
    const block = this.at(at);
    if (!block) return null;
    const nth = number - this.before[at]; // from the block's beginning
    const start = nth ? block.ends[nth - 1] + 1 : 0;
    const end = block.ends[nth] ?? block.bytes.length;
    const offset = at * this.block + start;
    let bytes = block.bytes.subarray(start, Math.min(end, start + most));
    let open = block.ends[nth] === undefined;
    while (open && bytes.length < most && at < this.full) {
      at += 1;
      const next = this.at(at);
      if (!next) return null;
      const stop = next.ends[0] ?? next.bytes.length;
      open = next.ends[0] === undefined;
      bytes = joined(bytes, next.bytes.subarray(0, Math.min(stop, most - bytes.length)));
    }
    if (bytes.length < most) return { offset, bytes, last: null };
    const last = this.lastOf(number, most);
    return last && { offset, bytes, last };
  }

  /** The last bytes of a line that ends blocks behind its beginning; null while they are on their way. */
  lastOf(number, most) {
    const at = lastAtMost(this.before, number, this.full + 1); // the block with its end
    const block = this.at(at);
    if (!block) return null;
    const end = block.ends[number - this.before[at]] ?? block.bytes.length;
    return block.bytes.subarray(Math.max(0, end - most), end);
  }

  /** The line that has this offset, from 0; waits for its block. */
  async lineOf(offset) {
    const number = Math.min(this.full, Math.floor(offset / this.block));
    if (number < this.full && !this.blocks.has(number)) await this.load(number);
    const block = this.at(number);
    if (!block) return null;
    return this.before[number] + lastAtMost(block.ends, offset - number * this.block - 1) + 1;
  }

  async readMarks() {
    for (;;) {
      const { marks } = this;
      const response = await this.ask("marks/", { offset: marks.bytes });
      const view = new DataView(await response.arrayBuffer());
      for (let at = 0; at + RECORD <= view.byteLength; at += RECORD) {
        const value = view.getBigUint64(at + 8, true);
        marks.offsets.push(Number(view.getBigUint64(at, true)));
        marks.times.push(Number(value >> 2n));
        marks.streams.push(Number(value & 3n));
        marks.bytes += RECORD;
      }
      if (view.byteLength < 1 << 20) break;
    }
    this.marksComplete = this.complete;
    this.marksDue = performance.now() + MARKS_MS;
  }

  /** When what is at this offset was written, in ms since 1970, and its stream: {time, stream}; null if unknown. */
  markAt(offset) {
    const at = lastAtMost(this.marks.offsets, offset);
    return at < 0 ? null : { time: this.marks.times[at], stream: this.marks.streams[at] };
  }

  /** Offsets of a text, from `offset` on: {offsets, next}. */
  async search(q, offset) {
    return (await this.ask("search/", { q, offset })).json();
  }
}
