// Where a step's time goes, of several runs: a bar a run, cut into its phases.
import { draw, plain } from "./charts.js";
import { card, el } from "./dom.js";
import { ms, number } from "./units.js";

const MOST = 40; // bars that can be told apart

// Draws the first of the runs that `update` is given.
export function phases({ parts }, colours) {
  const chart = el("div", { class: "chart" });
  const note = el("p", { class: "quiet" });
  const element = card("Where a step’s time goes", note, chart);
  const update = (runs) => {
    const timed = runs.filter(({ values }) => Object.values(parts).some((name) => values[name]));
    const shown = timed.slice(0, MOST);
    const left = timed.length > MOST ? ` The first ${MOST} of the table’s ${number(timed.length)} runs.` : "";
    const waits = shown.some(({ values }) => values.waiting_s) ? " Of several ranks they hold waiting: the view Ranks tells it apart." : "";
    note.textContent = `Means of the phases, which add up to the mean step.${waits}${left}`;
    element.hidden = !shown.length;
    const height = 110 + 28 * shown.length;
    chart.style.height = `${height}px`;
    requestAnimationFrame(() => drawPhases(chart, shown, parts, colours, height));
  };
  return { element, update };
}

function drawPhases(chart, runs, parts, colours, height) {
  const occurring = Object.entries(parts).filter(([, name]) => runs.some(({ values }) => values[name]));
  const data = occurring.map(([part, name]) => ({
    type: "bar",
    orientation: "h",
    name: part,
    y: runs.map((_, i) => i), // two runs may look alike
    x: runs.map(({ values }) => (values[name] ?? 0) * 1e3),
    customdata: runs.map(({ run, values }) => `${ms(values[name])} of ${ms(values.step_s)}<br>${plain(run)}`),
    marker: { color: colours.parts[part] },
    hovertemplate: `${part}: %{customdata}<extra></extra>`,
  }));
  const labels = runs.map(({ run }) => plain(shortened(run)));
  return draw(chart, data, {
    height, // plotly asks for it only once
    barmode: "stack",
    bargap: 0.25,
    xaxis: { title: { text: "time of a step (ms)" }, rangemode: "tozero" },
    yaxis: { autorange: "reversed", showgrid: false, zeroline: false, tickvals: runs.map((_, i) => i), ticktext: labels },
  });
}

// Names differ at their ends.
const shortened = (name) => ([...name].length > 40 ? `${[...name].slice(0, 12).join("")}…${[...name].slice(-27).join("")}` : name);
