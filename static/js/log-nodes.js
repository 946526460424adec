// The tabs of an attempt's nodes, above the log.
import { word } from "./words.js";

/** Show a tab for each node of the job's attempt, if it has several. Jobs are `attempt.node`. */
export function drawNodes(root, jobs, chosen) {
  const [attempt] = chosen.split(".");
  const mine = jobs.filter((job) => job.split(".")[0] === attempt);
  const shown = mine.length > 1 ? mine : [];
  root.hidden = !shown.length;
  const key = `${shown} ${chosen}`;
  if (root.dataset.shown === key) return;
  root.dataset.shown = key;
  root.replaceChildren(...shown.map((job) => tab(job, job === chosen)));
}

function tab(job, isChosen) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "btn btn-sm";
  button.dataset.job = job;
  button.textContent = word("logNode").replace("%s", job.split(".")[1]);
  button.setAttribute("aria-pressed", String(isChosen));
  button.classList.toggle("active", isChosen);
  return button;
}
