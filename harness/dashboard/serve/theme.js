(() => {
  const root = document.documentElement;
  const stored = () => { try { return localStorage.getItem("batchmark-theme"); } catch { return null; } };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = () => { root.dataset.theme = stored() || (dark.matches ? "dark" : "light"); };
  show();
  dark.addEventListener("change", show);
  addEventListener("DOMContentLoaded", () => document.getElementById("theme").addEventListener("click", () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("batchmark-theme", next); } catch { /* no storage: for this page alone */ }
    root.dataset.theme = next;
  }));
})();
