// Ties the parts together: what a click on a marker does, and what is drawn again in another theme.
(() => {
  const clickable = (figure) => {
    const plot = document.getElementById(figure.id);
    if (plot.dataset.clickable || !plot.on || !figure.data.some((trace) => trace.customdata && trace.meta)) return;
    plot.dataset.clickable = "yes";
    plot.on("plotly_click", (event) => {
      const point = event.points.find((one) => one.data.meta && typeof one.customdata === "string");
      const run = point && Columns.runs.find((one) => one.name === point.data.meta.run);
      if (run) Life.open(run, point.customdata);
    });
  };
  document.addEventListener("page:drawn", () => { FIGURES.forEach(clickable); Seats.draw(); Life.recolour(); });
  Tabs.follow();
  Table.draw();
  document.body.dataset.ready = "yes";
})();
