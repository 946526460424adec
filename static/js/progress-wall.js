// The screen for the wall: what doesn't fit is counted, the screen stays on, and it goes on by itself after anything.
const numbers = new Intl.NumberFormat(document.documentElement.lang || undefined);
const AWAKE_MS = 4000;
const ANEW_MS = 6 * 3600 * 1000;

function fit() {
  const rows = document.querySelector("[data-wall-rows]");
  if (!rows) return;
  const more = document.querySelector("[data-wall-more]");
  for (const row of rows.rows) row.hidden = false;
  more.hidden = false;
  more.textContent = more.dataset.wallMore; // it takes up room, too
  const bottom = innerHeight - more.offsetHeight - 8;
  const beyond = [...rows.rows].filter((row) => row.getBoundingClientRect().bottom > bottom);
  for (const row of beyond) row.hidden = true;
  const count = beyond.length + Number(rows.dataset.beyond);
  more.hidden = count === 0;
  more.textContent = more.dataset.wallMore.replace("%s", numbers.format(count));
}

async function stayOn() {
  if (document.hidden || !navigator.wakeLock) return;
  try {
    await navigator.wakeLock.request("screen");
  } catch {
    // the machine saves power, or the page is not served securely: the screen's own settings count
  }
}

/** After the server was away it may be another release; and the session lasts as long as the page is opened at times. */
function openAnew() {
  const live = document.querySelector("[data-live]");
  const opened = Date.now();
  let lost = false;
  new MutationObserver(() => {
    const { state } = live.dataset;
    if (state === "lost") lost = true;
    if (state === "live" && (lost || Date.now() - opened > ANEW_MS)) location.reload();
  }).observe(live, { attributes: true, childList: true, subtree: true });
}

let asleep = 0;

/** Pointer and buttons are there while somebody is. */
function awake() {
  document.body.classList.add("awake");
  clearTimeout(asleep);
  asleep = setTimeout(() => document.body.classList.remove("awake"), AWAKE_MS);
}

for (const kind of ["pointermove", "pointerdown", "keydown", "focusin"]) document.addEventListener(kind, awake);
document.querySelector("[data-full-screen]").addEventListener("click", () => {
  if (document.fullscreenElement) document.exitFullscreen();
  else document.documentElement.requestFullscreen();
});
document.addEventListener("visibilitychange", stayOn);
document.addEventListener("htmx:after:swap", fit);
addEventListener("resize", fit);
stayOn();
openAnew();
fit();
