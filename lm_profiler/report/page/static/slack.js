// What delays of a known length cost: the slack of each place, and what a faster one would save, with their intervals.
import { draw, plain } from "./charts.js";
import { card, el } from "./dom.js";
import { ms, number } from "./units.js";

// None where no delays were asked for.
export function slack(found, colours) {
  if (!found) return [];
  const rows = [...new Set([...found.places, ...found.savings].map(({ place }) => place))];
  const chart = el("div", { class: "chart low" });
  const height = 100 + 60 * rows.length;
  chart.style.height = `${height}px`;
  requestAnimationFrame(() => drawSlack(chart, found, rows, colours, height));
  const said = `Of a step of ${ms(found.step_s)}: slack is the delay of a place that costs nothing; a small delay costs its slope, 1 on the critical path and 0 off it. Lines are 95 % intervals.`;
  return [card("Slack, and what a faster place would save", el("p", { class: "quiet" }, said), chart)];
}

function drawSlack(chart, { places, savings }, rows, colours, height) {
  const slacks = places.map(({ place, slack_s, low_s, high_s, slope, slope_low, slope_high, text }) => ({
    place,
    value: slack_s,
    low: low_s,
    high: high_s,
    text: `slack ${text}; slope ${number(slope, 2)} [${number(slope_low, 2)}, ${number(slope_high, 2)}]`,
  }));
  const saved = savings.map(({ place, faster_s, saves_s, low_s, high_s }) => ({
    place,
    value: saves_s,
    low: low_s,
    high: high_s,
    text: `${ms(faster_s)} faster saves ${ms(saves_s)} [${ms(low_s)}, ${ms(high_s)}]`,
  }));
  const data = [bars("slack", slacks, rows, colours.series[0]), bars("would save", saved, rows, colours.series[1])];
  const told = (row) => [...slacks, ...saved].filter(({ place }) => place === row).map(({ text }) => text.split(";")[0]);
  const at = rows.map((_, i) => i);
  return draw(chart, data, {
    height, // plotly asks for it only once
    barmode: "group",
    bargap: 0.25,
    xaxis: { title: { text: "ms of a step" }, rangemode: "tozero" },
    yaxis: { autorange: "reversed", showgrid: false, zeroline: false, tickvals: at, ticktext: rows.map((row) => [row, ...told(row)].map(plain).join("<br>")) },
  });
}

function bars(name, of, rows, color) {
  return {
    type: "bar",
    orientation: "h",
    name,
    y: of.map(({ place }) => rows.indexOf(place)),
    x: of.map(({ value }) => (value ?? 0) * 1e3),
    error_x: {
      type: "data",
      symmetric: false,
      array: of.map(({ value, high }) => ((high ?? value) - value) * 1e3),
      arrayminus: of.map(({ value, low }) => (value - (low ?? value)) * 1e3),
    },
    customdata: of.map(({ text }) => plain(text)),
    marker: { color },
    hovertemplate: "%{customdata}<extra></extra>",
  };
}
