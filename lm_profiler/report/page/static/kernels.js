// Where the device's time goes: by phase and kind, and its largest kernels. On the CPU: operators.
import { ask } from "./api.js";
import { draw, plain } from "./charts.js";
import { card, choose, el, option, swatch, table } from "./dom.js";
import { LongTable } from "./table.js";
import { ms, number } from "./units.js";

export const title = "Kernels";
export const ofRun = true;

const IDLE = "idle";
const titleOf = (kind) => kind.replaceAll("_", " ");
const percent = (share) => `${number(share * 100, 1)}%`;

export async function show(root, { run, colours }) {
  const { tables, why } = await ask("kernels", { run });
  const files = Object.keys(tables);
  if (!files.length) {
    root.append(el("p", { class: "quiet" }, why));
    return;
  }
  const body = el("div", { class: "stack" });
  const fill = (file) => body.replaceChildren(...cards(tables[file], colours));
  if (files.length > 1) root.append(ranks(files, fill));
  root.append(body);
  fill(files[0]);
}

function ranks(files, fill) {
  const chooser = el("select", { onchange: () => fill(chooser.value) });
  chooser.append(...files.map((file) => option(file, file.replace(/\.kernels\.json$/, "").replace("rank", "rank "))));
  return el("label", { class: "choice" }, "Rank", chooser);
}

function cards(found, colours) {
  if (found.error) return [el("p", { class: "error" }, found.error)];
  const what = found.source === "kernels" ? "Kernels on the device" : "Operators on the host (this device has no kernels)";
  return [card(`${what}: the answers`, answers(found)), byKind(found, colours), largest(found, colours)];
}

function answers({ answers, steps, memory_bound_share: memory, communication_share: communication }) {
  const rows = [...answers];
  if (memory !== null) rows.push(["bound by memory", `${percent(memory)} of the step runs only kernels that move bytes`]);
  if (communication) rows.push(["communication", `${percent(communication)} of the step runs nothing else`]);
  const means = `Means of ${steps} traced ${steps === 1 ? "step" : "steps"}: tracing makes steps longer than the measured ones.`;
  return el("div", {}, table(["", ""], rows, { figures: false }), el("p", { class: "quiet" }, means));
}

// Phases and the whole step: [{name, time_s, kinds: {kind: seconds}}].
function bars({ phases, kinds, step_s }) {
  const found = Object.entries(phases).map(([name, { time_s }]) => ({ name, time_s, kinds: {} }));
  const step = { name: "step", time_s: step_s, kinds: {} };
  for (const { phase, kind, time_s } of kinds) {
    found.find(({ name }) => name === phase).kinds[kind] = time_s;
    step.kinds[kind] = (step.kinds[kind] ?? 0) + time_s;
  }
  return [...found, step];
}

const MEASURES = {
  ms: {
    title: "ms a step",
    of: (seconds) => seconds * 1e3,
    text: (seconds) => ms(seconds).replace(" ms", ""),
  },
  share: {
    title: "share of the phase (%)",
    of: (seconds, whole) => (whole ? (seconds / whole) * 100 : 0),
    text: (seconds, whole) => (whole ? number((seconds / whole) * 100, 1) : ""),
  },
};

function byKind(found, colours) {
  const rows = bars(found);
  const known = [...Object.keys(colours.kinds), ...rows.flatMap((row) => Object.keys(row.kinds))]; // a later version's last
  const kinds = [...new Set(known)].filter((kind) => rows.some((row) => row.kinds[kind]));
  const chart = el("div", { class: "chart" });
  const figures = el("div", { class: "scroll" });
  const render = (name) => {
    const measure = MEASURES[name];
    const texts = rows.map((row) => [
      el("span", {}, swatch(colours.parts[row.name] ?? "none"), row.name),
      ...[...kinds.map((kind) => row.kinds[kind]), row.time_s].map((s) => (s ? measure.text(s, row.time_s) : "")),
    ]);
    figures.replaceChildren(table([measure.title, ...kinds.map(named(found)), "all"], texts));
    requestAnimationFrame(() => drawBars(chart, rows, kinds, measure, found, colours));
  };
  const choices = Object.entries(MEASURES).map(([name, measure]) => [name, measure.title]);
  render("ms");
  const notes = overlap(found).map((text) => el("p", { class: "quiet" }, text));
  return card("Time by phase and kind", choose("Measure", choices, "ms", render), chart, figures, ...notes);
}

