// One run: what it is bound by, its phases, its steps, its memory, and how to repeat it.
import { ask } from "./api.js";
import { draw } from "./charts.js";
import { button, card, choose, el, swatch, table } from "./dom.js";
import { gib, ms, number, UNKNOWN } from "./units.js";

export const title = "Run";
export const ofRun = true;

export async function show(root, { run, colours }) {
  const answer = await ask("run", { run });
  const { record } = answer;
  root.append(
    el(
      "div",
      { class: "beside" },
      summary(run, answer),
      ...(answer.table ? [card("Time by phase (ms)", phases(answer.table, colours))] : []),
    ),
    ...steps(answer, colours),
    ...memory(record, colours),
    card("Environment", environment(record)),
    card("Repeat it", command(record.command)),
  );
}

function summary(run, { headline, verdict, lines, record }) {
  const [verdictLine, next] = verdict.map((line) => line.replace(/^\w+: /, ""));
  return el(
    "article",
    { class: "card summary grow" },
    el("h2", {}, headline, el("span", { class: `status ${record.status}` }, record.status)),
    ...(verdict.length ? [el("p", { class: "verdict" }, verdictLine), el("p", {}, el("b", {}, "Next: "), next)] : []),
    el("ul", { class: "lines" }, ...lines.map((line) => el("li", { class: line.startsWith("note:") && "note" }, line))),
    ...outOfMemory(record.failure),
    el("p", { class: "quiet" }, `${run} · started ${time(record.started)} · took ${number(record.duration_s, 1)} s`),
  );
}

// What an out-of-memory error says of the device's memory.
function outOfMemory(failure) {
  if (!failure?.out_of_memory) return [];
  return [table(["", ""], Object.entries(failure.out_of_memory).map(([what, bytes]) => [what, gib(bytes)]), { figures: false })];
}

const time = (iso) => `${new Date(iso).toISOString().slice(0, 19).replace("T", " ")} UTC`;

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

function steps({ steps, record }, colours) {
  if (!Object.keys(record.steps).length) return [];
  if (steps.error) return [card("Steps", el("p", { class: "error" }, steps.error))];
  const chart = el("div", { class: "chart" });
  const drawn = (clock) => drawSteps(chart, steps, clock, record, colours);
  const oneClock = record.environment?.device_type === "cpu";
  const clocks = oneClock
    ? el("p", { class: "quiet" }, "On the CPU there is one clock, the host’s.")
    : choose("Clock", [["device", "Device clock"], ["host", "Host clock"]], "device", drawn);
  requestAnimationFrame(() => drawn(oneClock ? "host" : "device"));
  return [card("Time of each step", clocks, chart)];
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
  const count = steps.stage.filter((stage) => stage === "warmup").length + (record.steadiness?.cut ?? 0);
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

function memory({ memory }, colours) {
  if (!memory || !Object.keys(memory.parts).length) return [];
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
    ...known.map(({ of }) => gib(of(part)).replace(" GiB", "")),
  ]);
  const chart = el("div", { class: "chart low grow" });
  requestAnimationFrame(() => drawMemory(chart, memory, causes.filter(({ text }) => !unknown.includes(text))));
  const rest = unknown.length ? [el("p", { class: "quiet" }, `Unknown on this device: ${unknown.join(", ")}.`)] : [];
  const figures = table(["phase", ...known.map(({ text }) => text)], rows);
  return [card("Memory by phase and cause (GiB)", el("div", { class: "beside" }, figures, chart), ...rest)];
}

const inGib = (bytes) => bytes && bytes * 2 ** -30;

function drawMemory(chart, memory, causes) {
  const parts = Object.keys(memory.parts);
  const data = causes.map(({ name, text, color }) => ({
    type: "bar",
    name: text,
    x: parts,
    y: parts.map((part) => inGib(memory.causes[part]?.[name])),
    marker: { color },
    hovertemplate: `${text}: %{y:.3f} GiB<extra>%{x}</extra>`,
  }));
  const xaxis = { tickfont: { size: 11 } }; // else their names touch
  return draw(chart, data, { barmode: "stack", xaxis, yaxis: { title: { text: "memory held (GiB)" }, rangemode: "tozero" } });
}

function environment({ environment, model, overrides, steps }) {
  const rows = [];
  const add = (name, value) => rows.push([name, value === null || value === undefined ? UNKNOWN : String(value)]);
  if (environment) {
    const count = environment.world_size > 1 ? ` × ${environment.world_size}` : "";
    add("device", `${environment.device_name}${count} (${environment.device_type}, ${gib(environment.device_bytes, 1)})`);
    if (environment.device_type !== "cpu") add("driver", environment.driver);
    add("CPU", `${environment.cpu}, ${environment.cpu_count} cores, ${environment.threads} threads used`);
    add("system", environment.platform);
    add("versions", pairs(environment.versions));
    add("flags", pairs(environment.flags));
    add("commit", environment.git_commit);
  }
  if (model) {
    add("model", `${model.class_path}, ${number(model.parameters)} parameters, ${gib(model.bytes)}`);
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
  const code = el("code", {}, text);
  const copy = button("Copy", async () => {
    await toClipboard(text, code);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  return el("div", { class: "command" }, code, copy);
}

// Over plain http from another machine a browser gives pages no clipboard: then the old way.
async function toClipboard(text, element) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  window.getSelection().selectAllChildren(element);
  return document.execCommand("copy");
}
