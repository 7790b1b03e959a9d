(() => {
  const root = document.documentElement;
  const stored = (() => { try { return localStorage.getItem("batchmark-theme"); } catch { return null; } })();
  const preferred = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const colours = () => {
    const style = getComputedStyle(root);
    return { ink: style.getPropertyValue("--ink").trim(), line: style.getPropertyValue("--line").trim(), card: style.getPropertyValue("--card").trim() };
  };
  const layout = (figure) => {
    const c = colours();
    const axis = { gridcolor: c.line, zerolinecolor: c.line, linecolor: c.line, automargin: true };
    const many = figure.data.length > 1;
    return {
      ...figure.layout,
      xaxis: { ...axis, ...figure.layout.xaxis, exponentformat: "none", ...(figure.layout.xaxis.type === "log" ? { dtick: 1, minor: { ticks: "outside", ticklen: 3, tickcolor: c.line } } : {}) },
      yaxis: { ...axis, ...figure.layout.yaxis, exponentformat: "none", ...(figure.layout.yaxis.type === "log" ? { dtick: 1 } : {}) },
      paper_bgcolor: c.card, plot_bgcolor: c.card, font: { color: c.ink, size: 12, family: "system-ui,DejaVu Sans,sans-serif" },
      margin: { l: 10, r: 12, t: 8, b: 10 }, showlegend: many, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      hoverlabel: { namelength: -1 },
    };
  };
  const options = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  const draw = (theme) => {
    root.dataset.theme = theme;
    for (const figure of FIGURES) Plotly.react(figure.id, figure.data, layout(figure), options);
  };
  draw(stored || preferred());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(preferred()));
  document.getElementById("theme").addEventListener("click", () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("batchmark-theme", next); } catch { /* a page from disk may have no storage */ }
    draw(next);
  });
})();
