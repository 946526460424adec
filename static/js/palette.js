// The command palette: pages by name, runs by name, and what can be done to a run: `stop NAME`, `priority NAME 80`.
// keys.js loads it when it is first opened, so that pages load fast; it gets from there what it needs of other modules.
const ASK_MS = 120;
const SHOWN = 8;

/** Make the dialog work. Resolves to the function that opens it. */
export function start(dialog, { confirmed }) {
  const { runs, find, submit, priorityHint } = dialog.dataset;
  const input = dialog.querySelector("input");
  const list = dialog.querySelector("[role=listbox]");
  const verbs = [...dialog.querySelector("template").content.querySelectorAll("[data-verb]")].map((one) => ({
    key: one.dataset.verb,
    word: one.textContent,
    about: one.title,
  }));
  let choices = []; // {text, about, run(): what choosing it does}
  let at = 0;
  let asking = null;
  let timer = null;

  const links = () =>
    [...document.querySelectorAll(".dw-side a[href]:not(.dw-brand)")].map((link) => ({
      text: (link.querySelector(".nav-link-title") ?? link).textContent.trim(),
      about: link.closest(".dw-project") ? dialog.dataset.project : "",
      run: () => location.assign(link.href),
    }));

  /** The verb that the text begins with, and the rest; a number at its end is apart. */
  function parsed(text) {
    const verb = verbs.find((one) => text.toLowerCase().startsWith(`${one.word.toLowerCase()} `));
    const rest = verb ? text.slice(verb.word.length + 1).trim() : text.trim();
    const numbered = verb?.key === "priority" && /^(.*\S)\s+(\d{1,3})$/.exec(rest);
    return { verb, name: numbered ? numbered[1] : rest, number: numbered ? Number(numbered[2]) : null };
  }

  function write(text) {
    input.value = text;
    input.focus();
    change();
  }

  function post(path, values = {}) {
    return window.htmx.ajax("POST", runs + path, { source: document.getElementById("toasts"), swap: "none", values });
  }

  async function act(verb, run, number) {
    const page = `${runs}${run.id}/`;
    if (!verb) return location.assign(page);
    if (verb.key === "why") return location.assign(`${page}why/`);
    if (verb.key === "again") return location.assign(`${submit}?from=${run.id}`);
    if (verb.key === "priority") return number === null ? write(`${verb.word} ${run.name} `) : post(`${run.id}/priority/`, { priority: number });
    dialog.close();
    if (await confirmed(run.question, run.yes)) await post(`${run.id}/stop/`);
  }

  async function ask({ verb, name, number }) {
    asking?.abort();
    asking = new AbortController();
    const query = new URLSearchParams({ q: name, verb: verb?.key ?? "" });
    try {
      const response = await fetch(`${find}?${query}`, { signal: asking.signal });
      const found = (await response.json()).runs;
      return found.map((run) => ({
        text: number === null ? run.name : `${run.name} → ${number}`,
        about: verb?.key === "priority" && number === null ? priorityHint.replace("%s", run.priority) : run.about,
        stays: verb?.key === "priority" && number === null,
        run: () => act(verb, run, number),
      }));
    } catch {
      return [];
    }
  }

  function draw() {
    at = Math.min(at, Math.max(0, choices.length - 1));
    list.replaceChildren(
      ...choices.map((choice, index) => {
        const row = document.createElement("div");
        const about = document.createElement("small");
        row.id = `palette-${index}`;
        row.setAttribute("role", "option");
        row.setAttribute("aria-selected", String(index === at));
        about.textContent = choice.about;
        row.append(choice.text, about);
        return row;
      }),
    );
    if (choices.length) input.setAttribute("aria-activedescendant", `palette-${at}`);
    else input.removeAttribute("aria-activedescendant");
    list.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
    dialog.querySelector("[data-none]").hidden = choices.length > 0;
  }

  function change() {
    clearTimeout(timer);
    const wish = parsed(input.value);
    const text = wish.name.toLowerCase();
    const starts = verbs.filter((one) => !wish.verb && one.word.toLowerCase().startsWith(text));
    const here = wish.verb ? [] : links().filter((one) => one.text.toLowerCase().includes(text));
    at = 0;
    choices = [
      ...here.slice(0, text ? SHOWN : undefined),
      ...starts.map((one) => ({ text: one.word, about: one.about, stays: true, run: () => write(`${one.word} `) })),
    ];
    if (!text && !wish.verb) return draw();
    const before = choices;
    timer = setTimeout(async () => {
      const found = await ask(wish);
      if (asking.signal.aborted) return;
      choices = [...before, ...found];
      draw();
    }, ASK_MS);
    if (before.length) draw();
  }

  function choose(index) {
    const choice = choices[index];
    if (!choice) return;
    if (!choice.stays) dialog.close();
    choice.run();
  }

  input.addEventListener("input", change);
  input.addEventListener("keydown", (event) => {
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 + choices.length }[event.key];
    if (to !== undefined && choices.length) {
      at = to % choices.length;
      draw();
    } else if (event.key === "Enter") choose(at);
    else return;
    event.preventDefault();
  });
  list.addEventListener("click", (event) => choose([...list.children].indexOf(event.target.closest("[role=option]"))));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());

  return () => {
    dialog.showModal();
    write("");
  };
}
