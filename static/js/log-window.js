// The rows of a log that are on the page, and their heights: with lines that wrap, each has its own.
export class LogWindow {
  /** Of a `LogView`. `rowAt(row, kept)` is the element of a row; `kept` are those that there are, by key. */
  constructor({ root, view, rows }, rowAt) {
    Object.assign(this, { root, view, rows, rowAt });
    this.forgetHeights();
  }

  /** Where lines may wrap differently, or are those of another log. */
  forgetHeights() {
    this.endFits = Infinity;
  }

  get wraps() {
    return this.root.classList.contains("log-wrap");
  }

  /** The pixels of a line that doesn't wrap. */
  get rowPx() {
    return (this.measured ??= parseFloat(getComputedStyle(this.rows).lineHeight));
  }

  /** How many such lines fit into view. */
  get fits() {
    return Math.max(1, this.view.clientHeight / this.rowPx);
  }

  /** Put these rows on the page, and no others. */
  fill(first, behind) {
    this.first = first;
    const inner = this.rows.firstElementChild ?? document.createElement("div");
    inner.className = "log-window";
    const made = [];
    const kept = new Map([...inner.children].map((row) => [row.dataset.key, row]));
    for (let row = first; row < behind; row += 1) made.push(this.rowAt(row, kept));
    const same = made.length === inner.children.length && made.every((row, at) => row === inner.children[at]);
    if (!same) inner.replaceChildren(...made);
    if (!inner.isConnected) this.rows.append(inner);
  }

  /** The pixels that a row takes. */
  heightOf(row) {
    if (!this.wraps) return this.rowPx;
    const shown = () => this.rows.firstElementChild?.children[row - this.first];
    if (!shown()) this.fill(Math.max(0, row - Math.ceil(this.fits)), row + 1);
    return shown()?.offsetHeight ?? this.rowPx;
  }

  /** From `top`, a row and a part of it, so many pixels down, or up. */
  after(top, px, count) {
    let row = Math.floor(top);
    let left = px + (top - row) * this.heightOf(row); // from the beginning of `row`
    while (left < 0 && row > 0) left += this.heightOf((row -= 1));
    while (row < count - 1 && left >= this.heightOf(row)) left -= this.heightOf(row++);
    return row + left / this.heightOf(row);
  }

  /** How many of the last of `count` rows fit; `lines` is how long the log is. */
  fitsAtEnd(count, lines) {
    if (this.wraps && this.endFits === Infinity) {
      this.fill(Math.max(0, count - Math.ceil(this.fits)), count);
      this.measureEnd(lines);
    }
    return Math.min(this.fits, this.endFits);
  }

  /** The same while these rows are on the page. They are measured once all of them have been read. */
  measureEnd(lines) {
    if (this.wraps && !this.rows.querySelector(".log-coming")) {
      this.endFits = this.countFitting();
      this.endLines = lines;
    }
    return Math.min(this.fits, this.endFits);
  }

  countFitting() {
    let room = this.view.clientHeight;
    let fitting = 0;
    for (const row of [...this.rows.firstElementChild.children].reverse()) {
      if (row.offsetHeight >= room) return fitting + room / row.offsetHeight;
      room -= row.offsetHeight;
      fitting += 1;
    }
    return Math.max(1, fitting);
  }

  /** Whether the log has grown since its end was measured. */
  isStale(lines) {
    return this.wraps && this.endLines !== lines;
  }
}
