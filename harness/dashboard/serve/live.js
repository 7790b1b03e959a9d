(() => {
  const live = document.getElementById("live");
  const short = (value) => value == null ? "–" : Math.abs(value) >= 100 ? Math.round(value).toString() : Number(value.toPrecision(3)).toString();
  const events = new EventSource(`/live/${live.dataset.id}`);
  events.onmessage = (event) => {
    const figures = JSON.parse(event.data);
    for (const place of live.querySelectorAll("[data-key]")) place.textContent = short(figures[place.dataset.key]);
    const bar = document.getElementById("bar");
    if (figures.scheduled) { bar.max = figures.scheduled; bar.value = figures.done; }
    const ends = Object.entries(figures.outcomes).map(([name, count]) => `${count} ${name.replace("_", " ")}`);
    document.getElementById("line").textContent = `${figures.done} of ${figures.scheduled ?? "?"} requests` + (ends.length ? `: ${ends.join(", ")}` : "");
  };
  events.addEventListener("done", (event) => {
    events.close();
    const { state, note } = JSON.parse(event.data);
    const mark = document.getElementById("state");
    mark.textContent = state; mark.className = `state s-${state}`;
    if (state === "broken") { document.getElementById("line").textContent = note || "it ended without a summary"; return; }
    const report = document.createElement("iframe");
    report.src = `/report/${live.dataset.id}`;
    report.title = "report of the run";
    live.replaceWith(report);
    report.focus();
  });
})();
