// The view Compare: all runs and cells in one table, any two of them side by side, what their steps consist of, and any
// figure against any option.

// What was chosen, kept when the runs are read again.
const chosen = {
  a: null,
  b: null,
  withRepeats: true,
  filter: "",
  status: "",
  sorted: { by: "started", isDescending: true },
  figure: "step_s",
  option: null,
  series: null,
};

async function showCompare(root, { listing, open, place, note }) {
  root.append(...drawn(listing.given ?? []));
  if (!listing.runs.length) {
    root.append(quietLine(`No runs in ${listing.where} yet.`));
    return;
  }
  for (const side of ["a", "b"]) {
    const isThere = listing.runs.some(({ run }) => run === place[side]);
    chosen[side] = isThere ? place[side] : null;
  }
  const options = differingOptions(listing);
  const charts = [phasesChart(listing), figureChart(listing, options)];
  const sides = el("div");
  const compare = () => {
    note({ a: chosen.a, b: chosen.b });
    sides.replaceChildren(twoSides(listing.runs, changed));
  };
  const changed = () => {
    long.render();
    compare();
  };
  const long = new LongTable(runColumns(listing, options, compare, open), listing.runs, chosen.sorted, "runs and cells");
  root.append(card("Runs and cells", runFilters(listing, long, charts), long.element));
  if (isOffline()) root.lastChild.append(quietLine("To compare two runs: ", el("code", {}, "lm_profiler compare A B")));
  else root.append(sides);
  root.append(...charts.map(({ element }) => element));
  if (!isOffline()) compare();
}

// The columns of the options in which the runs differ.
function differingOptions({ columns, options, runs }) {
  const differs = (name) => new Set(runs.map((run) => JSON.stringify(run.values[name]))).size > 1;
  return options.filter(differs).map((name) => columns.find((column) => column.name === name));
}

// -- the table of runs --------------------------------------------------------------------------------------------------

// What stays in place comes first; then what differs.
function runColumns(listing, options, compare, open) {
  const known = listing.columns.filter(({ name }) => listing.runs.some(({ values }) => isKnown(values[name])));
  const named = (names) => known.filter((column) => names.includes(column.name));
  const sides = isOffline() ? [] : ["a", "b"].map((side) => sideColumn(side, compare));
  const reason = ({ values }) => values.reason ?? "";
  const started = ({ values }) => (values.started ? String(values.started).slice(0, 16).replace("T", " ") : UNKNOWN);
  return [
    ...sides,
    { title: "run", width: 250, value: ({ label }) => label, text: ({ run }) => run, cell: (run) => runLink(run, open) },
    ...named(listing.headline).map((column) => ({ ...figureColumn(column), width: 104 })),
    { title: "status", width: 86, value: ({ values }) => values.status, cell: ({ values }) => pill(values.status) },
    ...options.map(factColumn),
    ...named(listing.table).map((column) => (column.shown === null ? factColumn(column) : figureColumn(column))),
    ...(named(["reason"]).length ? [{ title: "why", value: reason, cell: (run) => clipped(reason(run)) }] : []),
    { title: "started", value: ({ values }) => values.started, text: started },
  ];
}

// Radio buttons. Without a measured step there is nothing to compare.
function sideColumn(side, compare) {
  const cell = ({ run, values }) => {
    const onchange = () => {
      chosen[side] = run;
      compare();
    };
    const isChosen = chosen[side] === run;
    const label = `${run} as ${side.toUpperCase()}`;
    const isDisabled = !isKnown(values.step_s);
    return el("input", { type: "radio", name: side, "aria-label": label, checked: isChosen && "", disabled: isDisabled && "", onchange });
  };
  return { title: side.toUpperCase(), width: 30, value: () => null, text: () => "", cell };
}

// A link, so that it can be opened in a window of its own, copied and sent.
function runLink({ run, label }, open) {
  const onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open(run, "Run");
  };
  const href = addressOf({ run, view: "Run" });
  return el("a", { class: "name", "aria-label": run, title: run, href, target: "_parent", onclick }, label);
}

