// Loaded blocking in <head>, so that the first paint already has the chosen colours.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const read = () => {
    try {
      return localStorage.getItem("dstackweb-theme") || "auto";
    } catch {
      return "auto"; // storage may be switched off
    }
  };
  const apply = () => {
    const wish = read();
    const theme = wish === "auto" ? (dark.matches ? "dark" : "light") : wish;
    document.documentElement.setAttribute("data-bs-theme", theme);
  };
  dark.addEventListener("change", apply);
  window.addEventListener("storage", apply);
  window.dstackwebTheme = {
    read,
    set(wish) {
      try {
        localStorage.setItem("dstackweb-theme", wish);
      } catch {
        // stays for this page only
      }
      apply();
    },
  };
  apply();
})();
