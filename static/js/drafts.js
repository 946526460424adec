// What was typed into a form when the session ended is there again once the same person has signed in: it waits in the
// tab's own storage, without passwords, secrets, files and hidden fields. Priorities are left out too: one that is
// typed and not sent would look like the run's.
import { toast } from "./toasts.js";
import { word } from "./words.js";

const FORMS = "form[method=post]:not([data-priority])";
const UNKEPT = "[type=password], [type=hidden], [type=file], [type=submit], [type=button], [data-no-draft]";
const SIGNED_OUT = "signed-out"; // this tab has shown a page for people who are not signed in

const who = document.querySelector("[data-user]")?.dataset.user;
const place = `draft:${who}:${location.pathname}`;

/** The fields of forms that change something, by names that the same page has later, too. */
function* fields() {
  const seen = {};
  for (const form of document.querySelectorAll(FORMS))
    for (const field of form.querySelectorAll("input, select, textarea")) {
      if (!field.name || field.matches(UNKEPT)) continue;
      const name = `${form.getAttribute("action")} ${field.name}`;
      seen[name] = (seen[name] ?? 0) + 1;
      yield [`${name} ${seen[name]}`, field];
    }
}

/** What a field holds in place of what the server sent; undefined if it is the same. */
function typed(field) {
  if (field.options) {
    const chosen = [...field.options].map((option) => option.selected);
    const given = [...field.options].map((option) => option.defaultSelected);
    if (!field.multiple && !given.includes(true)) given[0] = true;
    return chosen.some((on, at) => on !== given[at]) ? chosen : undefined;
  }
  if (["checkbox", "radio"].includes(field.type)) return field.checked === field.defaultChecked ? undefined : field.checked;
  return field.value === field.defaultValue ? undefined : field.value;
}

function write(field, value) {
  if (field.options) value.forEach((on, at) => field.options[at] && (field.options[at].selected = on));
  else if (typeof value === "boolean") field.checked = value;
  else field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true })); // and no change, at which some forms are sent
}

function restore() {
  const kept = new Map(JSON.parse(sessionStorage.getItem(place) ?? "[]"));
  const wanted = sessionStorage.getItem(SIGNED_OUT) ? [...fields()].filter(([name]) => kept.has(name)) : [];
  sessionStorage.removeItem(place);
  sessionStorage.removeItem(SIGNED_OUT);
  for (const [name, field] of wanted) write(field, kept.get(name));
  if (wanted.length) toast(word("restored"));
}

if (who) {
  addEventListener("load", () => setTimeout(restore)); // behind the start of htmx, which is a timeout as well
  addEventListener("pagehide", () => {
    const found = [...fields()].map(([name, field]) => [name, typed(field)]).filter(([, value]) => value !== undefined);
    if (found.length) sessionStorage.setItem(place, JSON.stringify(found));
  });
} else sessionStorage.setItem(SIGNED_OUT, "yes");
