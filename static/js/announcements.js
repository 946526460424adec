// Each poll says up to which event the reader has heard of their own runs; its answer tells what came since, in a
// place that screen readers speak of. The list itself is never read out.
document.addEventListener("htmx:config:request", (event) => {
  const { ctx } = event.detail;
  const announcements = document.getElementById("announcements");
  if (announcements && ctx.sourceElement.hasAttribute("data-poll")) ctx.request.headers["DW-Announced"] = announcements.dataset.event;
});
