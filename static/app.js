// Plain ES modules, served as one script (lib/bundles.py). Each finds its elements by data attributes and works alone.
import "./js/menus.js";
import "./js/times.js";
import "./js/polling.js";
import "./js/actions.js";
import "./js/log.js";
import "./js/editor.js";
import "./js/selection.js";
import "./js/reorder.js";
import "./js/move-menu.js";
import "./js/priorities.js";
import "./js/announcements.js";
import "./js/costs.js";
import "./js/keys.js";
import "./js/drafts.js";

// What only some pages need: each names it in <meta name="script" content="…">. It runs once all is loaded.
const pages = {
  charts: () => import("./js/charts.js"),
  freshness: () => import("./js/freshness.js"),
  "gpu-charts": () => import("./js/gpu-charts.js"),
  progress: () => import("./js/progress.js"),
  "progress-wall": () => import("./js/progress-wall.js"),
};
addEventListener("DOMContentLoaded", () => {
  const passkey = document.querySelector("[data-passkey]");
  if (passkey) import(passkey.dataset.script); // a file of its own: few pages have such a form
  for (const { content } of document.querySelectorAll('meta[name="script"]')) pages[content]();
});
