// One run: what it is bound by, its phases, its steps, its memory, and how to repeat it.
import { ask } from "./api.js";
import { draw, plain } from "./charts.js";
import { card, choose, copyButton, el, swatch, table } from "./dom.js";
import { memory as size, ms, number, UNKNOWN, unitOf } from "./units.js";

export const title = "Run";
export const ofRun = true;

// Each part by itself: a record damaged in one place hides no other.
export async function show(root, { run, colours }) {
  const answer = await ask("run", { run });
  const { record } = answer;
  const failure = part(() => outOfMemory(record.failure));
  root.append(
    el("div", { class: "beside" }, ...part(() => [summary(run, answer)]), ...part(() => times(answer, colours))),
    ...failure,
    ...part(() => steps(answer, colours)),
    ...part(() => memory(answer, colours)),
    ...part(() => facts(answer.facts)),
    ...part(() => [card("Environment", environment(record))]),
    ...part(() => [card("Repeat it", command(record.command))]),
  );
}

function part(build) {
  try {
    return build();
  } catch (error) {
    return [el("p", { class: "error" }, `A part of this record cannot be shown: ${error.message}`)];
  }
}

function summary(run, { headline, words, verdict, error, lines, record }) {
  const [verdictLine, next] = verdict.map((line) => line.replace(/^\w+: /, ""));
  return el(
    "article",
    { class: "card summary grow" },
    el("h2", {}, headline, pill(record.status), ...words.map(pill)),
    ...(error ? [el("p", { class: "error" }, error)] : []),
    ...(verdict.length ? [el("p", { class: "verdict" }, verdictLine), el("p", {}, el("b", {}, "Next: "), next)] : []),
    el("ul", { class: "lines" }, ...lines.map((line) => el("li", { class: /^(note|odd):/.test(line) && "note" }, line))),
    el("p", { class: "quiet" }, `${run} · started ${time(record.started)} · took ${number(record.duration_s, 1)} s`),
  );
}

const pill = (word) => el("span", { class: `status ${word}` }, word);

// What an out-of-memory error says of the device's memory.
function outOfMemory(failure) {
  if (!failure?.out_of_memory) return [];
  const rows = Object.entries(failure.out_of_memory).map(([what, bytes]) => [what, size(bytes)]);
  return [card("The device’s memory, as the error tells", table(["", ""], rows, { figures: false }))];
}

function times({ table: columns }, colours) {
  return columns === null ? [] : [card("Time by phase (ms)", phases(columns, colours))];
}

function facts(groups) {
  const tables = Object.entries(groups).map(([title, rows]) =>
    el("div", { class: "facts" }, el("h3", {}, title), table(["", ""], rows, { figures: false })),
  );
  return tables.length ? [card("Further facts", el("div", { class: "columns" }, ...tables))] : [];
}

