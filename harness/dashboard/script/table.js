// Raw tables: search, sort, pages, and all rows that were found as CSV. A row of a request opens its life.
const Table = (() => {
  const { runs, get, number, element, TICK_MS } = Columns;
  const kind = document.getElementById("table-kind"), which = document.getElementById("table-run"), search = document.getElementById("table-search");
  const table = document.getElementById("table"), note = document.getElementById("table-note"), place = document.getElementById("table-page");
  const PAGE = 50;
  let page = 0, sorted = null, falling = false, found = [];

  const request = (run) => {
    const r = run.requests, ms = (column) => (row) => { const value = get(r, column, row); return value === null ? null : Math.round(value * TICK_MS * 100) / 100; };
    const columns = [["id", (row) => r.id[row]], ["class", (row) => get(r, "class", row)], ["tenant", (row) => get(r, "tenant", row)], ["outcome", (row) => get(r, "outcome", row)], ["reason", (row) => get(r, "reason", row)],
      ["due, s", (row) => (r.intended[row] === null ? null : r.intended[row] * TICK_MS / 1000)], ["prompt tokens", (row) => get(r, "prompt_tokens", row)], ["answer tokens", (row) => get(r, "output_tokens", row)]];
    for (const [label, column] of [["TTFT, ms", "ttft_ms"], ["TPOT, ms", "tpot_ms"], ["E2E, ms", "e2e_ms"], ["normalized, ms/token", "normalized_ms"], ["longest gap, ms", "longest_gap_ms"]]) columns.push([label, (row) => get(r, column, row)]);
    for (const key of Object.keys(r).filter((one) => one.startsWith("part_") && !one.startsWith("part_queue_"))) columns.push([`${DATA.part_names[key.slice(5)]}, ms`, (row) => r[key][row]]);
    for (const [label, column] of [["preemptions", "preemptions"], ["cached tokens", "cached_tokens"], ["hung up in state", "state"], ["wasted tokens", "wasted_tokens"], ["KV free after, ms", "release_ms"], ["slot in use after, ms", "reuse_ms"]]) if (r[column]) columns.push([label, (row) => get(r, column, row)]);
    for (const [label, column] of [["sent, ms", "send"], ["arrived, ms", "arrival"], ["admitted, ms", "admitted"], ["first token, ms", "first"], ["last token, ms", "last"], ["end, ms", "end"], ["KV free, ms", "finish"]]) if (r[column]) columns.push([`${label} after due`, ms(column)]);
    return { columns, rows: run.kept, whole: run.whole, how: "the slowest and the fastest of each stretch and every k-th of the others", what: "requests", open: (row) => r.id[row] };
  };
  const step = (run) => {
    const s = run.steps, columns = [["iteration", (row) => run.firstStep + row], ["start, s", (row) => s.start[row] * TICK_MS / 1000], ["took, ms", (row) => Math.round(s.took[row] * TICK_MS * 100) / 100]];
    if (s.gap) columns.push(["host gap, ms", (row) => (s.gap[row] === null ? null : Math.round(s.gap[row] * TICK_MS * 100) / 100)]);
    for (const name of Object.keys(s)) if (!["start", "took", "gap", "end"].includes(name)) columns.push([name, (row) => s[name][row]]);
    return { columns, rows: run.stepCount, whole: run.stepsWhole, how: "the middle of the run", what: "iterations" };
  };
  const stall = (run) => {
    const rows = run.stalls.rows, culprit = (row) => rows[row][5].map(([id, group, count]) => `${id}${group ? ` (${group})` : ""} ${count}`).join("; ");
    return { columns: [["id", (row) => rows[row][0]], ["chunk", (row) => rows[row][1]], ["from, s", (row) => rows[row][2]], ["gap, ms", (row) => rows[row][3]],
      ["iterations", (row) => (rows[row][4] ? rows[row][4].map((one) => run.firstStep + one).join(" to ") : null)], ["prompt tokens in it", (row) => rows[row][6]], ["whose prompts (tokens)", culprit]],
      rows: rows.length, whole: run.stalls.whole, how: "the longest", what: "stalls", open: (row) => rows[row][0] };
  };
  // The figures of every run, with all the digits of summary.json.
  const figure = () => {
    const rows = [...document.querySelectorAll("#figures tbody tr")].map((line) => [line.closest("table").querySelector(".group").textContent, line.querySelector("th").textContent, ...[...line.querySelectorAll("td")].map((cell) => cell.dataset)]);
    const value = (cell) => (cell.value === "" || cell.value === "None" ? null : Number(cell.value));
    return { columns: [["part", (row) => rows[row][0]], ["figure", (row) => rows[row][1]], ["path in summary.json", (row) => rows[row][2].path], ...runs.map((run, i) => [run.name, (row) => value(rows[row][i + 2])])], rows: rows.length, whole: rows.length, what: "figures" };
  };
  const source = () => ({ requests: request, steps: step, stalls: stall, figures: figure }[kind.value])(runs[Number(which.value)]);

  const select = (from) => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...Array(from.rows).keys()];
    const text = (row) => from.columns.map(([, value]) => value(row)).filter((value) => value !== null).join("\t").toLowerCase();
    found = words.length ? rows.filter((row) => { const all = text(row); return words.every((word) => all.includes(word)); }) : rows;
    if (sorted === null || !from.columns[sorted]) return;
    const value = from.columns[sorted][1], order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
    found.sort((a, b) => { const [x, y] = [value(a), value(b)]; return x === null || y === null ? (x === null) - (y === null) : (falling ? -1 : 1) * order(x, y); });
  };
  const head = (from) => {
    const line = element("tr");
    from.columns.forEach(([label], i) => {
      const cell = element("th", null, { scope: "col", "aria-sort": sorted === i ? (falling ? "descending" : "ascending") : "none" }), button = element("button", `${label}${sorted === i ? (falling ? " ▼" : " ▲") : ""}`, { type: "button" });
      button.addEventListener("click", () => { falling = sorted === i ? !falling : false; sorted = i; page = 0; draw(); table.querySelectorAll("thead button")[i].focus(); });
      cell.append(button); line.append(cell);
    });
    table.tHead.replaceChildren(line);
  };
  const draw = () => {
    const from = source(), run = runs[Number(which.value)];
    select(from);
    head(from);
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(page, pages - 1);
    const numeric = from.columns.map(([, value]) => found.slice(0, 500).some((row) => typeof value(row) === "number"));
    table.tBodies[0].replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map((row) => {
      const line = element("tr", null, from.open ? { tabindex: 0, "data-id": from.open(row) } : {});
      from.columns.forEach(([, value], i) => line.append(element("td", number(value(row)), { class: numeric[i] ? "n" : null })));
      if (from.open) for (const kindOf of ["click", "keydown"]) line.addEventListener(kindOf, (event) => { if (kindOf === "click" || event.key === "Enter") Life.open(run, from.open(row)); });
      return line;
    }));
    note.textContent = `${found.length.toLocaleString("en")} of ${from.rows.toLocaleString("en")} ${from.what}${from.rows < from.whole ? `; ${from.rows.toLocaleString("en")} of the run's ${from.whole.toLocaleString("en")} are on this page: ${from.how}` : ""}.${from.rows ? "" : " There is none."}`;
    place.textContent = `page ${page + 1} of ${pages}`;
  };
  // RFC 4180; a text that a spreadsheet would take for a formula gets a quote in front.
  const quoted = (value) => {
    if (value === null || value === undefined) return "";
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const csv = () => {
    const from = source();
    select(from);
    return [from.columns.map(([label]) => quoted(label)).join(","), ...found.map((row) => from.columns.map(([, value]) => quoted(value(row))).join(","))].join("\r\n") + "\r\n";
  };
  document.getElementById("table-csv").addEventListener("click", () => {
    const link = element("a", null, { download: `${kind.value === "figures" ? "runs" : runs[Number(which.value)].name.replace(/[^\w.-]+/g, "_")}-${kind.value}.csv` });
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  const again = () => { page = 0; sorted = null; draw(); };
  kind.addEventListener("change", again);
  which.addEventListener("change", again);
  search.addEventListener("input", () => { page = 0; draw(); });
  document.getElementById("table-back").addEventListener("click", () => { page = Math.max(0, page - 1); draw(); });
  document.getElementById("table-next").addEventListener("click", () => { page += 1; draw(); });
  return { draw };
})();
