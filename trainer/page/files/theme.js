// Runs before the first paint, so that a page in the dark never flashes white.
(() => {
  const key = "page-theme";
  const wished = () => {
    try { return localStorage.getItem(key); } catch { return null; } // storage may be refused
  };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const current = () => wished() ?? (system.matches ? "dark" : "light");
  const apply = () => {
    document.documentElement.dataset.theme = current();
    dispatchEvent(new Event("themechange"));
  };
  globalThis.theme = {
    current,
    toggle() {
      const next = current() === "dark" ? "light" : "dark";
      try { localStorage.setItem(key, next); } catch { /* lasts until the page is left */ }
      document.documentElement.dataset.theme = next;
      dispatchEvent(new Event("themechange"));
    },
  };
  system.addEventListener("change", apply);
  apply();
})();