function factColumn({ name, title, meaning }) {
  const text = ({ values }) => settingText(values[name]);
  return { title, tip: meaning, value: ({ values }) => values[name], text, cell: (run) => clipped(text(run)) };
}

function figureColumn({ name, title, meaning, shown }) {
  const isBytes = shown.unit === "GiB"; // each in the unit that fits it
  const withoutUnit = isBytes ? shown : { ...shown, unit: "" };
  const text = ({ values }) => {
    // As in the terminal's table: a phase without a time did not occur, and of a run that failed nobody expects one.
    const isLeftOut = !isKnown(values[name]) && (shown.unit === "ms" || values.status !== "ok");
    return isLeftOut ? "" : figureText(values[name], withoutUnit);
  };
  const cell = (run) => {
    const interval = run.intervals[name]?.map((end) => figureText(end, shown)).join(" to ");
    return el("span", { class: !isKnown(run.values[name]) && "quiet", title: interval && `95 % interval ${interval}` }, text(run));
  };
  const hasUnit = shown.unit && shown.unit !== title && !isBytes;
  return { title: hasUnit ? `${title} (${shown.unit})` : title, tip: meaning, isFigure: true, value: ({ values }) => values[name], text, cell };
}

function runFilters({ runs }, long, charts) {
  const apply = () => {
    Object.assign(chosen, { filter: text.value, status: status.value });
    long.filter(text.value, (run) => !status.value || run.values.status === status.value);
    for (const chart of charts) chart.update(long.found);
  };
  const text = el("input", { type: "search", placeholder: "Filter by any words", "aria-label": "Filter", value: chosen.filter, oninput: apply });
  const statuses = [...new Set(runs.map((run) => run.values.status))].sort();
  const options = statuses.map((status) => option(status, status, status === chosen.status));
  const status = el("select", { "aria-label": "Status", onchange: apply }, option("", "any status"), ...options);
  apply();
  return el("div", { class: "filters" }, text, status);
}

// -- two sides ----------------------------------------------------------------------------------------------------------

// B against A, as `lm_profiler compare` has it; `changed` is called when the choice changes.
function twoSides(runs, changed) {
  const { a, b } = chosen;
  if (!a || !b || a === b) {
    return card("B against A", quietLine("Choose one run as A and another one as B in the table above."));
  }
  const change = (changes) => {
    Object.assign(chosen, changes);
    changed();
  };
  const [repeatsA, repeatsB] = repeatsOfBoth(runs, a, b);
  const filters = [
    el("p", {}, el("b", {}, "A: "), a, el("br"), el("b", {}, "B: "), b),
    button("Swap", () => change({ a: b, b: a }), { class: "plain" }),
  ];
  if (repeatsA.length + repeatsB.length > 2) {
    const text = `with all repeats (${repeatsA.length} and ${repeatsB.length} runs)`;
    const onchange = ({ target }) => change({ withRepeats: target.checked });
    filters.push(el("label", {}, el("input", { type: "checkbox", checked: chosen.withRepeats && "", onchange }), text));
  }
  const body = el("div", {}, quietLine("Comparing …"));
  const [runsA, runsB] = chosen.withRepeats ? [repeatsA, repeatsB] : [[a], [b]];
  compareInto(body, [...runsA.map((run) => ["a", run]), ...runsB.map((run) => ["b", run])]);
  return card("B against A", el("div", { class: "filters" }, ...filters), body);
}

// All runs of A's cell and of B's; of two repeats of one cell these alone.
function repeatsOfBoth(runs, a, b) {
  const [pointA, pointB] = [a, b].map((name) => runs.find(({ run }) => run === name).point);
  const repeats = (name, point) => {
    if (point === null || pointA === pointB) return [name];
    return runs.filter((run) => run.point === point && run.stamp !== null).map(({ run }) => run);
  };
  return [repeats(a, pointA), repeats(b, pointB)];
}

async function compareInto(body, query) {
  try {
    const { blocks } = await ask("compare", query);
    body.replaceChildren(...drawn(blocks));
  } catch (error) {
    body.replaceChildren(el("p", { class: "error" }, error.message));
  }
}

// -- where a step's time goes: a bar for each run -----------------------------------------------------------------------

