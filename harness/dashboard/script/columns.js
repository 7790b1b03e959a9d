// The columns of the page's data as arrays, and a few words for numbers. What docs/metrics.md calls null is null.
const Columns = (() => {
  const TICK_MS = 0.01; // a stamp is a whole number of 10 us
  const plain = (column) => {
    if (Array.isArray(column)) return column;
    if (column.delta) { let sum = 0; return column.delta.map((step) => (sum += step)); }
    return column.at.map((code) => (code === null ? null : column.words[code]));
  };
  const unpack = (part) => Object.fromEntries(Object.entries(part.columns).map(([name, column]) => [name, plain(column)]));
  const runs = DATA.runs.map((raw, index) => {
    const requests = unpack(raw.requests), steps = unpack(raw.steps), seats = unpack(raw.seats);
    const run = { ...raw, index, requests, steps, seats, kept: raw.requests.n, whole: raw.requests.whole, stepCount: raw.steps.n, stepsWhole: raw.steps.whole, firstStep: raw.steps.number, seatCount: raw.seats.count, look: raw.seats.look };
    steps.end = (steps.start || []).map((start, i) => start + (steps.took[i] || 0));
    seats.last = (seats.first || []).map((first, i) => first + seats.length[i] - 1);
    run.rowOf = new Map((requests.id || []).map((id, row) => [id, row]));
    run.rowOfSeq = new Map((requests.seq || []).map((seq, row) => [seq, row]).filter(([seq]) => seq !== null));
    run.blocksOf = new Map();
    (seats.seq || []).forEach((seq, block) => run.blocksOf.has(seq) ? run.blocksOf.get(seq).push(block) : run.blocksOf.set(seq, [block]));
    run.stallsOf = new Map();
    for (const row of raw.stalls.rows) run.stallsOf.has(row[0]) ? run.stallsOf.get(row[0]).push(row) : run.stallsOf.set(row[0], [row]);
    return run;
  });
  const get = (table, name, row) => (table[name] ? table[name][row] : null) ?? null;
  // Four significant digits, in full.
  const number = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value)) return String(value);
    const size = Math.abs(value);
    return value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3);
  };
  const element = (tag, text, attributes = {}) => {
    const made = document.createElement(tag);
    if (text !== null && text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) value !== null && value !== false && made.setAttribute(name, value);
    return made;
  };
  return { TICK_MS, runs, get, number, element };
})();
