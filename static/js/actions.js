// Actions on a page: confirmations, priority steps, and errors of htmx requests as notices.
import { forceRefresh } from "./polling.js";
import { toast } from "./toasts.js";
import { word } from "./words.js";

const dialog = document.getElementById("confirm");

/** Ask in the page's own dialog; resolves to whether the reader went ahead. Escape means no. */
export function confirmed(question, yes) {
  dialog.querySelector("#confirm-text").textContent = question;
  const button = dialog.querySelector("[data-confirm-yes]");
  button.dataset.words ??= button.textContent;
  button.textContent = yes || button.dataset.words;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

document.addEventListener("htmx:confirm", async (event) => {
  event.preventDefault();
  const { ctx, issueRequest, dropRequest } = event.detail;
  const yes = ctx.sourceElement.dataset.confirmYes;
  ((await confirmed(ctx.confirm, yes)) ? issueRequest : dropRequest)();
});

// A plain form asks too: <form data-confirm="…">.
document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!form.dataset?.confirm || form.dataset.confirmed) return;
  event.preventDefault();
  if (await confirmed(form.dataset.confirm, form.dataset.confirmYes)) {
    form.dataset.confirmed = "yes";
    form.requestSubmit(event.submitter);
  }
});

// − and + of a priority change the number; the form sends it a moment after the last press.
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-step]");
  if (!button) return;
  const input = button.form.elements.priority;
  const wanted = Number(input.value || 0) + Number(button.dataset.step);
  input.value = String(Math.min(Number(input.max), Math.max(Number(input.min), wanted)));
  hold(button.form);
  input.dispatchEvent(new Event("change", { bubbles: true }));
});

// While a number is being edited no poll may change it or its etag underneath: the server must see
// what the reader saw, so that it can refuse a stale write.
const hold = (form) => form.setAttribute("hx-morph-skip", "");
function release(form) {
  if (!form.hasAttribute("hx-morph-skip")) return;
  form.removeAttribute("hx-morph-skip");
  forceRefresh(form); // polls in between skipped it
}

// htmx keeps the value of the focused input: a number that is not being edited takes the new value.
document.addEventListener("htmx:after:swap", () => {
  const input = document.activeElement;
  if (input?.matches(".prio input") && !input.closest("[hx-morph-skip]")) input.value = input.defaultValue;
});

document.addEventListener("input", (event) => {
  const form = event.target.closest?.("form[data-priority]");
  if (form) hold(form);
});
document.addEventListener("focusout", (event) => {
  const form = event.target.closest?.("form[data-priority]");
  if (form && event.target.value === event.target.defaultValue) release(form);
});
// An invalid number is never sent, and is reset to the current priority.
document.addEventListener(
  "change",
  (event) => {
    const form = event.target.closest?.("form[data-priority]");
    if (!form || event.target.validity.valid) return;
    event.stopPropagation();
    toast(event.target.validationMessage, "error");
    form.reset();
    release(form);
  },
  true,
);
document.addEventListener("htmx:before:swap", (event) => {
  const source = event.detail.ctx.sourceElement;
  if (source.matches("form[data-priority]")) release(source);
});
document.addEventListener("htmx:finally:request", (event) => {
  const { ctx } = event.detail;
  if (ctx.sourceElement.matches("form[data-priority]") && (ctx.response?.status ?? 599) >= 400) {
    release(ctx.sourceElement);
    ctx.sourceElement.reset();
  }
});

// The server words its own refusals (HX-Trigger: toast); only what never reached it is worded here.
document.addEventListener("htmx:error", (event) => {
  const source = event.detail.ctx?.sourceElement;
  if (source && !source.hasAttribute("data-poll")) toast(`${word("failed")}: ${word("lost")}`, "error");
});
document.addEventListener("htmx:response:error", (event) => {
  const { ctx } = event.detail;
  const shownInPlace = ctx.sourceElement.hasAttribute(`hx-status:${ctx.response.status}`);
  if (!ctx.sourceElement.hasAttribute("data-poll") && !ctx.hx.trigger && !shownInPlace) {
    toast(`${word("failed")} (${ctx.response.status}). ${word("reload")}`, "error");
  }
});

// A plan needs the text only: what is attached travels once, when the run is submitted.
document.addEventListener("htmx:config:request", (event) => {
  const { ctx } = event.detail;
  const omit = (ctx.request.submitter ?? ctx.sourceElement).dataset?.omit;
  if (omit) ctx.request.body.delete(omit);
});
