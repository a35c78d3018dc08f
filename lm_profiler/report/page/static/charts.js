// Charts, by the plotly.js that the plotly wheel carries, in the page's colours.
import { heldText, isOffline } from "./api.js";
import { seen } from "./dom.js";

let loading = null;

function plotly() {
  loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    if (isOffline()) {
      script.text = heldText("plotly"); // runs as it is appended
      document.head.append(script);
      done(window.Plotly);
      return;
    }
    script.src = "plotly.js";
    script.onload = () => done(window.Plotly);
    script.onerror = () => failed(new Error("Charts need plotly: pip install 'lm_profiler[report]'"));
    document.head.append(script);
  });
  return loading;
}

const OPTIONS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

const ABOVE = 20; // pixels between a chart and its legend: room for a line of text

// Draw (or draw anew) into `root`; colours and fonts of the layout are the page's.
export async function draw(root, data, layout) {
  const library = await plotly();
  if (!root.isConnected) return; // nobody looks any more
  const { margin, ...common } = themed();
  const inside = (layout.height ?? root.clientHeight) - margin.t - margin.b;
  const legend = { ...common.legend, y: 1 + ABOVE / inside }; // plotly counts in heights of the chart
  await library.react(root, data, merge({ ...common, margin, legend }, layout), OPTIONS);
}

// Text for a chart: plotly takes what looks like markup for it.
export function plain(text) {
  return seen(String(text)).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

function themed() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: of("--line"), zerolinecolor: of("--line"), linecolor: of("--line"), automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: of("--font"), size: 12, color: of("--text") },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: of("--quiet"), activecolor: of("--text") },
    hoverlabel: { bgcolor: of("--raised"), bordercolor: of("--line"), font: { color: of("--text") } },
    margin: { l: 56, r: 16, t: 8, b: 40 },
    xaxis: axis,
    yaxis: axis,
    legend: { orientation: "h", x: 0, yanchor: "bottom", traceorder: "normal" },
  };
}

function merge(under, over) {
  const merged = { ...under };
  for (const [key, value] of Object.entries(over)) {
    const both = value !== null && typeof value === "object" && !Array.isArray(value) && key in under;
    merged[key] = both ? merge(under[key], value) : value;
  }
  return merged;
}

document.addEventListener("themechange", () => {
  for (const chart of document.querySelectorAll(".js-plotly-plot")) {
    window.Plotly.relayout(chart, merge(chart.layout, recoloured(chart.layout)));
  }
});

function recoloured(layout) {
  const { font, modebar, hoverlabel, xaxis, yaxis } = themed();
  const axes = Object.keys(layout).filter((key) => /^[xy]axis/.test(key));
  return { font, modebar, hoverlabel, ...Object.fromEntries(axes.map((key) => [key, key.startsWith("x") ? xaxis : yaxis])) };
}
