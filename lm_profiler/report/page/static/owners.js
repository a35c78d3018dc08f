// Whose the time is that no phase covers: a bar for each of the longest actions.
import { draw, plain } from "./charts.js";
import { card, el } from "./dom.js";
import { ms, number } from "./units.js";

const MOST = 12; // the table among the figures has all

// None where no step was timed action by action.
export function owners(owned, colours) {
  if (!owned || !owned.actions.length) return [];
  const shown = owned.actions.slice(0, MOST);
  const chart = el("div", { class: "chart low" });
  const height = 90 + 24 * shown.length;
  chart.style.height = `${height}px`;
  requestAnimationFrame(() => drawOwners(chart, shown, owned.steps, colours, height));
  const left = owned.actions.length > MOST ? ` The longest ${MOST} of ${number(owned.actions.length)}.` : "";
  const said = `Of a mean step of ${number(owned.steps)} that were timed action by action, ${ms(owned.seconds)} in all.${left}`;
  return [card("Whose other is", el("p", { class: "quiet" }, said), chart)];
}

function drawOwners(chart, actions, steps, colours, height) {
  const data = [{
    type: "bar",
    orientation: "h",
    name: "other",
    y: actions.map((_, i) => i), // two names may look alike
    x: actions.map(({ seconds }) => seconds * 1e3),
    customdata: actions.map(({ name, calls, in_steps }) => `${plain(name)}<br>${number(calls, 2)} calls, in ${in_steps} of ${steps} steps`),
    marker: { color: colours.parts.other },
    hovertemplate: "%{x:.3f} ms: %{customdata}<extra></extra>",
  }];
  return draw(chart, data, {
    height, // plotly asks for it only once
    bargap: 0.25,
    showlegend: false,
    xaxis: { title: { text: "time on the host’s clock (ms)" }, rangemode: "tozero" },
    yaxis: { autorange: "reversed", showgrid: false, zeroline: false, tickvals: actions.map((_, i) => i), ticktext: actions.map(({ name }) => plain(name)) },
  });
}