const named = ({ source }) => (kind) => (kind === IDLE && source === "operators" ? "no operator" : titleOf(kind));

function drawBars(chart, rows, kinds, measure, found, colours) {
  const data = kinds.map((kind) => {
    const [color, shape] = colours.kinds[kind] ?? colours.kinds.other;
    const seconds = rows.map((row) => row.kinds[kind] ?? 0);
    return {
      type: "bar",
      orientation: "h",
      name: named(found)(kind),
      y: rows.map((row) => plain(row.name)),
      x: seconds.map((s, i) => measure.of(s, rows[i].time_s)),
      customdata: seconds.map((s, i) => `${ms(s)} a step, ${percent(rows[i].time_s ? s / rows[i].time_s : 0)} of ${plain(rows[i].name)}`),
      marker: { color, pattern: { shape, fillmode: "replace", size: 6, solidity: 0.4 } },
      hovertemplate: `${named(found)(kind)}: %{customdata}<extra></extra>`,
    };
  });
  return draw(chart, data, {
    barmode: "stack",
    bargap: 0.25,
    xaxis: { title: { text: measure.title }, rangemode: "tozero" },
    yaxis: { autorange: "reversed", showgrid: false },
    legend: { traceorder: "normal" },
  });
}

function overlap({ phases, step_s }) {
  const total = Object.values(phases).reduce((sum, phase) => sum + phase.overlap_s, 0);
  return total < 0.001 * step_s ? [] : [`${ms(total)} a step ran at the same time as other work, and is in both.`];
}

function largest({ rows, rest, steps, step_s, source }, colours) {
  const time = "ms a step";
  const columns = [
    { title: "phase", value: (row) => row.phase, cell: ({ phase }) => el("span", {}, swatch(colours.parts[phase]), phase) },
    { title: "kind", value: (row) => titleOf(row.kind) },
    { title: source === "kernels" ? "kernel" : "operator", value: (row) => row.name, cell: (row) => cut(row.name, "kernel") },
    { title: source === "kernels" ? "operator" : "called by", value: (row) => row.operator, cell: (row) => cut(row.operator, "operator") },
    {
      title: "module",
      value: (row) => row.module,
      text: (row) => `${row.module ?? ""} ${row.module_type ?? ""}`,
      cell: (row) => cut(row.module, "module", row.module_type),
    },
    figure("calls a step", ({ calls }) => calls, (value) => number(value, Number.isInteger(value) ? 0 : 1)),
    figure(time, ({ time_s }) => time_s, (value) => number(value * 1e3, 3)),
    figure("µs a call", ({ time_s, calls }) => time_s / Math.max(calls, 1 / steps), (value) => number(value * 1e6, 1)),
    figure("of the step", ({ time_s }) => time_s / step_s, percent),
  ];
  const long = new LongTable(columns, rows, { by: time, down: true }, "rows");
  const left = rest.rows ? [`${number(rest.rows)} smaller rows are left out, ${ms(rest.total_s / steps)} a step together.`] : [];
  const notes = left.map((text) => el("p", { class: "quiet" }, text));
  return card(source === "kernels" ? "Largest kernels" : "Largest operators", filters(rows, long), long.element, ...notes);
}

const figure = (title, value, show) => ({ title, value, text: (row) => show(value(row)), figure: true });

// One line, the whole in its tip.
// Parts of a kernel's name that tell a reader nothing, as the terminal leaves them out; the tip has the whole name.
const NOISE = /void |\(anonymous namespace\)::|at::native::/g;

function cut(text, column, tip = null) {
  return el("span", { class: `cut ${column}`, title: [text, tip].filter(Boolean).join(" · ") }, (text ?? "").replace(NOISE, ""));
}

function filters(rows, long) {
  const apply = () => {
    const wanted = (select, value) => !select.value || select.value === value;
    long.filter(text.value, (row) => wanted(phase, row.phase) && wanted(kind, row.kind));
  };
  const phase = among("Phase", "all phases", rows.map((row) => row.phase), apply);
  const kind = among("Kind", "all kinds", rows.map((row) => row.kind), apply);
  const text = el("input", { type: "search", placeholder: "Filter by name or module", "aria-label": "Filter", oninput: apply });
  return el("div", { class: "filters" }, phase, kind, text);
}

function among(label, all, values, onchange) {
  const options = [...new Set(values)].map((value) => option(value, titleOf(value)));
  return el("select", { "aria-label": label, onchange }, option("", all), ...options);
}
