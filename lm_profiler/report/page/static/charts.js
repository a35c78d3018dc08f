// Charts, by the plotly.js that the plotly wheel carries, in the page's colours.

const CHART_OPTIONS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const LEGEND_GAP_PX = 20; // between a chart and its legend: room for a line of text

let plotlyLoading = null;

function plotly() {
  plotlyLoading ??= isOffline() ? runHeldPlotly() : loadPlotly();
  return plotlyLoading;
}

async function runHeldPlotly() {
  const script = document.createElement("script");
  script.text = await heldText("plotly"); // runs as it is appended
  document.head.append(script);
  return window.Plotly;
}

function loadPlotly() {
  return new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = "plotly.js";
    script.onload = () => done(window.Plotly);
    script.onerror = () => failed(new Error("Charts need plotly: pip install 'lm_profiler[report]'"));
    document.head.append(script);
  });
}

// An element that draws itself as soon as it is in the page and can be seen; the layout has its height.
function chartElement(data, layout) {
  const element = el("div", { class: "chart" });
  element.style.height = `${layout.height}px`;
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some(({ isIntersecting }) => isIntersecting)) return;
    observer.disconnect();
    drawChart(element, data, layout);
  });
  observer.observe(element);
  return element;
}

// Draw (or draw anew) into `element`; colours and fonts of the layout are the page's.
async function drawChart(element, data, layout) {
  try {
    const library = await plotly();
    if (!element.isConnected) return; // nobody looks any more
    const { margin, legend, ...common } = themed();
    const insideHeight = layout.height - margin.t - margin.b;
    const placedLegend = { ...legend, y: 1 + LEGEND_GAP_PX / insideHeight }; // plotly counts in heights of the chart
    await library.react(element, data, merged({ ...common, margin, legend: placedLegend }, layout), CHART_OPTIONS);
  } catch (error) {
    element.replaceChildren(el("p", { class: "error" }, error.message));
  }
}

// Text for a chart: plotly takes what looks like markup for it.
function chartText(text) {
  return seen(String(text)).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

function themed() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: colour("--font"), size: 12, color: colour("--text") },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--quiet"), activecolor: colour("--text") },
    hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: colour("--text") } },
    margin: { l: 56, r: 16, t: 8, b: 40 },
    xaxis: axis,
    yaxis: axis,
    legend: { orientation: "h", x: 0, yanchor: "bottom", traceorder: "normal" },
  };
}

function merged(under, over) {
  const result = { ...under };
  for (const [key, value] of Object.entries(over)) {
    const isInner = value !== null && typeof value === "object" && !Array.isArray(value) && key in under;
    result[key] = isInner ? merged(under[key], value) : value;
  }
  return result;
}

document.addEventListener("themechange", () => {
  const { font, modebar, hoverlabel, xaxis, yaxis } = themed();
  for (const chart of document.querySelectorAll(".js-plotly-plot")) {
    window.Plotly.relayout(chart, merged(chart.layout, { font, modebar, hoverlabel, xaxis, yaxis }));
  }
});
