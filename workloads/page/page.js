(() => {
  const root = document.documentElement;
  const stored = (() => { try { return localStorage.getItem("batchmark-theme"); } catch { return null; } })();
  const preferred = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const colours = () => {
    const style = getComputedStyle(root);
    return { ink: style.getPropertyValue("--ink").trim(), line: style.getPropertyValue("--line").trim(), card: style.getPropertyValue("--card").trim() };
  };
  // The same hues, lighter on a dark ground, where the deep ones would sink.
  const LIGHTER = { "#0072B2": "#5db3e8", "#D55E00": "#ff8a3d", "#009E73": "#35c99b", "#CC79A7": "#e39cc4", "#8A6FDF": "#ab97f0", "#A6611A": "#c98542", "#E7298A": "#f56fb3", "#4D4DFF": "#8c8cff", "#7A4B00": "#b07a2a", "#5A6472": "#7f8b9c" };
  const shade = (colour) => {
    if (root.dataset.theme !== "dark" || !/^#[0-9a-f]{6}$/i.test(colour || "")) return colour;
    return LIGHTER[colour.toUpperCase()] || lifted(colour);
  };
  // What is darker than a middle grey moves a third of the way to white.
  const lifted = (colour) => {
    const parts = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    const light = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    return light > 125 ? colour : `#${parts.map((v) => Math.round(v + (255 - v) * 0.36).toString(16).padStart(2, "0")).join("")}`;
  };
  // A share of a colour on the ground of a card: where a heat map begins.
  const mixed = (colour, share) => {
    const [a, b] = [colour, colours().card].map((c) => c.length === 4 ? c.replace(/[0-9a-f]/gi, "$&$&") : c).map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
    return `rgb(${a.map((v, i) => Math.round(share * v + (1 - share) * b[i])).join(",")})`;
  };
  const shaded = (trace) => ({
    ...trace,
    ...(trace.line ? { line: { ...trace.line, color: shade(trace.line.color) } } : {}),
    ...(trace.marker ? { marker: { ...trace.marker, color: shade(trace.marker.color) } } : {}),
    ...(trace.fillcolor ? { fillcolor: shade(trace.fillcolor) } : {}),
    ...(trace.type === "heatmap" ? { colorscale: [[0, mixed(shade(trace.ramp), 0.15)], [1, shade(trace.ramp)]] } : {}),
  });
  // A logarithmic axis of few decades needs its 2 and 5 labelled, in full, or its 3 where there is no room for
  // both; one of many only its powers of ten. Within one decade Plotly's own ticks are evenly spaced.
  const decades = (figure, key) => {
    const values = figure.data.flatMap((trace) => trace[key]).filter((v) => v > 0);
    return values.length ? Math.log10(Math.max(...values) / Math.min(...values)) : 0;
  };
  const POWERS = Array.from({ length: 16 }, (_, i) => i - 6);
  const LABEL = 40; // pixels that a label of the x axis needs
  const logTicks = (figure, key, line) => {
    const span = decades(figure, key) || 2, beside = figure.layout.yaxis.type === "category" ? 140 : 60;
    if (span < 0.8) return { tickformat: "~g" };
    const room = key === "y" ? Infinity : (document.getElementById(figure.id).clientWidth - beside) / LABEL;
    const steps = [[1, 2, 5], [1, 3]].find((some) => span < 2.5 && span * some.length < room) || [1];
    return {
      tickvals: POWERS.flatMap((p) => steps.map((m) => Number(`${m}e${p}`))),
      tickformat: "~g", minor: { dtick: "D1", ticks: "outside", ticklen: 3, tickcolor: line },
    };
  };
  const layout = (figure) => {
    const c = colours();
    const axis = { gridcolor: c.line, zerolinecolor: c.line, linecolor: c.line, automargin: true };
    const many = figure.data.length > 1;
    return {
      ...figure.layout,
      xaxis: { ...axis, ...figure.layout.xaxis, exponentformat: "none", tickangle: 0, ...(figure.layout.xaxis.type === "log" ? logTicks(figure, "x", c.line) : {}) },
      yaxis: { ...axis, ...figure.layout.yaxis, exponentformat: "none", ...(figure.layout.yaxis.type === "log" ? logTicks(figure, "y", c.line) : {}) },
      paper_bgcolor: c.card, plot_bgcolor: c.card, font: { color: c.ink, size: 12, family: "system-ui,DejaVu Sans,sans-serif" },
      margin: { l: 10, r: 12, t: 8, b: 10 }, showlegend: figure.layout.showlegend ?? many, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      hoverlabel: { namelength: -1 },
    };
  };
  const options = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  // A figure in a part of the page that is not open is drawn when it is opened.
  const drawOpen = () => {
    for (const figure of FIGURES) {
      const plot = document.getElementById(figure.id);
      if (plot.offsetParent === null || plot.dataset.theme === root.dataset.theme) continue;
      Plotly.react(plot, figure.data.map(shaded), layout(figure), options);
      plot.dataset.theme = root.dataset.theme;
    }
    document.dispatchEvent(new Event("page:drawn"));
  };
  const draw = (theme) => {
    root.dataset.theme = theme;
    for (const dot of document.querySelectorAll(".dot")) dot.style.background = shade(dot.dataset.colour);
    for (const mark of document.querySelectorAll("[data-stroke]")) mark.setAttribute("stroke", shade(mark.dataset.stroke));
    drawOpen();
  };
  window.page = { draw: drawOpen, shade, colours, options };
  draw(stored || preferred());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(preferred()));
  document.getElementById("theme").addEventListener("click", () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("batchmark-theme", next); } catch { /* a page from disk may have no storage */ }
    draw(next);
  });
})();
