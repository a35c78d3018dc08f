// A training that is watched until it ends: step time over the run with its events, where the time went, what happened.
import { ask } from "./api.js";
import { draw, plain } from "./charts.js";
import { card, el } from "./dom.js";
import { sheet } from "./sheet.js";

export const title = "Watch";
export const ofRun = true;
export const live = true; // its files grow while the run's record stays as it is

export async function show(root, { run, colours }) {
  const found = await ask("watch", { run });
  if (found.why) {
    root.append(el("p", { class: "quiet" }, found.why));
    return;
  }
  const chart = el("div", { class: "chart" });
  root.append(
    card("Step time over the run", ...found.state.map((line) => el("p", {}, line)), chart),
    ...found.tables.map(({ heading, table }) => card(heading, sheet(table, colours.parts))),
  );
  requestAnimationFrame(() => drawSteps(chart, found, colours));
}

function drawSteps(chart, { step, curves, events }, colours) {
  const lines = Object.entries(curves).map(([name, seconds], i) => ({
    type: "scatter",
    mode: step.length > 1 ? "lines" : "markers",
    name,
    x: step,
    y: seconds.map((of) => of * 1e3),
    line: { color: colours.series[i], width: i ? 1 : 2, dash: i > 1 ? "dot" : "solid", shape: "hv" },
    hovertemplate: `${name}: %{y:.3f} ms<extra></extra>`,
  }));
  // Where nothing is told of a step the curve is the last one known before it.
  const heightAt = (at) => curves.median[Math.max(step.findLastIndex((of) => of <= at), 0)] * 1e3;
  const kinds = [...new Set(events.map(({ kind }) => kind))];
  const marks = kinds.map((kind, i) => {
    const mine = events.filter((event) => event.kind === kind);
    return {
      type: "scatter",
      mode: "markers",
      name: kind,
      x: mine.map((event) => event.step),
      y: mine.map((event) => heightAt(event.step)),
      text: mine.map(({ text }) => plain(text)),
      marker: { color: colours.series[(i + 3) % colours.series.length], size: 11, symbol: "triangle-down", line: { width: 1, color: colours.pale } },
      hovertemplate: "step %{x:,}: %{text}<extra></extra>",
    };
  });
  return draw(chart, [...lines, ...marks], {
    showlegend: true,
    xaxis: { title: { text: "step" } },
    yaxis: { title: { text: "step time (ms)" }, rangemode: "tozero" },
  });
}
