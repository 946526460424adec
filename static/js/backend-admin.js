// The form of a backend: only the fields that matter to how one signs in, and the test of the connection in the page.
"use strict";

addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("backend_form");
  const button = document.getElementById("dwb-test-button");
  if (!form || !button) return;
  const result = document.getElementById("dwb-test-result");

  const fields = { access_key_id: ["access_key_id", "secret_access_key"], profile: ["profile"] };
  const show = () => {
    const chosen = form.querySelector("[name=sign_in]:checked")?.value;
    for (const [way, names] of Object.entries(fields)) {
      for (const name of names) form.querySelector(`.form-row.field-${name}`)?.classList.toggle("hidden", way !== chosen);
    }
  };
  form.addEventListener("change", (event) => event.target.name === "sign_in" && show());
  show();

  // An error in a folded part would hide.
  result.addEventListener("click", (event) => {
    const target = document.getElementById(event.target.closest("a[href^='#']")?.hash.slice(1));
    const folded = target?.closest("details");
    if (folded) folded.open = true;
  });

  button.addEventListener("click", async (event) => {
    event.preventDefault();
    if (button.getAttribute("aria-disabled") === "true") return;
    button.setAttribute("aria-disabled", "true");
    result.className = "dwb-busy";
    result.textContent = button.dataset.busy;
    try {
      const answer = await fetch(button.formAction, {
        method: "POST",
        body: new FormData(form),
        headers: { "X-Requested-With": "fetch" },
        redirect: "error",
      });
      if (!answer.ok && answer.status !== 422) throw new Error(String(answer.status));
      result.innerHTML = await answer.text();
      result.className = "";
    } catch {
      result.textContent = button.dataset.failed;
      result.className = "dwb-sum dwb-failed";
    }
    button.removeAttribute("aria-disabled");
  });
});