const MOST_BARS = 40; // bars that can be told apart

// A chart of the runs that `update` is given.
function phasesChart({ parts, colours }) {
  const place = el("div");
  const note = quietLine();
  const element = card("Where a step’s time goes", note, place);
  const update = (runs) => {
    const timed = runs.filter(({ values }) => Object.values(parts).some((name) => values[name]));
    const shown = timed.slice(0, MOST_BARS);
    element.hidden = !shown.length;
    const texts = ["Means of the phases, which add up to the mean step."];
    if (shown.some(({ values }) => values.waiting_s)) texts.push("With several ranks, phases include waiting, which the Ranks view separates.");
    if (timed.length > MOST_BARS) texts.push(`The first ${MOST_BARS} of the table’s ${number(timed.length)} runs.`);
    note.textContent = texts.join(" ");
    place.replaceChildren(chartElement(phaseBars(shown, parts, colours), rowsLayout(shown, "time of a step (ms)")));
  };
  return { element, update };
}

function phaseBars(runs, parts, colours) {
  const occurring = Object.entries(parts).filter(([, name]) => runs.some(({ values }) => values[name]));
  return occurring.map(([part, name]) => ({
    type: "bar",
    orientation: "h",
    name: part,
    y: runs.map((_, row) => row), // two runs may look alike
    x: runs.map(({ values }) => (values[name] ?? 0) * 1e3),
    customdata: runs.map(({ run, values }) => `${number(values.step_s * 1e3, 3)} ms<br>${chartText(run)}`),
    marker: { color: colours.parts[part] },
    hovertemplate: `${part}: %{x:.3f} of %{customdata}<extra></extra>`,
  }));
}

function rowsLayout(runs, title) {
  const rows = runs.map((_, row) => row);
  const labels = runs.map(({ label }) => wrapped(label).map(chartText).join("<br>"));
  const lines = labels.reduce((sum, text) => sum + text.split("<br>").length, 0);
  return {
    height: 110 + 12 * runs.length + 16 * lines,
    barmode: "stack",
    bargap: 0.25,
    xaxis: { title: { text: title }, rangemode: "tozero" },
    yaxis: { autorange: "reversed", showgrid: false, zeroline: false, tickvals: rows, ticktext: labels },
  };
}

// Lines of a name: names of cells differ anywhere, so nothing of them is left out.
function wrapped(name) {
  return name.match(/.{1,36}(?:[,/]|$)|.{1,36}/gu) ?? [""];
}

// -- any figure against any option --------------------------------------------------------------------------------------

const MARKERS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "star", "hexagon", "cross"];

// A chart of the runs that `update` is given; runs without the figure (out of memory, failed) are marked on the axis.
function figureChart({ columns, runs: allRuns, colours }, options) {
  const figures = columns.filter(({ name, shown }) => shown && allRuns.some(({ values }) => isKnown(values[name])));
  if (!options.length || !figures.length) {
    const why = options.length ? "No run has a figure yet." : "These runs have the same options, so none can be the horizontal axis.";
    return { element: card("Figure against option", quietLine(why)), update() {} };
  }
  const pick = (choices, name) => choices.find((choice) => choice.name === name) ?? null;
  chosen.option = (pick(options, chosen.option) ?? mostVaried(options, allRuns)).name;
  const place = el("div");
  let runs = [];
  const render = () => {
    const figure = pick(figures, chosen.figure) ?? figures[0];
    const axis = pick(options, chosen.option);
    place.replaceChildren(figureChartElement(runs, figure, axis, pick(options, chosen.series), colours));
  };
  const select = (label, key, choices) => {
    const onchange = ({ target }) => {
      chosen[key] = target.value;
      render();
    };
    const titles = choices.map(({ name, title }) => option(name, title, name === chosen[key]));
    return el("label", {}, label, el("select", { "aria-label": label, onchange }, ...titles));
  };
  const series = [{ name: "", title: "no series" }, ...options];
  const choosers = [select("Figure", "figure", figures), select("against", "option", options), select("by", "series", series)];
  const update = (found) => {
    runs = found;
    render();
  };
  return { element: card("Figure against option", el("div", { class: "filters" }, ...choosers), place), update };
}

