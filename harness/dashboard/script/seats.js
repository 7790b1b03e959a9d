// The slot timeline: a row per seat, a block per stretch in which a request held it. All runs share one axis.
// Only what lies in the window is drawn; blocks too narrow for the screen are merged with their neighbours of the
// same seat, and the note says how many were.
const Seats = (() => {
  const { runs, get, number, TICK_MS } = Columns;
  const plot = document.getElementById("seats"), note = document.getElementById("seat-note");
  const shown = runs.filter((run) => run.seatCount > 0 && run.stepCount > 0);
  if (!plot || !shown.length) return { draw() {}, goTo() {} };
  const axis = document.getElementById("seat-axis"), paint = document.getElementById("seat-colour");
  const PAD = 6, WITH_PROMPT = 7, WITHOUT = 8; // kinds beside those of the data
  const look = shown[0].look;
  const KINDS = [...look.kinds.map((name, i) => ({ name, colour: look.colours[i], pattern: look.patterns[i] })),
    { name: "left padding", colour: look.pad, pattern: "." },
    { name: "iteration with prompts", colour: look.colours[0], pattern: "" }, { name: "iteration of answers only", colour: "#7F8B9C", pattern: "" }];
  const PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A6FDF", "#999999"];
  const FINEST = 900, MOST_STRIPES = 700; // blocks side by side, iterations of a strip
  const HEAD = 26, GAP = 14; // pixels above each run, and below
  const seconds = () => axis.value === "time";
  const startOf = (run, step) => (seconds() ? run.steps.start[step] * TICK_MS / 1000 : run.firstStep + step);
  const endOf = (run, step) => (seconds() ? run.steps.end[step] * TICK_MS / 1000 : run.firstStep + step + 1);
  const whole = () => [Math.min(...shown.map((run) => startOf(run, 0))), Math.max(...shown.map((run) => endOf(run, run.stepCount - 1)))];
  const rowHeight = (run) => Math.max(3, Math.min(innerWidth < 760 ? 12 : 17, Math.floor(230 / run.seatCount)));

  // Ten times as long as the first run's median request has its seat, where most of its seats are taken.
  const opening = () => {
    const [low, high] = whole(), run = shown[0], { seq, first, last } = run.seats;
    const stays = [...run.blocksOf.values()].map((blocks) => endOf(run, last[blocks[blocks.length - 1]]) - startOf(run, first[blocks[0]])).sort((a, b) => a - b);
    const width = Math.min(high - low, 10 * stays[Math.floor(stays.length / 2)]), taken = new Map();
    for (let block = 0; block < seq.length; block += 1) {
      const from = startOf(run, first[block]), to = endOf(run, last[block]);
      for (let bin = Math.floor((from - low) / width * 2); bin <= (to - low) / width * 2; bin += 1) {
        const left = low + bin * width / 2;
        taken.set(bin, (taken.get(bin) || 0) + Math.min(to, left + width / 2) - Math.max(from, left));
      }
    }
    const both = (bin) => taken.get(bin) + (taken.get(bin + 1) || 0);
    const busiest = [...taken.keys()].reduce((best, bin) => (both(bin) > both(best) ? bin : best));
    const from = Math.max(low, Math.min(low + busiest * width / 2, high - width));
    return [from, from + width];
  };
  let view = opening(), visible = [], at = -1;

  // The blocks of a run in the window as [seat, from, to, kind, block], narrow ones merged; and how many those were.
  const blocksIn = (run, [low, high]) => {
    const { seat, first, last, kind, tokens, pad } = run.seats, finest = (high - low) / FINEST;
    const found = [], open = new Map();
    let count = 0, merged = 0;
    const close = (key) => {
      const part = open.get(key);
      if (!part) return;
      open.delete(key);
      const most = [...part.time.entries()].sort((a, b) => b[1] - a[1])[0][0];
      found.push([key, part.from, part.to, most, part.count === 1 ? part.block : -part.count]);
      if (part.count > 1) merged += part.count;
    };
    const add = (key, from, to, what, block) => {
      const part = open.get(key), narrow = to - from < finest;
      if (!narrow || (part && (part.to - part.from >= finest || from - part.to > finest))) close(key);
      if (!narrow) { found.push([key, from, to, what, block]); return; }
      const now = open.get(key) || { from, to, count: 0, time: new Map(), block };
      now.to = to; now.count += 1; now.time.set(what, (now.time.get(what) || 0) + to - from);
      open.set(key, now);
    };
    for (let block = 0; block < first.length; block += 1) {
      const from = startOf(run, first[block]);
      if (from > high) break;
      const to = endOf(run, last[block]);
      if (to < low) continue;
      count += 1;
      const padded = pad[block] > 0 ? from + (to - from) * pad[block] / (pad[block] + tokens[block]) : from;
      if (padded > from) add(seat[block], from, padded, PAD, block);
      add(seat[block], padded, to, kind[block], block);
    }
    for (const key of [...open.keys()]) close(key);
    return { found, count, merged };
  };

  const say = (run, block) => {
    const { seat, seq, kind, first, last, tokens, pad } = run.seats, row = run.rowOfSeq.get(seq[block]);
    const took = (run.steps.end[last[block]] - run.steps.start[first[block]]) * TICK_MS;
    const who = row === undefined ? `sequence ${seq[block]}` : run.requests.id[row];
    const steps = first[block] === last[block] ? `iteration ${run.firstStep + first[block]}` : `iterations ${run.firstStep + first[block]} to ${run.firstStep + last[block]}`;
    const what = tokens[block] ? `${KINDS[kind[block]].name}, ${tokens[block]} tokens` : KINDS[kind[block]].name;
    return `${who}: ${what}${pad[block] ? ` after ${pad[block]} of left padding` : ""}; seat ${seat[block] + 1}, ${steps}, ${number(took)} ms`;
  };
  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "% {");

  const traces = (run, place, parts) => {
    const byKind = new Map();
    for (const part of parts) byKind.has(part[3]) ? byKind.get(part[3]).push(part) : byKind.set(part[3], [part]);
    const pixel = (view[1] - view[0]) / Math.max(200, plot.clientWidth - 60); // a border would wash out what is narrow
    return [...byKind.entries()].sort((a, b) => a[0] - b[0]).map(([kind, all]) => {
      const single = paint.value === "request" && kind < PAD;
      const colour = single ? all.map((part) => window.page.shade(part[4] < 0 ? "#999999" : PALETTE[(run.seats.seq[part[4]] * 5) % PALETTE.length])) : window.page.shade(KINDS[kind].colour);
      return {
        type: "bar", orientation: "h", name: KINDS[kind].name, showlegend: false, xaxis: "x", yaxis: place ? `y${place + 1}` : "y",
        base: all.map((part) => part[1]), x: all.map((part) => part[2] - part[1]), y: all.map((part) => part[0]), width: kind >= WITH_PROMPT ? 0.55 : 0.9,
        marker: { color: colour, line: { width: all.map((part) => (part[2] - part[1] < 4 * pixel ? 0 : 0.6)), color: window.page.colours().card }, pattern: { shape: KINDS[kind].pattern, fillmode: "overlay", fgcolor: "rgba(255,255,255,.85)", size: 6, solidity: 0.35 } },
        customdata: all.map((part) => [run.index, part[4]]),
        hovertext: all.map((part) => escaped(kind >= WITH_PROMPT ? stripe(run, part[4]) : part[4] < 0 ? `${-part[4]} blocks, too narrow here: mostly ${KINDS[kind].name}` : say(run, part[4]))),
        hovertemplate: "%{hovertext}<extra></extra>",
      };
    });
  };
  const stripe = (run, step) => {
    const words = [["prefill_tokens", "of prompts"], ["decode_tokens", "of answers"], ["recomputed_tokens", "computed again"], ["ended_rows", "ended rows"], ["left_pad_tokens", "of left padding"]];
    const told = words.map(([name, word]) => [get(run.steps, name, step), word]).filter(([value]) => value > 0).map(([value, word]) => `${value} ${word}`);
    return `iteration ${run.firstStep + step}, ${number(run.steps.took[step] * TICK_MS)} ms: ${told.join(", ")}; ${get(run.steps, "waiting", step) ?? 0} waiting`;
  };
  const strip = (run, [low, high]) => {
    const parts = [];
    for (let step = 0; step < run.stepCount && parts.length <= MOST_STRIPES; step += 1) {
      if (endOf(run, step) < low) continue;
      if (startOf(run, step) > high) break;
      parts.push([-1, startOf(run, step), endOf(run, step), get(run.steps, "prefill_tokens", step) > 0 ? WITH_PROMPT : WITHOUT, step]);
    }
    return parts.length > MOST_STRIPES ? [] : parts;
  };

  const draw = () => {
    if (plot.offsetParent === null) return;
    const colours = window.page.colours(), said = [], used = new Set();
    const heights = shown.map((run) => HEAD + rowHeight(run) * (run.seatCount + 1)), total = heights.reduce((a, b) => a + b) + GAP * (shown.length - 1);
    const layout = {
      height: total + 44, margin: { l: 44, r: 8, t: 2, b: 40 }, barmode: "overlay", bargap: 0, showlegend: false, hovermode: "closest", dragmode: "pan",
      paper_bgcolor: colours.card, plot_bgcolor: colours.card, font: { color: colours.ink, size: 12, family: "system-ui,DejaVu Sans,sans-serif" }, hoverlabel: { namelength: -1, align: "left" },
      xaxis: { range: [...view], title: { text: seconds() ? "time, s" : "iteration" }, gridcolor: colours.line, zeroline: false, exponentformat: "none", tickangle: 0, nticks: innerWidth < 760 ? 5 : 12, anchor: "free", position: 0 },
      annotations: [],
    };
    const data = [];
    visible = [];
    let top = total;
    shown.forEach((run, place) => {
      const { found, count, merged } = blocksIn(run, view), stripes = strip(run, view);
      [...found, ...stripes].forEach((part) => used.add(part[3]));
      data.push(...traces(run, place, [...stripes, ...found]));
      visible.push(...found.filter((part) => part[4] >= 0 && part[3] !== PAD).map((part) => ({ run, block: part[4], from: part[1] })));
      const height = heights[place], upper = top / total, lower = (top - height + HEAD) / total, many = run.seatCount > 12;
      layout[place ? `yaxis${place + 1}` : "yaxis"] = {
        domain: [Math.max(0, (top - height) / total), Math.min(1, (top - HEAD) / total)], range: [run.seatCount - 0.4, -1.6], fixedrange: true, showgrid: false, zeroline: false,
        tickvals: many ? [0, Math.floor(run.seatCount / 2) - 1, run.seatCount - 1] : [...Array(run.seatCount).keys()].filter((i) => rowHeight(run) >= 11 || i % 2 === 0), ticktext: undefined, tickfont: { size: 10 },
      };
      const y = layout[place ? `yaxis${place + 1}` : "yaxis"];
      y.ticktext = y.tickvals.map((i) => String(i + 1));
      layout.annotations.push({ text: `<b>${escaped(run.name)}</b>`, font: { color: window.page.shade(run.colour), size: 13 }, x: 0, xref: "paper", xanchor: "left", y: upper, yref: "paper", yanchor: "top", showarrow: false });
      said.push(`${run.name}: ${count.toLocaleString("en")} of ${run.seats.first.length.toLocaleString("en")} blocks${merged ? `, ${merged.toLocaleString("en")} of them narrower than a ${FINEST}th of the width and drawn together` : ""}${run.stepCount < run.stepsWhole ? `; only iterations ${run.firstStep} to ${run.firstStep + run.stepCount - 1} of ${run.stepsWhole.toLocaleString("en")} are on this page` : ""}`);
      top -= height + GAP;
    });
    plot.style.height = `${layout.height}px`;
    Plotly.react(plot, data, layout, { ...window.page.options, scrollZoom: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "zoomIn2d", "zoomOut2d"] });
    note.textContent = `In view, ${said.join("; ")}.`;
    legend(used);
    if (!plot.dataset.ready) { plot.dataset.ready = "yes"; listen(); }
  };
  const legend = (used) => {
    const key = document.getElementById("seat-key");
    key.replaceChildren(...[...used].sort((a, b) => a - b).map((kind) => {
      const label = Columns.element("span"), box = Columns.element("span", "", { class: "swatch" }), colour = window.page.shade(KINDS[kind].colour);
      box.style.background = KINDS[kind].pattern ? `repeating-linear-gradient(${KINDS[kind].pattern === "\\" ? 45 : 135}deg, ${colour} 0 3px, rgba(255,255,255,.85) 3px 4.5px)` : colour;
      label.append(box, KINDS[kind].name);
      return label;
    }));
  };

  const move = (from, width) => {
    const [low, high] = whole(), size = Math.max(Math.min(width, high - low), (high - low) / 1e5);
    const start = Math.max(low, Math.min(from, high - size));
    view = [start, start + size];
    at = -1;
    draw();
  };
  const acts = {
    left: () => move(view[0] - (view[1] - view[0]) / 2, view[1] - view[0]), right: () => move(view[0] + (view[1] - view[0]) / 2, view[1] - view[0]),
    in: () => move(view[0] + (view[1] - view[0]) / 4, (view[1] - view[0]) / 2), out: () => move(view[0] - (view[1] - view[0]) / 2, (view[1] - view[0]) * 2),
    all: () => move(...(([low, high]) => [low, high - low])(whole())),
  };
  for (const button of document.querySelectorAll("[data-seat]")) button.addEventListener("click", acts[button.dataset.seat]);
  axis.addEventListener("change", () => { view = opening(); draw(); });
  paint.addEventListener("change", draw);
  const step = (by) => {
    const order = [...visible].sort((a, b) => a.run.index - b.run.index || a.from - b.from);
    if (!order.length) return;
    at = (at + by + order.length) % order.length;
    note.textContent = `${order[at].run.name}: ${say(order[at].run, order[at].block)}. Enter opens it.`;
    plot.dataset.block = `${order[at].run.index}:${order[at].block}`;
  };
  plot.addEventListener("keydown", (event) => {
    const act = { ArrowLeft: acts.left, ArrowRight: acts.right, "+": acts.in, "=": acts.in, "-": acts.out, Home: acts.all, n: () => step(1), p: () => step(-1), Enter: () => openBlock(...(plot.dataset.block || "").split(":").map(Number)) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const openBlock = (index, block) => {
    const run = runs[index], row = run && block >= 0 ? run.rowOfSeq.get(run.seats.seq[block]) : undefined;
    if (row !== undefined) Life.open(run, run.requests.id[row]);
  };
  const listen = () => {
    plot.on("plotly_click", (event) => { const [index, block] = event.points[0].customdata; if (event.points[0].y >= 0) openBlock(index, block); });
    plot.on("plotly_relayout", (change) => {
      if (change["xaxis.range[0]"] !== undefined) move(change["xaxis.range[0]"], change["xaxis.range[1]"] - change["xaxis.range[0]"]);
      else if (change["xaxis.autorange"]) { view = opening(); draw(); }
    });
  };
  // Shows the life of a request in the timeline, with some room around it.
  const goTo = (run, seq) => {
    const blocks = run.blocksOf.get(seq) || [];
    if (!blocks.length) return;
    const from = startOf(run, run.seats.first[blocks[0]]), to = endOf(run, run.seats.last[blocks[blocks.length - 1]]);
    move(from - (to - from) * 0.5, (to - from) * 2);
  };
  return { draw, goTo };
})();
