"use strict";
// Sorts and filters what the page holds already, and draws its charts. No text of a run ever becomes markup.

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");

// -- table --------------------------------------------------------------------------------------------------------

function sortBy(header) {
  const table = header.closest("table");
  const at = [...header.parentNode.children].indexOf(header);
  const up = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = (row) => row.children[at].dataset.value ?? row.children[at].textContent;
  const rows = [...table.tBodies[0].rows].sort((a, b) => order(key(a), key(b), up));
  table.tBodies[0].append(...rows);
}

// Numbers by size, the rest by letter; what is empty comes last either way.
function order(a, b, up) {
  if (!a || !b) return Number(!a) - Number(!b);
  const numbers = !Number.isNaN(Number(a)) && !Number.isNaN(Number(b));
  const found = numbers ? Number(a) - Number(b) : a.localeCompare(b);
  return up ? found : -found;
}

function filter(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = (element) => words.every((word) => element.textContent.toLowerCase().includes(word));
  for (const element of document.querySelectorAll("tbody tr, .runs details")) element.hidden = !wanted(element);
}

for (const header of document.querySelectorAll("th")) {
  header.querySelector("button").addEventListener("click", () => sortBy(header));
}
document.getElementById("filter").addEventListener("input", (event) => filter(event.target.value));

// -- charts -------------------------------------------------------------------------------------------------------

// Plotly reads tags and links in its texts: escaped, they stay text.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function layout(over) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = (extra) => ({ gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line"),
    automargin: true, ...extra });
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("--text") },
    hoverlabel: { bgcolor: colour("--raised"), font: { color: colour("--text") } },
    margin: { l: 60, r: 16, t: 8, b: 44 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
    ...over,
    xaxis: axis(over.xaxis),
    yaxis: axis(over.yaxis),
  };
}

function draw(id, traces, over) {
  const root = document.getElementById(id);
  if (over.height) root.style.height = `${over.height}px`;
  Plotly.react(root, traces, layout(over), { responsive: true, displaylogo: false });
}

const error = (points, colour) => ({
  type: "data",
  symmetric: false,
  array: points.map((p) => (p && p[2] !== null ? p[2] - p[0] : 0)),
  arrayminus: points.map((p) => (p && p[1] !== null ? p[0] - p[1] : 0)),
  color: colour,
});

function drawPhases() {
  const { groups, title } = data.phases;
  const rows = groups.map((_, row) => row);
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--text").trim();
  const bars = data.parts.filter(({ name }) => groups.some((group) => group.parts[name])).map(({ name, colour }) => ({
    type: "bar", orientation: "h", name, y: rows, x: groups.map((group) => group.parts[name] ?? 0),
    marker: { color: colour }, hovertemplate: `${name} %{x:.4~g} ms<extra></extra>`,
  }));
  const steps = groups.map((group) => group.step);
  bars.push({
    type: "scatter", mode: "markers", name: "step, with interval", y: rows, x: steps.map((step) => step?.[0] ?? 0),
    error_x: error(steps, ink), marker: { symbol: "line-ns-open", size: 12, color: ink },
    cliponaxis: false, hovertemplate: "step %{x:.4~g} ms<extra></extra>",
  }, {
    type: "scatter", mode: "text", y: rows, x: steps.map((step) => step?.[2] ?? step?.[0] ?? 0), showlegend: false,
    text: groups.map((group) => ` ${group.step ? `${group.step[0].toPrecision(4)} ms ` : ""}${plain(group.trouble)}`),
    textposition: "middle right", cliponaxis: false, hoverinfo: "skip",
  });
  const widest = Math.max(1e-9, ...steps.map((step) => (step ? Math.max(step[0], step[2] ?? 0) : 0)));
  draw("phases", bars, {
    barmode: "stack", bargap: 0.3, height: 130 + Math.min(30 * groups.length, 4000),
    xaxis: { title: { text: "time of a step (ms): medians of its phases, scaled to end at the median step" }, range: [0, 1.18 * widest] },
    yaxis: { autorange: "reversed", showgrid: false, tickvals: rows, ticktext: groups.map((group) => plain(group.label)),
      title: { text: plain(title), standoff: 12 } },
  });
}

function drawFigure(id) {
  const chart = data[id];
  const traces = chart.lines.map((line, at) => {
    const known = line.points.map((point, n) => [chart.ticks.places[line.at[n]], point]).filter(([, point]) => point);
    const colour = data.series[at % data.series.length];
    return {
      type: "scatter", mode: chart.ticks.numbers ? "lines+markers" : "markers", name: plain(line.label),
      x: known.map(([place]) => place), y: known.map(([, point]) => point[0]),
      error_y: error(known.map(([, point]) => point), colour),
      line: { color: colour, dash: ["solid", "dash", "dot"][Math.floor(at / data.series.length) % 3] },
      marker: { color: colour, size: 8, symbol: ["circle", "square", "diamond", "cross", "triangle-up", "x"][at % 6] },
      hovertemplate: "%{y:.4~g}<extra>%{fullData.name}</extra>",
    };
  });
  const absent = chart.lines.flatMap((line) => line.absent.map((word, n) => ({ line, word, n })))
    .filter(({ line, n }) => !line.points[n]);
  if (absent.length) traces.push({
    type: "scatter", mode: "markers", name: "no figure", x: absent.map(({ line, n }) => chart.ticks.places[line.at[n]]),
    y: absent.map(() => 0), marker: { symbol: "x-thin-open", size: 9, color: data.pale }, cliponaxis: false,
    text: absent.map(({ line, word }) => plain(`${line.label ? `${line.label}: ` : ""}${word}`)),
    hovertemplate: "%{text}<extra></extra>",
  });
  draw(id, traces, {
    showlegend: traces.length > 1, height: 380,
    xaxis: { title: { text: plain(chart.title) }, type: chart.ticks.log ? "log" : "linear", tickmode: "array",
      tickvals: chart.ticks.places, ticktext: chart.ticks.labels.map(plain) },
    yaxis: { title: { text: chart.unit }, rangemode: "tozero" },
  });
}

function drawSteps() {
  const run = data.runs[document.getElementById("run").selectedIndex];
  const [first, warm] = [run.steps[0] - 0.5, run.warmup];
  const band = (from, count, opacity) => ({ type: "rect", yref: "paper", y0: 0, y1: 1, x0: from, x1: from + count,
    line: { width: 0 }, fillcolor: data.pale, opacity, layer: "below" });
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--text").trim();
  const sorted = [...run.ms].sort((a, b) => a - b);
  // No step is left out: where one would press the others flat, the axis is logarithmic.
  const log = sorted[0] > 0 && sorted.at(-1) > 3 * sorted[sorted.length >> 1];
  draw("steps", [{ type: "scatter", mode: "lines+markers", x: run.steps, y: run.ms, line: { color: ink, width: 1 },
    marker: { size: 4 }, hovertemplate: "step %{x}: %{y:.4~g} ms<extra></extra>" }], {
    height: 340, shapes: [band(first, warm, 0.35), band(first + warm, run.cut, 0.18)],
    xaxis: { title: { text: "step" } },
    yaxis: { title: { text: `time of the step (ms${log ? ", log scale" : ""})` }, type: log ? "log" : "linear",
      rangemode: "tozero", dtick: log ? "D2" : undefined },
  });
}

function drawAll() {
  if (data.phases) drawPhases();
  for (const id of ["memory", "tokens", "mfu"]) if (data[id]) drawFigure(id);
  if (data.runs.length) drawSteps();
}

document.getElementById("run")?.addEventListener("change", drawSteps);
dark.addEventListener("change", drawAll);
drawAll();
