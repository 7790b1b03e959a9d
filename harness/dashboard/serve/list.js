(() => {
  const $ = (id) => document.getElementById(id);
  const short = (value) => value == null ? "" : Math.abs(value) >= 100 ? Math.round(value).toString() : Number(value.toPrecision(3)).toString();
  // key of an item or of its figures, label, numeric
  const COLUMNS = [["name", "run"], ["state", "state"], ["started", "started"], ["engine", "engine"], ["workload", "workload"], ["model", "model"], ["ttft_p50", "TTFT p50", true], ["ttft_p99", "TTFT p99", true], ["tpot_p50", "TPOT p50", true], ["tokens_per_s", "tokens/s", true], ["goodput", "goodput", true]];
  const FILTERS = ["kind", "engine", "workload", "model", "state"];
  const PAGE = 200, MOST = 12;
  const kept = new URLSearchParams(location.hash.slice(1));
  const view = { sort: kept.get("sort") || "started", down: kept.get("down") !== "0", shown: PAGE };
  const chosen = new Set();
  let items = [], tag = null, known = "";

  const value = (item, key) => item.figures && key in item.figures ? item.figures[key] : item[key];
  const wanted = () => {
    const words = $("q").value.toLowerCase().split(/\s+/).filter(Boolean);
    const exact = FILTERS.filter((key) => $(key).value).map((key) => [key, $(key).value]);
    return items.filter((item) => exact.every(([key, text]) => (item[key] ?? "") === text) && words.every((word) => item.text.includes(word)));
  };
  const sorted = (found) => {
    const sign = view.down ? -1 : 1;
    return found.sort((a, b) => {
      const [x, y] = [value(a, view.sort), value(b, view.sort)];
      if (x == null || x === "") return y == null || y === "" ? 0 : 1;  // what was not measured comes last, either way
      if (y == null || y === "") return -1;
      return sign * (typeof x === "number" ? x - y : String(x).localeCompare(String(y)));
    });
  };
  const element = (tag, attributes = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  };
  const row = (item) => {
    const line = element("tr");
    line.dataset.id = item.id;
    const check = element("td", { className: "check" });
    if (item.kind === "run" && (item.state === "valid" || item.state === "invalid")) {
      const box = element("input", { type: "checkbox", checked: chosen.has(item.id) });
      box.setAttribute("aria-label", `compare ${item.name}`);
      box.addEventListener("change", () => { box.checked ? chosen.add(item.id) : chosen.delete(item.id); buttons(); });
      check.append(box);
    }
    line.append(check);
    for (const [key, label, numeric] of COLUMNS) {
      const cell = element("td", { className: numeric ? "n" : key === "name" ? "name" : ["engine", "workload", "model", "started"].includes(key) ? "t" : "" });
      if (numeric || cell.className === "t") cell.dataset.label = label;
      if (key === "name") {
        cell.append(element("a", { href: `/run/${item.id}`, textContent: item.name }));
        if (item.note) cell.append(element("small", { textContent: item.note }));
      } else if (key === "state") {
        cell.append(element("span", { className: `state s-${item.state}`, textContent: item.kind === "run" ? item.state : item.state === "broken" ? "broken" : item.kind }));
        const p = item.progress;
        if (p) cell.append(" ", element("progress", { max: p.scheduled || 1, value: p.done, title: `${p.done} of ${p.scheduled ?? "?"} requests` }), element("small", { textContent: `${p.done} of ${p.scheduled ?? "?"}` }));
      } else if (key === "started") cell.textContent = (item.started || "").slice(0, 16).replace("T", " ");
      else cell.textContent = numeric ? short(value(item, key) ?? item.progress?.[key]) : item[key] ?? "";
      line.append(cell);
    }
    return line;
  };
  const buttons = () => {
    const found = [...chosen].filter((id) => items.some((item) => item.id === id));
    $("compare").disabled = !found.length || found.length > MOST;
    $("compare").textContent = found.length > MOST ? `Compare at most ${MOST}` : found.length ? `Compare ${found.length}` : "Compare";
  };
  const show = () => {
    const found = sorted(wanted());
    const focus = document.activeElement?.closest?.("#list tr")?.dataset.id, what = document.activeElement?.tagName;
    document.querySelector("#list tbody").replaceChildren(...found.slice(0, view.shown).map(row));
    if (focus) document.querySelector(`#list tr[data-id="${focus}"] ${what === "INPUT" ? "input" : "a"}`)?.focus();
    $("more").hidden = found.length <= view.shown;
    $("count").textContent = found.length === items.length ? `${items.length} found` : `${found.length} of ${items.length}`;
    $("empty").hidden = found.length > 0;
    $("empty").textContent = items.length ? "Nothing matches these filters." : "There is no run in this folder yet. `python -m harness +workload=rag +engine=continuous` makes one; it appears here while it runs.";
    for (const head of document.querySelectorAll("#list thead th[data-key]")) head.setAttribute("aria-sort", head.dataset.key !== view.sort ? "none" : view.down ? "descending" : "ascending");
    buttons();
    const hash = new URLSearchParams(FILTERS.concat("q").filter((key) => $(key).value).map((key) => [key, $(key).value]));
    if (view.sort !== "started") hash.set("sort", view.sort);
    if (!view.down) hash.set("down", "0");
    history.replaceState(null, "", hash.size ? `#${hash}` : location.pathname);
  };
  const options = () => {
    const lists = FILTERS.map((key) => [...new Set(items.map((item) => item[key]).filter(Boolean))].sort());
    if (JSON.stringify(lists) === known) return;
    known = JSON.stringify(lists);
    FILTERS.forEach((key, i) => {
      const before = $(key).value || kept.get(key) || "";
      if (before && !lists[i].includes(before)) lists[i].push(before);
      $(key).replaceChildren(element("option", { value: "", textContent: "all" }), ...lists[i].map((name) => element("option", { value: name, textContent: name })));
      $(key).value = before;
    });
    FILTERS.forEach((key) => kept.delete(key));
  };
  const look = async () => {
    try {
      const answer = await fetch("/items", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        items = await answer.json();
        for (const item of items) item.text = [item.name, item.note, item.engine, item.workload, item.model].join(" ").toLowerCase();
        options();
        show();
      }
    } catch { $("count").textContent = "the server does not answer"; }
    setTimeout(look, document.hidden ? 15000 : items.some((item) => item.state === "running") ? 1500 : 5000);
  };

  const heads = document.querySelector("#list thead tr");
  for (const [key, label, numeric] of COLUMNS) {
    const head = element("th", { scope: "col", className: numeric ? "n" : "" }, element("button", { type: "button", textContent: label }));
    head.dataset.key = key;
    head.firstChild.addEventListener("click", () => { view.down = view.sort === key ? !view.down : Boolean(numeric) || key === "started"; view.sort = key; show(); });
    heads.append(head);
  }
  $("q").value = kept.get("q") || "";
  for (const id of ["q", ...FILTERS]) $(id).addEventListener("input", () => { view.shown = PAGE; show(); });
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("more").addEventListener("click", () => { view.shown += PAGE; show(); });
  $("compare").addEventListener("click", () => { location.href = `/compare?${[...chosen].map((id) => `run=${id}`).join("&")}`; });
  addEventListener("keydown", (event) => { if (event.key === "/" && !/INPUT|SELECT/.test(document.activeElement.tagName)) { event.preventDefault(); $("q").focus(); } });
  look();
})();
