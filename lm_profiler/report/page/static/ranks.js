// Who works and who waits: two heat maps, ranks × phases and ranks × steps. What stands out is the rank that is waited for.
import { ask } from "./api.js";
import { draw, plain } from "./charts.js";
import { card, el, swatch } from "./dom.js";
import { sheet } from "./sheet.js";
import { ms, number } from "./units.js";

export const title = "Ranks";
export const ofRun = true;

const MANY = 16; // ranks of which each has a row of the usual height
const FULL = 0.1; // of the mean step: the least that has the full colour, so that noise stays pale
const FULL_ONCE = 0.2; // the same of a single step

export async function show(root, { run, colours }) {
  const found = await ask("ranks", { run });
  if (found.why) {
    root.append(el("p", { class: "quiet" }, found.why));
    return;
  }
  const [more, waits] = [colours.series[1], colours.pale];
  const quiet = (text) => el("p", { class: "quiet" }, text);
  root.append(
    card(`Who works, who waits: ${found.headline}`, el("p", { class: "verdict" }, `${found.said[0].toUpperCase()}${found.said.slice(1)}.`), ...[...found.lines, found.left_out].filter(Boolean).map(quiet)),
    el("div", { class: "beside" }, byPhase(found, more, waits), ...bySteps(found, more)),
    card("What this is known from", sheet(found.facts, colours.parts)),
  );
}

const legend = (more, waits) => el("p", { class: "legend" }, el("span", {}, swatch(more), "more than the fast ranks"), el("span", {}, swatch(waits), "waiting"));

// Its colours say what stands out, and so not which phase is which.
function byPhase({ phases, rows, step_s, several_hosts }, more, waits) {
  const full = Math.max(FULL * step_s, ...rows.flatMap(({ above, waiting }) => [...above, waiting]));
  const head = [...(several_hosts ? ["host"] : []), "rank", ...phases, "waiting"];
  const lines = rows.map((row, i) => {
    const begins = several_hosts && row.host !== rows[i - 1]?.host;
    const named = [...(several_hosts ? [begins ? row.host : ""] : []), String(row.rank)].map((text) => el("th", {}, text));
    const cells = phases.map((part, at) => {
      const than = `${ms(Math.abs(row.above[at]), 1)} ${row.above[at] < 0 ? "less" : "more"} than the fast ranks`;
      return cell(row.own[at], row.above[at] / full, more, `rank ${row.rank}, ${part}: ${ms(row.own[at])} of own work, ${than}`);
    });
    const waited = cell(row.waiting, row.waiting / full, waits, `rank ${row.rank} waits ${ms(row.waiting)} for others`);
    return el("tr", { class: begins && i > 0 && "begins" }, ...named, ...cells, waited);
  });
  const table = el("table", { class: `heat${rows.length > MANY ? " dense" : ""}` }, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", {}, text)))), el("tbody", {}, ...lines));
  return el("article", { class: "card fits" }, el("h2", {}, "Own work and waiting (ms)"), legend(more, waits), table);
}

// Its colour the stronger the nearer `share` is to 1.
function cell(seconds, share, colour, tip) {
  const element = el("td", { title: tip }, number(seconds * 1e3, 1));
  if (share > 0.02) element.style.background = `color-mix(in srgb, ${colour} ${Math.min(70, 70 * share)}%, transparent)`;
  return element;
}

// None where the record has no steps.
function bySteps(found, more) {
  if (!found.columns.length) return [];
  const chart = el("div", { class: "chart" });
  const height = 90 + Math.max(100, Math.min(24, 840 / found.rows.length) * found.rows.length);
  chart.style.height = `${height}px`;
  requestAnimationFrame(() => drawSteps(chart, found, more, height));
  const said = "More own work than the fast ranks: a line is a rank that is always slow, spots are ranks in turns.";
  const steps = card("Own work, step by step", el("p", { class: "quiet" }, said), chart);
  steps.classList.add("grow");
  return [steps];
}

function drawSteps(chart, { rows, columns, step_s, several_hosts }, more, height) {
  const above = rows.map(({ by_column }) => by_column.map((seconds) => Math.max(0, seconds) * 1e3));
  const data = [{
    type: "heatmap",
    name: "own work",
    x: columns.map(String),
    y: rows.map((_, i) => i),
    z: above,
    customdata: rows.map(({ rank, host, by_column }) => by_column.map((seconds) => `rank ${rank} (${plain(host)}): ${ms(Math.abs(seconds), 2)} ${seconds < 0 ? "less" : "more"}`)),
    hovertemplate: "%{customdata}<extra>step %{x}</extra>",
    colorscale: [[0, `${more}00`], [1, more]],
    zmin: 0,
    zmax: Math.max(FULL_ONCE * step_s * 1e3, ...above.flat()),
    ygap: rows.length > MANY ? 0 : 2,
    colorbar: { title: { text: "ms more", side: "right" }, thickness: 12, outlinewidth: 0 },
  }];
  const shown = rows.map((_, i) => i).filter((i) => rows.length <= MANY || i % Math.ceil(rows.length / MANY) === 0);
  const label = ({ rank, host }) => (several_hosts ? `${plain(host)} · ${rank}` : String(rank));
  return draw(chart, data, {
    height, // plotly asks for it only once
    xaxis: { title: { text: "step" }, type: "category", showgrid: false, nticks: 20 },
    yaxis: { title: { text: "rank" }, autorange: "reversed", showgrid: false, zeroline: false, tickvals: shown, ticktext: shown.map((i) => label(rows[i])) },
  });
}
