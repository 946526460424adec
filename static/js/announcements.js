// Each poll sends the newest event announced so far; the answer has later ones, in a live region for screen readers.
// The list itself is never read out.
document.addEventListener("htmx:config:request", (event) => {
  const { ctx } = event.detail;
  const announcements = document.getElementById("announcements");
  if (announcements && ctx.sourceElement.hasAttribute("data-poll")) ctx.request.headers["DW-Announced"] = announcements.dataset.event;
});
