// One run: what it is bound by, its phases, its steps, its memory, every other figure, and how to repeat it.
import { ask } from "./api.js";
import { draw, plain } from "./charts.js";
import { card, choose, copyButton, el, pill } from "./dom.js";
import { owners } from "./owners.js";
import { sheet } from "./sheet.js";
import { ms, number, unitOf } from "./units.js";

export const title = "Run";
export const ofRun = true;

// Each part by itself: a record damaged in one place hides no other.
export async function show(root, { run, colours }) {
  const answer = await ask("run", { run });
  const times = () => (answer.times.rows.length ? [card("Time by phase (ms)", timed(answer.times, colours))] : []);
  root.append(
    el("div", { class: "beside" }, ...part(() => [summary(run, answer)]), ...part(times)),
    ...part(() => steps(answer.steps, colours)),
    ...part(() => owners(answer.owners, colours)),
    ...part(() => memory(answer.causes, colours)),
    ...part(() => sections(answer.sections, colours)),
    ...part(() => [card("Repeat it", command(answer.command))]),
  );
}

function part(build) {
  try {
    return build();
  } catch (error) {
    return [el("p", { class: "error" }, `A part of this record cannot be shown: ${error.message}`)];
  }
}

function summary(run, { headline, status, words, verdict, error, lines, started, duration_s }) {
  const took = status === "unfinished" ? "" : ` · took ${number(duration_s, 1)} s`;
  const [verdictLine, next] = verdict.map((line) => line.replace(/^\w+: /, ""));
  return el(
    "article",
    { class: "card summary grow" },
    el("h2", {}, headline, pill(status), ...words.map(pill)),
    ...(error ? [el("p", { class: "error" }, error)] : []),
    ...(verdict.length ? [el("p", { class: "verdict" }, verdictLine), el("p", {}, el("b", {}, "Next: "), next)] : []),
    el("ul", { class: "lines" }, ...lines.map((line) => el("li", { class: /^(note|odd):/.test(line) && "note" }, line))),
    el("p", { class: "quiet" }, `${run} · started ${time(started)}${took}`),
  );
}

