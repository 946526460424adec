// Wall screen: counts rows that do not fit, keeps the screen on, and reloads after interruptions.
const numbers = new Intl.NumberFormat(document.documentElement.lang || undefined);
const AWAKE_MS = 4000;
const RELOAD_MS = 6 * 3600 * 1000;

function fit() {
  const rows = document.querySelector("[data-wall-rows]");
  if (!rows) return;
  const more = document.querySelector("[data-wall-more]");
  for (const row of rows.rows) row.hidden = false;
  more.hidden = false;
  more.textContent = more.dataset.wallMore; // its height counts, too
  const bottom = innerHeight - more.offsetHeight - 8;
  const beyond = [...rows.rows].filter((row) => row.getBoundingClientRect().bottom > bottom);
  for (const row of beyond) row.hidden = true;
  const count = beyond.length + Number(rows.dataset.beyond);
  more.hidden = count === 0;
  more.textContent = more.dataset.wallMore.replace("%s", numbers.format(count));
}

async function keepScreenOn() {
  if (document.hidden || !navigator.wakeLock) return;
  try {
    await navigator.wakeLock.request("screen");
  } catch {
    // power saving, or not a secure context
  }
}

/** Reload after the server was unreachable, which may be upgraded, and regularly, which keeps the session alive. */
function reloadWhenNeeded() {
  const live = document.querySelector("[data-live]");
  const opened = Date.now();
  let lost = false;
  new MutationObserver(() => {
    const { state } = live.dataset;
    if (state === "lost") lost = true;
    if (state === "live" && (lost || Date.now() - opened > RELOAD_MS)) location.reload();
  }).observe(live, { attributes: true, childList: true, subtree: true });
}

let asleep = 0;

/** Show pointer and buttons for a while after each action. */
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
document.addEventListener("visibilitychange", keepScreenOn);
document.addEventListener("htmx:after:swap", fit);
addEventListener("resize", fit);
keepScreenOn();
reloadWhenNeeded();
fit();