function mostVaried(options, runs) {
  const count = ({ name }) => new Set(runs.map(({ values }) => settingText(values[name]))).size;
  return options.reduce((best, option) => (count(option) > count(best) ? option : best));
}

function figureChartElement(runs, askedFigure, axis, series, colours) {
  const figure = inFittingUnit(askedFigure, runs);
  const placeOf = ({ values }) => chartText(settingText(values[axis.name]));
  const places = [...new Set(runs.map(placeOf))].sort(inOrder);
  const withFigure = runs.filter(({ values }) => isKnown(values[figure.name]));
  const valueOf = ({ values }) => (series ? settingText(values[series.name]) : null);
  const seriesValues = [...new Set(withFigure.map(valueOf))].sort(inOrder);
  const colour = colours.parts[figure.name.replace(/(_host)?_s$/, "")] ?? colours.series[0];
  const palette = series ? colours.series : [colour];
  const data = seriesValues.map((value, i) => {
    const ofSeries = withFigure.filter((run) => valueOf(run) === value);
    ofSeries.sort((run, other) => places.indexOf(placeOf(run)) - places.indexOf(placeOf(other)));
    const name = series ? chartText(`${series.title} ${value}`) : figure.title;
    return { ...figurePoints(ofSeries, figure, placeOf), name, line: { color: palette[i % palette.length] }, marker: { color: palette[i % palette.length], symbol: MARKERS[i % MARKERS.length], size: 9 } };
  });
  const { unit } = figure.shown;
  return chartElement([...data, ...failedPoints(runs, figure, placeOf, colours)], {
    height: 360,
    showlegend: true,
    xaxis: { title: { text: chartText(axis.title) }, type: "category", categoryorder: "array", categoryarray: places },
    yaxis: { title: { text: unit && unit !== figure.title ? `${figure.title} (${unit})` : figure.title }, rangemode: "tozero" },
  });
}

// Bytes in the unit that fits the largest of them.
function inFittingUnit(figure, runs) {
  if (figure.shown.unit !== "GiB") return figure;
  const [unit, size] = byteUnit(Math.max(0, ...runs.map(({ values }) => values[figure.name] ?? 0)));
  return { ...figure, shown: { unit, scale: 1 / size, digits: 2 } };
}

// Joined by lines if each place has one.
function figurePoints(runs, { name, shown }, placeOf) {
  const places = runs.map(placeOf);
  const reach = (end) => runs.map(({ values, intervals }) => shown.scale * Math.abs((intervals[name]?.[end] ?? values[name]) - values[name]));
  return {
    type: "scatter",
    mode: new Set(places).size === places.length ? "lines+markers" : "markers",
    x: places,
    y: runs.map(({ values }) => values[name] * shown.scale),
    error_y: { type: "data", symmetric: false, array: reach(1), arrayminus: reach(0) },
    customdata: runs.map(({ run }) => chartText(run)),
    hovertemplate: `%{y:,.${shown.digits}f} ${shown.unit}<br>%{customdata}<extra></extra>`,
  };
}

// Crosses at the foot, with the word of what became of those runs.
function failedPoints(runs, { name }, placeOf, { pale }) {
  const places = new Map();
  for (const run of runs.filter(({ values }) => !isKnown(values[name]))) {
    places.set(placeOf(run), [...(places.get(placeOf(run)) ?? []), run]);
  }
  if (!places.size) return [];
  const groups = [...places.values()];
  const word = ({ values }) => (values.status === "ok" ? UNKNOWN : values.status);
  return [
    {
      type: "scatter",
      mode: "markers+text",
      name: "no figure",
      x: [...places.keys()],
      y: groups.map(() => 0),
      text: groups.map((group) => [...new Set(group.map(word))].join(", ")),
      textposition: "top center",
      customdata: groups.map((group) => group.map((run) => chartText(`${run.run}: ${word(run)}`)).join("<br>")),
      marker: { symbol: "x", color: pale, size: 10 },
      cliponaxis: false,
      hovertemplate: "%{customdata}<extra></extra>",
    },
  ];
}
