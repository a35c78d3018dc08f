// All runs and cells in one table, any two of them side by side, what their steps consist of, and any figure against any
// option.
import { isOffline } from "./api.js";
import { card, el, middle, option } from "./dom.js";
import { phases } from "./phases.js";
import { scatter } from "./scatter.js";
import { sides } from "./sides.js";
import { LongTable } from "./table.js";
import { addressOf } from "./tensorboard.js";
import { setting, show as shown, UNKNOWN } from "./units.js";

export const title = "Compare";
export const ofRun = false;

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

export async function show(root, { listing, colours, open, place, note }) {
  root.append(...given(listing.given));
  if (!listing.runs.length) {
    root.append(el("p", { class: "quiet" }, `No runs in ${listing.where} yet.`));
    return;
  }
  for (const side of ["a", "b"]) kept[side] = listing.runs.some(({ run }) => run === place[side]) ? place[side] : null;
  const options = swept(listing);
  const charts = [phases(listing, colours), scatter(listing, options, colours, kept)];
  const against = el("div", { hidden: isOffline() && "" });
  const compare = () => {
    if (isOffline()) return;
    note({ a: kept.a, b: kept.b });
    against.replaceChildren(sides(kept, listing.runs, colours, changed));
  };
  const changed = () => {
    long.render();
    compare();
  };
  const long = new LongTable(columns(listing, options, compare, open), listing.runs, kept.sorted, "runs and cells");
  root.append(card("Runs and cells", filters(listing, long, charts), long.element, ...hint()), against, ...charts.map(({ element }) => element));
  compare();
}

function hint() {
  return isOffline() ? [el("p", { class: "quiet" }, "To compare two runs: ", el("code", {}, "lm_profiler compare A B"))] : [];
}

// A table that was asked for by itself, with the lines around it: of a page alone.
function given(table) {
  if (!table) return [];
  const { title, headings, rows, values, above, below, verbatim } = table;
  const columns = headings.map(({ title, figure }, i) => ({ title, figure, value: (row) => values[row][i], text: (row) => rows[row][i] }));
  const lines = (texts) => texts.map((text) => el("p", { class: "quiet" }, text));
  const over = verbatim ? [el("pre", {}, above.join("\n"))] : lines(above);
  const shown = [...over, ...(columns.length ? [new LongTable(columns, [...rows.keys()], {}, "rows").element] : []), ...lines(below)];
  return shown.length ? [card(title || (columns.length ? "Table" : "Notes"), ...shown)] : [];
}

// The columns of the options in which the runs differ.
function swept({ columns, options, runs }) {
  const differs = (name) => new Set(runs.map((run) => JSON.stringify(run.values[name]))).size > 1;
  return options.filter(differs).map((name) => columns.find((column) => column.name === name));
}

// What stays in place comes first; then what differs.
function columns(listing, options, compare, open) {
  const known = listing.columns.filter(({ name }) => listing.runs.some(({ values }) => isKnown(values[name])));
  const at = (names) => known.filter((column) => names.includes(column.name));
  const choices = (side) => ({ title: side.toUpperCase(), width: 30, value: () => null, cell: (run) => choice(side, run, compare) });
  return [
    ...(isOffline() ? [] : ["a", "b"].map(choices)),
    { title: "run", width: 270, value: ({ run }) => run, cell: (run) => name(run, open) },
    ...at(listing.headline).map((column) => ({ ...figure(column), width: 112 })),
    {
      title: "status",
      width: 86,
      value: ({ values }) => values.status,
      cell: ({ values }) => el("span", { class: `status ${values.status}`, title: values.reason }, values.status),
    },
    ...options.map(fact),
    ...at(listing.table).map((column) => (column.shown === null ? fact(column) : figure(column))),
    ...(known.some(({ name }) => name === "reason") ? [{ title: "why", value: why, cell: (run) => cut(why(run)) }] : []),
    { title: "started", value: ({ values }) => values.started, text: ({ values }) => day(values.started) },
  ];
}

function fact({ name, title, meaning }) {
  const text = ({ values }) => setting(values[name]);
  return { title, tip: meaning, value: ({ values }) => values[name], text, cell: (run) => cut(text(run)) };
}

const cut = (text) => el("span", { class: "cut fact", title: text }, text);

const isKnown = (value) => (value ?? null) !== null;
const why = ({ values }) => values.reason ?? "";

const day = (iso) => (iso ? String(iso).slice(0, 16).replace("T", " ") : UNKNOWN);

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

// A link, so that it can be opened in a window of its own, copied and sent.
function name({ run }, open) {
  const follow = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open(run, "Run");
  };
  const href = addressOf({ run, view: "Run" });
  return el("a", { class: "name", "aria-label": run, href, target: "_parent", onclick: follow }, middle(run));
}

function figure({ name, title, meaning, shown: unit }) {
  const inBytes = unit.unit === "GiB"; // each in the unit that fits it
  const bare = inBytes ? unit : { ...unit, unit: "" };
  // As in the terminal's table: a phase without a time did not occur, and of a run that ended badly nobody expects one.
  const isLeftOut = (values) => !isKnown(values[name]) && (unit.unit === "ms" || values.status !== "ok");
  const text = ({ values }) => (isLeftOut(values) ? "" : shown(values[name], bare));
  return {
    title: unit.unit && unit.unit !== title && !inBytes ? `${title} (${unit.unit})` : title,
    tip: meaning,
    figure: true,
    value: ({ values }) => values[name],
    text,
    cell: (run) => {
      const interval = run.intervals[name]?.map((end) => shown(end, unit)).join(" to ");
      return el("span", { class: !isKnown(run.values[name]) && "quiet", title: interval && `95 % interval ${interval}` }, text(run));
    },
  };
}

function filters({ runs }, long, charts) {
  const apply = () => {
    Object.assign(kept, { text: text.value, status: status.value });
    long.filter(text.value, (run) => !status.value || run.values.status === status.value);
    for (const chart of charts) chart.update(long.found);
  };
  const text = el("input", { type: "search", placeholder: "Filter by any words", "aria-label": "Filter", value: kept.text, oninput: apply });
  const statuses = [...new Set(runs.map((run) => run.values.status))].sort();
  const options = statuses.map((each) => option(each, each, each === kept.status));
  const status = el("select", { "aria-label": "Status", onchange: apply }, option("", "any status"), ...options);
  apply();
  return el("div", { class: "filters" }, text, status);
}
