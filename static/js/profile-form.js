// The form of a profile: what is wrong shows while one types, beside its field, and the preview in the page.
"use strict";

addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("profile_form");
  const button = document.getElementById("preview-button");
  const result = document.getElementById("preview-result");
  if (!form || !button) return;
  let asked = 0;
  let timer = null;

  async function ask(live) {
    const number = ++asked;
    const address = button.formAction + (live ? `${button.formAction.includes("?") ? "&" : "?"}live=1` : "");
    try {
      const answer = await fetch(address, { method: "POST", body: new FormData(form), redirect: "error" });
      if (!answer.ok && answer.status !== 422) throw new Error(String(answer.status));
      const text = await answer.text();
      if (number !== asked) return; // something was typed meanwhile
      result.innerHTML = text; // of this server, which escapes what people wrote
      mark();
    } catch {
      if (number === asked) result.textContent = live ? "" : button.dataset.failed;
    }
  }

  /** The errors of fields stand below them; a folded part with one opens. */
  function mark() {
    for (const old of form.querySelectorAll("[data-live-error]")) old.remove();
    for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
    for (const wrong of result.querySelectorAll("[data-wrong]")) {
      const field = wrong.dataset.wrong && document.getElementById(wrong.dataset.wrong);
      if (!field) continue;
      const text = document.createElement("div");
      text.className = "errorlist";
      text.dataset.liveError = "";
      text.textContent = wrong.querySelector("span").textContent;
      field.setAttribute("aria-invalid", "true");
      field.closest(".flex-container")?.after(text);
      const folded = field.closest("details");
      if (folded) folded.open = true;
    }
  }

  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => ask(true), 400);
  });
  button.addEventListener("click", async (event) => {
    event.preventDefault();
    if (button.getAttribute("aria-disabled") === "true") return;
    clearTimeout(timer);
    button.setAttribute("aria-disabled", "true");
    result.textContent = button.dataset.busy;
    await ask(false);
    button.removeAttribute("aria-disabled");
  });
});
