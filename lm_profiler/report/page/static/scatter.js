// A chart of any figure against any option; what left no figure (out of memory, failed) is marked on the axis.
import { draw, plain } from "./charts.js";
import { card, el, option } from "./dom.js";
import { setting, unitOf } from "./units.js";

const MARKERS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "star", "hexagon", "cross"];
const inOrder = new Intl.Collator("en", { numeric: true }).compare;

// `kept` holds the names of figure, x and series. Draws the runs that `update` is given.
export function scatter(listing, options, colours, kept) {
  const figures = listing.columns.filter(({ name, shown }) => shown && listing.runs.some(({ values }) => known(values[name])));
  if (!options.length || !figures.length) {
    const why = options.length ? "No run has a figure yet." : "These runs have the same options: there is nothing to draw against.";
    return { element: card("Figure against option", el("p", { class: "quiet" }, why)), update() {} };
  }
  const pick = (choices, name) => choices.find((each) => each.name === name) ?? null;
  kept.x = (pick(options, kept.x) ?? mostValued(options, listing.runs)).name;
  let runs = [];
  const chart = el("div", { class: "chart" });
  const render = () => {
    const chosen = { figure: pick(figures, kept.figure) ?? figures[0], x: pick(options, kept.x), series: pick(options, kept.series) };
    requestAnimationFrame(() => drawRuns(chart, runs, chosen, colours));
  };
  const select = (label, key, choices) => {
    const choose = () => {
      kept[key] = chooser.value;
      render();
    };
    const chooser = el("select", { "aria-label": label, onchange: choose });
    chooser.append(...choices.map(({ name, title }) => option(name, title, name === kept[key])));
    return el("label", {}, label, chooser);
  };
  const none = { name: "", title: "no series" };
  const chooser = [select("Figure", "figure", figures), select("against", "x", options), select("by", "series", [none, ...options])];
  const update = (found) => {
    runs = found;
    render();
  };
  return { element: card("Figure against option", el("div", { class: "filters" }, ...chooser), chart), update };
}

const known = (value) => (value ?? null) !== null;

function mostValued(options, runs) {
  const count = ({ name }) => new Set(runs.map(({ values }) => setting(values[name]))).size;
  return options.reduce((best, each) => (count(each) > count(best) ? each : best));
}

function drawRuns(chart, runs, { figure: asked, x, series }, colours) {
  const figure = fitted(asked, runs);
  const placeOf = ({ values }) => plain(setting(values[x.name]));
  const places = [...new Set(runs.map(placeOf))].sort(inOrder);
  const withFigure = runs.filter(({ values }) => known(values[figure.name]));
  const names = series ? [...new Set(withFigure.map(({ values }) => setting(values[series.name])))].sort(inOrder) : [null];
  const palette = series ? colours.series : [colours.parts[figure.name.replace(/(_host)?_s$/, "")] ?? colours.series[0]];
  const data = names.map((name, i) => {
    const mine = withFigure.filter(({ values }) => name === null || setting(values[series.name]) === name);
    mine.sort((one, other) => places.indexOf(placeOf(one)) - places.indexOf(placeOf(other)));
    const look = { color: palette[i % palette.length], symbol: MARKERS[i % MARKERS.length] };
    return { ...points(mine, figure, placeOf, look), name: name === null ? figure.title : plain(`${series.title} ${name}`) };
  });
  const { unit } = figure.shown;
  return draw(chart, [...data, ...without(runs, figure, placeOf, colours)], {
    showlegend: true,
    xaxis: { title: { text: plain(x.title) }, type: "category", categoryorder: "array", categoryarray: places },
    yaxis: { title: { text: unit && unit !== figure.title ? `${figure.title} (${unit})` : figure.title }, rangemode: "tozero" },
  });
}

// Bytes in the unit that fits the largest of them.
function fitted(figure, runs) {
  if (figure.shown.unit !== "GiB") return figure;
  const [unit, size] = unitOf(Math.max(0, ...runs.map(({ values }) => values[figure.name] ?? 0)));
  return { ...figure, shown: { unit, scale: 1 / size, digits: 2 } };
}

// Joined by lines where there is one at each place.
function points(runs, { name, shown }, placeOf, { color, symbol }) {
  const places = runs.map(placeOf);
  const ends = (end) => runs.map(({ values, intervals }) => shown.scale * Math.abs((intervals[name]?.[end] ?? values[name]) - values[name]));
  return {
    type: "scatter",
    mode: new Set(places).size === places.length ? "lines+markers" : "markers",
    x: places,
    y: runs.map(({ values }) => values[name] * shown.scale),
    error_y: { type: "data", symmetric: false, array: ends(1), arrayminus: ends(0) },
    customdata: runs.map(({ run }) => plain(run)),
    marker: { color, symbol, size: 9 },
    line: { color },
    hovertemplate: `%{y:,.${shown.digits}f} ${shown.unit}<br>%{customdata}<extra></extra>`,
  };
}

// Crosses at the foot, with the word of what became of those runs.
function without(runs, { name }, placeOf, { pale }) {
  const places = new Map();
  for (const run of runs.filter(({ values }) => !known(values[name]))) {
    places.set(placeOf(run), [...(places.get(placeOf(run)) ?? []), run]);
  }
  if (!places.size) return [];
  const found = [...places.values()];
  const word = ({ values }) => (values.status === "ok" ? "unknown" : values.status);
  return [
    {
      type: "scatter",
      mode: "markers+text",
      name: "no figure",
      x: [...places.keys()],
      y: found.map(() => 0),
      text: found.map((there) => [...new Set(there.map(word))].join(", ")),
      textposition: "top center",
      customdata: found.map((there) => there.map((run) => plain(`${run.run}: ${word(run)}`)).join("<br>")),
      marker: { symbol: "x", color: pale, size: 10 },
      cliponaxis: false,
      hovertemplate: "%{customdata}<extra></extra>",
    },
  ];
}
