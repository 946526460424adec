// Undo for a few seconds: a button in the notice, or Ctrl+Z outside of inputs.
import { word } from "./words.js";

const offers = []; // buttons, the newest last

/** Put the button into a notice. `undo` is {url, move, seconds}, as the server sent it; `dismiss` takes the notice away. */
export function offer(box, undo, dismiss) {
  const button = document.createElement("button");
  const left = document.createElement("span");
  let seconds = undo.seconds;
  button.type = "button";
  button.className = "btn btn-sm dw-undo";
  button.textContent = word("undo");
  left.setAttribute("aria-hidden", "true"); // or screen readers read it every second
  left.className = "num";
  left.textContent = seconds;
  button.append(left);
  box.append(button);
  offers.push(button);
  const counting = setInterval(() => {
    seconds -= 1;
    left.textContent = seconds;
    if (seconds <= 0 || !box.isConnected) end();
  }, 1000);
  const end = () => {
    clearInterval(counting);
    offers.splice(offers.indexOf(button), 1);
    dismiss();
  };
  button.addEventListener("click", () => {
    end();
    const list = document.getElementById("queue-actions");
    const how = list ? { source: list, target: "#queue" } : { source: document.getElementById("toasts"), swap: "none" };
    window.htmx.ajax("POST", undo.url, { ...how, values: { move: undo.move } });
  });
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches?.("input:not([type=checkbox]), textarea, select, [contenteditable]");
  if (event.key !== "z" || !(event.ctrlKey || event.metaKey) || event.shiftKey || typing || !offers.length) return;
  event.preventDefault();
  offers.at(-1).click();
});
