// The run file's text field: line numbers, the offending line marked, examples put in, Tab made useful.
function mark(box) {
  const { editor, gutter } = parts(box);
  const wrong = new Set(
    [...document.querySelectorAll("[data-error-line]")].map((element) => Number(element.dataset.errorLine)),
  );
  const count = editor.value.split("\n").length;
  gutter.replaceChildren(
    ...Array.from({ length: count }, (_, index) => {
      const line = document.createElement("div");
      line.textContent = String(index + 1);
      line.classList.toggle("bad", wrong.has(index + 1));
      return line;
    }),
  );
  gutter.scrollTop = editor.scrollTop;
}

function parts(box) {
  return { editor: box.querySelector("textarea"), gutter: box.querySelector("[data-gutter]") };
}

function goTo(editor, number) {
  const lines = editor.value.split("\n");
  const start = lines.slice(0, number - 1).reduce((sum, line) => sum + line.length + 1, 0);
  editor.focus();
  editor.setSelectionRange(start, start + (lines[number - 1] ?? "").length);
}

function setUp(box) {
  const { editor, gutter } = parts(box);
  editor.addEventListener("input", () => mark(box));
  editor.addEventListener("scroll", () => (gutter.scrollTop = editor.scrollTop));
  editor.addEventListener("keydown", (event) => {
    // Tab must still leave the field: Escape first, then Tab, as in other code fields.
    if (event.key === "Escape") box.dataset.leave = "yes";
    else if (event.key === "Tab" && !event.shiftKey && !box.dataset.leave) {
      event.preventDefault();
      editor.setRangeText("  ", editor.selectionStart, editor.selectionEnd, "end");
      editor.dispatchEvent(new Event("input", { bubbles: true }));
    } else if (event.key !== "Shift") delete box.dataset.leave;
  });
  editor.addEventListener("focus", () => delete box.dataset.leave);
  document.addEventListener("htmx:after:swap", () => {
    mark(box);
    // What a submission asks before it is carried out; only once, so that a later plan takes no focus.
    const asked = document.querySelector("[data-asked]");
    asked?.removeAttribute("data-asked");
    asked?.focus();
  });
  document.addEventListener("click", (event) => {
    const error = event.target.closest("[data-error-line]");
    if (error) goTo(editor, Number(error.dataset.errorLine));
    const example = event.target.closest("[data-example]");
    if (example) {
      editor.value = document.getElementById(example.dataset.example).value;
      editor.dispatchEvent(new Event("input", { bubbles: true }));
      goTo(editor, 1);
    }
  });
  mark(box);
}

document.querySelectorAll("[data-editor]").forEach(setUp);