// As it stands in the record where that is no time.
function time(iso) {
  const date = new Date(iso);
  return Number.isNaN(date.getTime()) ? String(iso) : `${date.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

function timed(times, colours) {
  const table = sheet({ ...times, above: [], below: [] }, colours.parts); // the summary has its lines
  table.classList.add("phases");
  return table;
}

// Without a finished step there is nothing to draw: the summary says how the run ended.
function steps(steps, colours) {
  if (steps.error) return [card("Steps", el("p", { class: "error" }, steps.error))];
  if (!steps.step.length) return [];
  const chart = el("div", { class: "chart" });
  const drawn = (clock) => drawSteps(chart, steps, clock, colours);
  const titles = { device: "Device clock", host: "Host clock" };
  const [first, ...others] = steps.clocks;
  const clocks = steps.clocks.map((clock) => [clock, titles[clock]]);
  const above = others.length ? choose("Clock", clocks, first, drawn) : el("p", { class: "quiet" }, "Times on the host’s clock.");
  requestAnimationFrame(() => drawn(first));
  const thinned = steps.every > 1 ? [el("p", { class: "quiet" }, `Drawn is 1 of ${steps.every} steps; the run has ${number(steps.of)}.`)] : [];
  const several = steps.ranks > 1 ? [el("p", { class: "quiet" }, `Means over ${number(steps.ranks)} ranks as clocked: phases hold waiting, which the view Ranks tells apart.`)] : [];
  return [card("Time of each step", above, ...several, ...thinned, chart)];
}

function drawSteps(chart, steps, clock, colours) {
  const occurring = Object.entries(colours.parts).filter(([part]) => steps[clock][part]?.some((seconds) => seconds > 0));
  const data = occurring.map(([part, color]) => ({
    type: "bar",
    name: part,
    x: steps.step,
    y: steps[clock][part].map((seconds) => seconds && seconds * 1e3),
    marker: { color },
    hovertemplate: `${part}: %{y:.3f} ms<extra>step %{x}</extra>`,
  }));
  data.push(...odd(steps.odd ?? [], clock, colours));
  const { range, ...marked } = warmup(steps, steps[clock].step, colours);
  return draw(chart, data, {
    barmode: "stack",
    bargap: 0.1,
    xaxis: { title: { text: "step" } },
    yaxis: { title: { text: `time on the ${clock}’s clock (ms)` }, range, rangemode: "tozero" },
    ...marked,
  });
}

// A sign above each step that is far from the others; what is known of it shows where the pointer rests.
function odd(steps, clock, colours) {
  if (!steps.length) return [];
  return [{
    type: "scatter",
    mode: "markers",
    name: "odd",
    x: steps.map(({ step }) => step),
    y: steps.map((of) => of[clock] && of[clock] * 1e3),
    text: steps.map(({ text }) => plain(text).replaceAll(": ", ":<br>")),
    marker: { symbol: "circle-open", size: 12, line: { width: 2 }, color: colours.series[2] },
    hovertemplate: "%{text}<extra></extra>",
  }];
}

// Shades the steps that are in no summary. Where they are far slower, as with a compiler, their bars are cut off so that
// the others can be read.
function warmup(steps, seconds, colours) {
  const count = steps.warmup;
  if (!count) return {};
  const [slowest, steady] = [seconds.slice(0, count), seconds.slice(count)].map((some) => Math.max(0, ...some));
  const cut = steady > 0 && slowest > 2 * steady;
  const x = { xref: "x", x0: steps.step[0] - 0.5, x1: steps.step[count - 1] + 0.5 };
  const area = { type: "rect", ...x, yref: "paper", y0: 0, y1: 1, fillcolor: colours.pale, opacity: 0.25, line: { width: 0 } };
  const said = cut ? `warm-up, up to ${ms(slowest, 1)}` : "warm-up";
  const text = { text: said, x: x.x0, xanchor: "left", y: 1, yref: "paper", yanchor: "bottom", showarrow: false };
  return { shapes: [area], annotations: [text], range: cut ? [0, 1.2e3 * steady] : undefined };
}

// What the peak within each part of the step consists of: {cause: {part: bytes}}.
function memory(causes, colours) {
  if (!Object.keys(causes).length) return [];
  const chart = el("div", { class: "chart low" });
  requestAnimationFrame(() => drawMemory(chart, causes, colours));
  return [card("Memory by phase and cause", chart)];
}

function drawMemory(chart, causes, colours) {
  const shades = [...colours.series, colours.pale];
  const parts = Object.keys(colours.parts).filter((part) => Object.values(causes).some((bytes) => part in bytes));
  const heights = parts.map((part) => Object.values(causes).reduce((sum, bytes) => sum + (bytes[part] ?? 0), 0));
  const [unit, scale] = unitOf(Math.max(0, ...heights));
  const data = Object.entries(causes).map(([cause, bytes], i) => ({
    type: "bar",
    name: cause,
    x: parts.map(plain),
    y: parts.map((part) => (bytes[part] ?? 0) / scale),
    marker: { color: shades[i % shades.length] },
    hovertemplate: `${cause}: %{y:.3f} ${unit}<extra>%{x}</extra>`,
  }));
  const xaxis = { tickfont: { size: 11 } }; // else their names touch
  return draw(chart, data, { barmode: "stack", xaxis, yaxis: { title: { text: `memory held (${unit})` }, rangemode: "tozero" } });
}

// Every figure, in the order of `report RUN`: a table with a title begins a section. Short ones stand side by side.
function sections(tables, colours) {
  const found = [];
  for (const table of tables) {
    const isWide = table.headings.length > 3;
    if (!table.title) {
      found.at(-1).tables.push(table);
      found.at(-1).isWide ||= isWide;
    } else found.push({ title: table.title, tables: [table], isWide });
  }
  const cards = [];
  for (const { title, tables, isWide } of found) {
    const body = el("div", { class: "beside" }, ...tables.map((table) => sheet(table, colours.parts)));
    const section = el("section", { class: "facts" }, el("h3", {}, title), body);
    if (isWide) cards.push(el("article", { class: "card" }, section));
    else if (cards.at(-1)?.lastChild.className === "columns") cards.at(-1).lastChild.append(section);
    else cards.push(el("article", { class: "card" }, el("div", { class: "columns" }, section)));
  }
  return [el("div", { class: "beside" }, ...cards)];
}

function command(text) {
  return el("div", { class: "command" }, el("code", {}, text), copyButton("Copy", () => text));
}
