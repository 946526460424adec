// Names for what Django's and select2's scripts add to the forms of the admin site, for screen readers, and for the
// cells of lists, which stand below each other on a phone. The long sidebar shows the current page's entry.
"use strict";

addEventListener("DOMContentLoaded", () => {
  document.querySelector(".dw-admin-nav [aria-current]")?.scrollIntoView({ block: "nearest" });
  const heads = [...document.querySelectorAll("#result_list thead th")].map((head) => head.textContent.trim());
  for (const row of document.querySelectorAll("#result_list tbody tr"))
    [...row.cells].forEach((cell, at) => {
      if (cell.textContent.trim() !== "–" && !cell.querySelector(".action-select, .dw-no")) cell.dataset.label = heads[at];
    });
  const name = () => {
    for (const box of document.querySelectorAll(".select2-selection[aria-labelledby]")) {
      const label = box.closest(".select2")?.previousElementSibling?.labels?.[0];
      const text = label && (label.querySelector(".visually-hidden") ?? label).textContent.trim();
      const value = box.querySelector("[role=textbox]");
      if (!text || !value) continue;
      box.removeAttribute("aria-labelledby"); // of the value, which may be empty
      for (const one of [box, value]) one.setAttribute("aria-label", text);
      box.setAttribute("aria-describedby", value.id);
    }
    for (const icon of document.querySelectorAll(".search-label-icon:not([role])")) icon.setAttribute("role", "img");
  };
  name();
  new MutationObserver(name).observe(document.getElementById("main"), { childList: true, subtree: true }); // they come later
});
