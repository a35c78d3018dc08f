// All runs and cells in one table, any two of them side by side, and any figure against any option.
import { button, card, el, option } from "./dom.js";
import { scatter } from "./scatter.js";
import { sides } from "./sides.js";
import { LongTable } from "./table.js";
import { setting, show as shown, UNKNOWN } from "./units.js";

export const title = "Compare";
export const ofRun = false;

const FIGURES = ["step_s", "forward_s", "backward_s", "tokens_per_s", "mfu", "allocated_peak_bytes", "resident_peak_bytes"];

// What was chosen, kept when the runs are read again.
const kept = {
  a: null,
  b: null,
  repeats: true,
  text: "",
  status: "",
  sorted: { by: "started", down: true },
  figure: "step_s",
  x: null,
  series: null,
};

export async function show(root, { listing, colours, open }) {
  if (!listing.runs.length) {
    root.append(el("p", { class: "quiet" }, `No runs below ${listing.logdir} yet.`));
    return;
  }
  for (const side of ["a", "b"]) if (!listing.runs.some(({ run }) => run === kept[side])) kept[side] = null;
  const options = swept(listing);
  const chart = scatter(listing, options, colours, kept);
  const against = el("div");
  const compare = () => {
    against.replaceChildren(sides(kept, listing.runs, colours, changed));
  };
  const changed = () => {
    long.render();
    compare();
  };
  const long = new LongTable(columns(listing, options, compare, open), listing.runs, kept.sorted, "runs and cells");
  root.append(card("Runs and cells", filters(listing, long, chart), long.element), against, chart.element);
  compare();
}

// The columns of the options in which the runs differ.
function swept({ columns, options, runs }) {
  const differs = (name) => new Set(runs.map((run) => JSON.stringify(run.values[name]))).size > 1;
  return columns.filter(({ name }) => options.includes(name) && differs(name));
}

function columns(listing, options, compare, open) {
  const known = ({ name }) => listing.runs.some((run) => (run.values[name] ?? null) !== null);
  const figures = FIGURES.map((name) => listing.columns.find((column) => column.name === name));
  return [
    ...["a", "b"].map((side) => ({ title: side.toUpperCase(), value: () => null, cell: (run) => choice(side, run, compare) })),
    { title: "run", value: ({ run }) => run, cell: (run) => name(run, open) },
    {
      title: "status",
      value: ({ values }) => values.status,
      text: ({ values }) => `${values.status} ${values.reason ?? ""}`,
      cell: ({ values }) => el("span", { class: `status ${values.status}`, title: values.reason }, values.status),
    },
    ...options.map(({ name, title }) => ({ title, value: ({ values }) => values[name], text: ({ values }) => setting(values[name]) })),
    ...figures.filter(known).map(figure),
    { title: "started", value: ({ values }) => values.started, text: ({ values }) => day(values.started) },
  ];
}

const day = (iso) => (iso ? iso.slice(0, 16).replace("T", " ") : UNKNOWN);

// Without a measured step there is nothing to compare.
function choice(side, { run, values }, compare) {
  const choose = () => {
    kept[side] = run;
    compare();
  };
  const disabled = (values.step_s ?? null) === null && "";
  const attributes = { name: side, "aria-label": `${run} as ${side.toUpperCase()}`, checked: kept[side] === run && "" };
  return el("input", { type: "radio", ...attributes, disabled, onchange: choose });
}

function name({ run, stamp }, open) {
  const pieces = run.split(/(?<=[/,])/).flatMap((piece) => [el("wbr"), piece]); // a line breaks there, not within a word
  const path = el("span", { class: "path" }, ...pieces);
  return stamp === null ? path : button(path, () => open(run, "Run"), { class: "name" });
}

function figure({ name, title, shown: unit }) {
  const bare = { ...unit, unit: "" };
  const isKnown = (values) => (values[name] ?? null) !== null;
  // As in the terminal's table: a phase without a time did not occur, and of a run that ended badly nobody expects one.
  const isLeftOut = (values) => !isKnown(values) && (unit.unit === "ms" || values.status !== "ok");
  const text = ({ values }) => (isLeftOut(values) ? "" : shown(values[name], bare));
  return {
    title: unit.unit && unit.unit !== title ? `${title} (${unit.unit})` : title,
    figure: true,
    value: ({ values }) => values[name],
    text,
    cell: (run) => {
      const interval = run.intervals[name]?.map((end) => shown(end, unit)).join(" to ");
      return el("span", { class: !isKnown(run.values) && "quiet", title: interval && `95 % interval ${interval}` }, text(run));
    },
  };
}

function filters({ runs }, long, chart) {
  const apply = () => {
    Object.assign(kept, { text: text.value, status: status.value });
    long.filter(text.value, (run) => !status.value || run.values.status === status.value);
    chart.update(long.found);
  };
  const text = el("input", { type: "search", placeholder: "Filter by any words", "aria-label": "Filter", value: kept.text, oninput: apply });
  const statuses = [...new Set(runs.map((run) => run.values.status))].sort();
  const options = statuses.map((each) => option(each, each, each === kept.status));
  const status = el("select", { "aria-label": "Status", onchange: apply }, option("", "any status"), ...options);
  apply();
  return el("div", { class: "filters" }, text, status);
}
