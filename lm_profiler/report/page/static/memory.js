// What memory is held for over one step: a stack by cause, phases behind it, the peak and what is alive there.
import { ask } from "./api.js";
import { draw, plain } from "./charts.js";
import { card, el } from "./dom.js";
import { sheet } from "./sheet.js";
import { unitOf } from "./units.js";

export const title = "Memory";
export const ofRun = true;

export async function show(root, { run, colours }) {
  const found = await ask("memory", { run });
  if (found.why) {
    root.append(el("p", { class: "quiet" }, found.why));
    return;
  }
  // To one scale, so that what was planned and what was measured can be compared.
  const most = Math.max(...found.timelines.map(({ peak }) => peak));
  for (const timeline of found.timelines) {
    const chart = el("div", { class: "chart" });
    const heading = `Bytes in use over one step: ${timeline.title}`;
    root.append(
      card(heading, el("p", {}, `Peak ${timeline.peak_text}. The axis counts allocations and frees in their order, not time.`), chart),
      ...timeline.tables.map(({ heading, table }) => card(heading, sheet(table, colours.parts))),
    );
    requestAnimationFrame(() => drawTimeline(chart, timeline, most, colours));
  }
}

function drawTimeline(chart, { causes, places, peak_at, peak, peak_text, phases, events }, most, colours) {
  const [unit, scale] = unitOf(most);
  const data = causes.map(({ name, title, bytes }) => ({
    type: "scatter",
    mode: "lines",
    name: title,
    x: places,
    y: bytes.map((of) => of / scale),
    stackgroup: "held",
    line: { shape: "hv", width: 0 },
    fillcolor: colours.causes[name] ?? colours.pale,
    hovertemplate: `${title}: %{y:.3f} ${unit}<extra></extra>`,
  }));
  const shapes = phases.map(([phase, begins, ends]) => ({
    type: "rect", xref: "x", yref: "paper", x0: begins, x1: ends, y0: 0, y1: 1, layer: "below",
    fillcolor: colours.parts[phase] ?? colours.pale, opacity: 0.18, line: { width: 0 },
  }));
  const named = phases.map(([phase, begins, ends]) => {
    const narrow = (ends - begins) * 80 < events * phase.length;
    const place = { x: (begins + ends) / 2, xref: "x", y: 1, yref: "paper", yanchor: "bottom", xanchor: narrow ? "left" : "center" };
    return { ...place, text: plain(phase), showarrow: false, textangle: narrow ? -35 : 0, font: { size: 11 } };
  });
  const mark = { x: peak_at, y: peak / scale, text: `<b>peak ${plain(peak_text)}</b>`, showarrow: true, arrowcolor: colours.pale, ax: peak_at > 0.6 * events ? -60 : 60, ay: -14 };
  return draw(chart, data, {
    hovermode: "x unified",
    shapes,
    annotations: [...named, mark],
    margin: { t: 52 },
    legend: { y: -0.22, yanchor: "top" },
    xaxis: { title: { text: "allocations and frees of one step" }, range: [0, events || 1] },
    yaxis: { title: { text: `bytes in use (${unit})` }, range: [0, (1.12 * most) / scale || 1] },
  });
}