// As it stands in the record where that is no time.
function time(iso) {
  const date = new Date(iso);
  return Number.isNaN(date.getTime()) ? String(iso) : `${date.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

// The columns as the terminal has them: [header, cell, cell …].
function phases(columns, colours) {
  const rows = columns[0].slice(1).map((phase, i) => {
    const name = el("span", {}, swatch(colours.parts[phase] ?? "none"), phase);
    return [name, ...columns.slice(1).map((column) => column[i + 1])];
  });
  const figures = table(columns.map((column) => column[0]), rows);
  figures.classList.add("phases");
  return figures;
}

// Without a finished step there is nothing to draw: the summary says how the run ended.
function steps({ steps, record }, colours) {
  if (steps.error) return Object.keys(record.steps).length ? [card("Steps", el("p", { class: "error" }, steps.error))] : [];
  if (!steps.step.length) return [];
  const chart = el("div", { class: "chart" });
  const drawn = (clock) => drawSteps(chart, steps, clock, record, colours);
  const onDevice = steps.device.step.some((seconds) => seconds !== null);
  const oneClock = record.environment?.device_type === "cpu" || !onDevice;
  const why = onDevice ? "On the CPU there is one clock, the host’s." : "The device did not say how long its steps took: on the host’s clock.";
  const clocks = oneClock ? el("p", { class: "quiet" }, why) : choose("Clock", [["device", "Device clock"], ["host", "Host clock"]], "device", drawn);
  requestAnimationFrame(() => drawn(oneClock ? "host" : "device"));
  const thinned = steps.every > 1 ? [el("p", { class: "quiet" }, `One of ${steps.every} steps is drawn, of ${number(steps.of)}.`)] : [];
  return [card("Time of each step", clocks, ...thinned, chart)];
}

function drawSteps(chart, steps, clock, record, colours) {
  const occurring = Object.entries(colours.parts).filter(([part]) => steps[clock][part].some((seconds) => seconds > 0));
  const data = occurring.map(([part, color]) => ({
    type: "bar",
    name: part,
    x: steps.step,
    y: steps[clock][part].map((seconds) => seconds && seconds * 1e3),
    marker: { color },
    hovertemplate: `${part}: %{y:.3f} ms<extra>step %{x}</extra>`,
  }));
  const { range, ...marked } = warmup(steps, steps[clock].step, record, colours);
  return draw(chart, data, {
    barmode: "stack",
    bargap: 0.1,
    xaxis: { title: { text: "step" } },
    yaxis: { title: { text: `time on the ${clock}’s clock (ms)` }, range, rangemode: "tozero" },
    ...marked,
  });
}

// Shades the steps that are in no summary: the warm-up asked for, and what the steadiness left out besides. Where they
// are far slower, as with a compiler, their bars are cut off so that the others can be read.
function warmup(steps, seconds, record, colours) {
  const count = steps.stage.filter((stage) => stage === "warmup").length + Math.ceil((record.steadiness?.cut ?? 0) / steps.every);
  if (!count) return {};
  const [slowest, steady] = [seconds.slice(0, count), seconds.slice(count)].map((some) => Math.max(0, ...some));
  const cut = steady > 0 && slowest > 2 * steady;
  const x = { xref: "x", x0: steps.step[0] - 0.5, x1: steps.step[count - 1] + 0.5 };
  const area = { type: "rect", ...x, yref: "paper", y0: 0, y1: 1, fillcolor: colours.pale, opacity: 0.25, line: { width: 0 } };
  const said = cut ? `warm-up, up to ${ms(slowest, 1)}` : "warm-up";
  const text = { text: said, x: x.x0, xanchor: "left", y: 1, yref: "paper", yanchor: "bottom", showarrow: false };
  return { shapes: [area], annotations: [text], range: cut ? [0, 1.2e3 * steady] : undefined };
}

const PEAKS = { allocated_peak: "peak allocated", reserved_peak: "peak reserved", resident_peak: "peak resident" };
const CAUSES = {
  parameters: "parameters",
  gradients: "gradients",
  optimizer_states: "optimizer states",
  buffers: "buffers",
  activations_and_rest: "activations and rest",
};

function memory({ record: { memory }, held }, colours) {
  const levels = held.length ? [el("h3", {}, "Held in a step"), table(["", ""], held, { figures: false })] : [];
  if (!memory || !Object.keys(memory.parts).length) return levels.length ? [card("Memory", ...levels)] : [];
  const shades = [...colours.series, colours.pale];
  const causes = Object.entries(CAUSES).map(([name, text], i) => ({ name, text, color: shades[i] }));
  const readings = Object.entries(PEAKS).map(([name, text]) => ({ text, of: (part) => memory.parts[part][name] }));
  const columns = [...readings, ...causes.map(({ name, text }) => ({ text, of: (part) => memory.causes[part]?.[name] }))];
  const parts = Object.keys(memory.parts);
  const isKnown = ({ of }) => parts.some((part) => (of(part) ?? null) !== null);
  const known = columns.filter(isKnown);
  const unknown = columns.filter((column) => !isKnown(column)).map(({ text }) => text);
  const rows = parts.map((part) => [
    el("span", {}, swatch(colours.parts[part]), part),
    ...known.map(({ of }) => size(of(part))),
  ]);
  const chart = el("div", { class: "chart low grow" });
  requestAnimationFrame(() => drawMemory(chart, memory, causes.filter(({ text }) => !unknown.includes(text))));
  const rest = unknown.length ? [el("p", { class: "quiet" }, `Unknown on this device: ${unknown.join(", ")}.`)] : [];
  const figures = table(["phase", ...known.map(({ text }) => text)], rows);
  return [card("Memory by phase and cause", el("div", { class: "beside" }, figures, chart), ...rest, ...levels)];
}

function drawMemory(chart, memory, causes) {
  const parts = Object.keys(memory.parts);
  const bytes = (part, { name }) => memory.causes[part]?.[name] ?? null;
  const heights = parts.map((part) => causes.reduce((sum, cause) => sum + bytes(part, cause), 0));
  const [unit, scale] = unitOf(Math.max(0, ...heights));
  const data = causes.map((cause) => ({
    type: "bar",
    name: cause.text,
    x: parts.map(plain),
    y: parts.map((part) => bytes(part, cause) && bytes(part, cause) / scale),
    marker: { color: cause.color },
    hovertemplate: `${cause.text}: %{y:.3f} ${unit}<extra>%{x}</extra>`,
  }));
  const xaxis = { tickfont: { size: 11 } }; // else their names touch
  return draw(chart, data, { barmode: "stack", xaxis, yaxis: { title: { text: `memory held (${unit})` }, rangemode: "tozero" } });
}

function environment({ environment, model, overrides, steps }) {
  const rows = [];
  const add = (name, value) => rows.push([name, value === null || value === undefined ? UNKNOWN : String(value)]);
  if (environment) {
    const count = environment.world_size > 1 ? ` × ${environment.world_size}` : "";
    add("device", `${environment.device_name}${count} (${environment.device_type}, ${size(environment.device_bytes)})`);
    if (environment.device_type !== "cpu") add("driver", environment.driver);
    add("CPU", `${environment.cpu}, ${environment.cpu_count} cores, ${environment.threads} threads used`);
    add("system", environment.platform);
    add("versions", pairs(environment.versions));
    add("flags", pairs(environment.flags));
    add("commit", environment.git_commit);
  }
  if (model) {
    add("model", `${model.class_path}, ${number(model.parameters)} parameters, ${size(model.bytes)}`);
    add("precision", model.precision);
    add("optimizer", model.optimizers.join(", ") || "none");
    if (model.accumulate_grad_batches > 1) add("batches a step", model.accumulate_grad_batches);
  }
  add("steps", pairs(steps) || "none");
  if (Object.keys(overrides).length) add("given options", pairs(overrides));
  return table(["", ""], rows, { figures: false });
}

const pairs = (object) => Object.entries(object).map(([name, value]) => `${name} ${value}`).join(", ");

function command(text) {
  return el("div", { class: "command" }, el("code", {}, text), copyButton("Copy", () => text));
}
