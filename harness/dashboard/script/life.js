// The life of one request in a panel: its queue, every piece of its prompt, its decodes, stalls and end.
const Life = (() => {
  const { runs, get, number, element, TICK_MS } = Columns;
  const panel = document.getElementById("life"), body = document.getElementById("life-body"), title = document.getElementById("life-title");
  let from = null, now = null;
  const ms = (ticks) => (ticks === null ? null : ticks * TICK_MS);

  // Whom a pass computed beside it: how many decodes, and the prompts of others.
  const company = (run, step, seq) => {
    const { first, last, kind, tokens } = run.seats;
    let decodes = 0;
    const prompts = [];
    for (let block = 0; block < first.length && first[block] <= step; block += 1) {
      if (last[block] < step || run.seats.seq[block] === seq) continue;
      if (kind[block] === 1) decodes += 1;
      if (kind[block] === 0 || kind[block] === 2) prompts.push([run.seats.seq[block], tokens[block]]);
    }
    const told = decodes ? [`${decodes} decode${decodes > 1 ? "s" : ""}`] : [];
    if (prompts.length) told.push(`prompts of ${prompts.slice(0, 4).map(([other, count]) => `${name(run, other)} (${count})`).join(", ")}${prompts.length > 4 ? ` and ${prompts.length - 4} more` : ""}`);
    return told.length ? `, with ${told.join(" and ")}` : ", alone";
  };
  const name = (run, seq) => { const row = run.rowOfSeq.get(seq); return row === undefined ? `sequence ${seq}` : run.requests.id[row]; };

  const passes = (run, row, due) => {
    const { first, last, kind, tokens, pad } = run.seats, seq = get(run.requests, "seq", row);
    return (run.blocksOf.get(seq) || []).map((block) => {
      const a = first[block], b = last[block], start = run.steps.start[a], took = run.steps.end[b] - start;
      const steps = a === b ? `iteration ${run.firstStep + a}` : `iterations ${run.firstStep + a} to ${run.firstStep + b}`;
      const text = [
        () => `prompt: ${tokens[block]} tokens${pad[block] ? ` after ${pad[block]} of left padding` : ""}, ${steps}${company(run, a, seq)}`,
        () => `decodes ${tokens[block]} tokens, ${steps}${prompted(run, a, b)}`,
        () => `computed again: ${tokens[block]} tokens, ${steps}${company(run, a, seq)}`,
        () => `its answer has ended, its row is computed on: ${steps}`,
        () => `has a seat and is left out: ${steps}${prompted(run, a, b)}`,
        () => `its answer has ended, its seat is held until the batch ends: ${steps}`,
      ][kind[block]]();
      return [start - due, took, text];
    });
  };
  const prompted = (run, a, b) => {
    let count = 0, time = 0;
    for (let step = a; step <= b; step += 1) if (get(run.steps, "prefill_tokens", step) > 0) { count += 1; time += run.steps.took[step]; }
    return count ? `; ${count} of them with prompts, ${number(ms(time))} ms` : "";
  };

  const events = (run, row) => {
    const r = run.requests, due = r.intended[row], found = [], stamp = (column) => get(r, column, row);
    const add = (at, text, took = null) => at !== null && found.push([at, took, text]);
    add(0, `due, ${number(ms(due) / 1000)} s after the load began`);
    add(stamp("send"), "sent");
    const arrival = stamp("arrival"), admitted = stamp("admitted");
    if (arrival !== null && admitted !== null) {
      const reasons = Object.keys(r).filter((key) => key.startsWith("part_queue_") && r[key][row] > 0).map((key) => `${number(r[key][row])} ms for ${DATA.waited_for[key.slice(11)]}`);
      add(arrival, reasons.length ? `in the engine; waits in all: ${reasons.join(", ")}` : "in the engine", admitted - arrival);
    } else add(arrival, "in the engine");
    found.push(...passes(run, row, due));
    add(stamp("token"), "first token in the engine");
    const chunks = get(r, "chunks", row);
    add(stamp("first"), chunks === 1 ? "client: the answer, in one piece" : "client: first token");
    if (chunks !== 1) add(stamp("last"), "client: last token");
    for (const [, chunk, at, gap, , culprits, all] of run.stallsOf.get(r.id[row]) || []) {
      const whose = culprits.length ? `prompts of ${culprits.map(([id, kind, count]) => `${id}${kind ? ` (${kind})` : ""} ${count} tokens`).join(", ")}${all > culprits.reduce((sum, one) => sum + one[2], 0) ? ", …" : ""}` : "no prompts of others in it";
      found.push([Math.round(at * 1e5) - due, gap / TICK_MS, `STALL before chunk ${chunk}: ${whose}`]);
    }
    if (stamp("outcome") !== "completed") add(stamp("end"), { cancelled: "client: the user hangs up", timed_out: "client: its timeout is over" }[stamp("outcome")] || `client: the end (${stamp("reason") ?? stamp("outcome")})`);
    const state = get(r, "state", row), wasted = get(r, "wasted_tokens", row);
    add(stamp("finish"), `${get(r, "finish_reason", row) ?? "finished"}, KV free${state ? `; it was ${state}, ${wasted ?? 0} tokens wasted` : ""}`);
    return found.sort((a, b) => a[0] - b[0]);
  };

  const parts = (run, row) => DATA.parts.map(([label, colour, names]) => [label, colour, names.reduce((sum, one) => sum + Math.max(0, get(run.requests, `part_${one}`, row) || 0), 0)]).filter(([, , value]) => value > 0);

  const fill = () => {
    const { run, row } = now, r = run.requests;
    title.textContent = `${r.id[row]} in ${run.name}`;
    const facts = [get(r, "class", row), get(r, "tenant", row) && `tenant ${get(r, "tenant", row)}`, String(get(r, "outcome", row)).replace("_", " ") + (get(r, "reason", row) ? ` (${get(r, "reason", row)})` : ""),
      `prompt ${get(r, "prompt_tokens", row) ?? "?"} tokens${get(r, "cached_tokens", row) ? `, ${get(r, "cached_tokens", row)} of them cached` : ""}`, `answer ${get(r, "output_tokens", row) ?? "?"} of at most ${get(r, "max_tokens", row) ?? "?"}`,
      get(r, "preemptions", row) ? `preempted ${get(r, "preemptions", row)} times` : null].filter(Boolean).join(" · ");
    const figures = [["TTFT", "ttft_ms"], ["TPOT", "tpot_ms"], ["E2E", "e2e_ms"], ["longest gap", "longest_gap_ms"]].map(([label, column]) => `${label} ${number(get(r, column, row))}${get(r, column, row) === null ? "" : " ms"}`).join(" · ");
    const spent = parts(run, row), whole = spent.reduce((sum, one) => sum + one[2], 0);
    const bar = element("div", null, { class: "whole", role: "img", "aria-label": spent.map(([label, , value]) => `${label} ${number(value)} ms`).join(", ") });
    const key = element("p", null, { class: "key" });
    for (const [label, colour, value] of spent) {
      const piece = element("span", null, { title: `${label}: ${number(value)} ms` }), dot = element("span", null, { class: "dot", "data-colour": colour }), text = element("span");
      piece.style.flex = `${value / whole} 0 0`; piece.style.background = dot.style.background = window.page.shade(colour);
      text.append(dot, `${label} ${number(value)} ms`);
      bar.append(piece); key.append(text);
    }
    const table = element("table"), head = element("thead"), rows = element("tbody"), line = element("tr");
    for (const word of ["at, ms", "took, ms", "what"]) line.append(element("th", word, { scope: "col" }));
    head.append(line);
    for (const [at, took, text] of events(run, row)) {
      const made = element("tr", null, { class: text.startsWith("STALL") ? "stall" : null });
      made.append(element("td", ms(at).toFixed(1), { class: "n" }), element("td", took === null ? "" : ms(took).toFixed(1), { class: "n" }), element("td", text));
      rows.append(made);
    }
    table.append(head, rows);
    const buttons = element("div", null, { class: "bar" });
    const button = (text, act) => { const made = element("button", text, { type: "button" }); made.addEventListener("click", act); buttons.append(made); };
    if (row > 0) button("◀ before", () => show(run, row - 1));
    if (row < run.kept - 1) button("after ▶", () => show(run, row + 1));
    for (const other of runs) { const there = other !== run ? other.rowOf.get(r.id[row]) : undefined; if (there !== undefined) button(`in ${other.name}`, () => show(other, there)); }
    const seq = get(r, "seq", row), seated = run.blocksOf.has(seq);
    if (seated) button("in the slot timeline", () => { Tabs.show("slots"); Seats.goTo(run, seq); });
    const missing = run.stepCount < run.stepsWhole && !seated ? element("p", "Its iterations are not among those that this page keeps.", { class: "note" }) : null;
    body.replaceChildren(...[element("p", facts), element("p", figures), whole > 0 ? bar : null, whole > 0 ? key : null, buttons, missing, table].filter(Boolean));
  };
  const show = (run, row) => { now = { run, row }; fill(); panel.scrollTop = 0; };
  const open = (run, id) => {
    const row = run.rowOf.get(id);
    if (row === undefined) return;
    if (panel.hidden) from = document.activeElement;
    panel.hidden = false;
    show(run, row);
    panel.focus();
  };
  const close = () => { if (panel.hidden) return; panel.hidden = true; now = null; if (from && from.isConnected) from.focus(); };
  document.getElementById("life-close").addEventListener("click", close);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  return { open, close, recolour: () => { if (now) fill(); } };
})();
