// Perfetto's own page in a frame, with one of the run's traces. Nothing leaves this machine.
import { address, ask } from "./api.js";
import { el, option } from "./dom.js";
import { memory } from "./units.js";

export const title = "Trace";
export const ofRun = true;

const EXPAND = JSON.stringify([{ id: "dev.perfetto.ExpandTracksByRegex", args: [".*"] }]);
const PAGE = `perfetto/index.html#!/viewer?mode=embedded&hideSidebar=true&startupCommands=${encodeURIComponent(EXPAND)}`;
const PING_MS = 250;
const SETTINGS = "perfettoSettings"; // where Perfetto's page keeps them in this browser

export async function show(root, { run }) {
  root.classList.add("fill");
  const { traces, perfetto } = await ask("traces", { run });
  if (!traces.length) {
    root.append(el("p", { class: "quiet" }, "This run has no trace. It was not asked for one (--trace.steps), or it ended before its trace stage: see the Run view."));
    return;
  }
  const chooser = el("select", { "aria-label": "Trace" }, ...traces.map(({ file, bytes }) => option(file, `${file} (${memory(bytes)})`)));
  const download = el("a", {}, "Download");
  const place = el("div", { class: "perfetto" });
  root.append(el("div", { class: "bar" }, chooser, download), place);
  const open = () => {
    const file = chooser.value;
    download.href = address("trace", { run, file });
    download.download = `${run.replaceAll("/", "_")}_${file}`;
    return perfetto ? openIn(place, run, file) : place.replaceChildren(...remedy());
  };
  chooser.addEventListener("change", open);
  await open();
}

function remedy() {
  const install = el("code", {}, 'pip install "lm_profiler[perfetto]"');
  return [
    el("p", {}, "To see traces here, install Perfetto’s page: ", install),
    el("p", {}, "Or download the trace above, and open it at ui.perfetto.dev."),
  ];
}

// As light or dark as this page is when it is opened.
function matchTheme() {
  const settings = JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  localStorage.setItem(SETTINGS, JSON.stringify({ ...settings, theme: document.documentElement.dataset.theme }));
}

async function openIn(place, run, file) {
  matchTheme();
  const frame = el("iframe", { src: PAGE, title: "Perfetto" });
  place.replaceChildren(frame);
  const [buffer] = await Promise.all([load(run, file), ready(frame)]);
  const perfetto = { buffer, title: `${run} ${file}`, fileName: file };
  frame.contentWindow?.postMessage({ perfetto }, window.location.origin, [buffer]);
}

// Compressed as it is: Perfetto unpacks it.
async function load(run, file) {
  const response = await fetch(address("trace", { run, file }));
  if (!response.ok) throw new Error(await response.text());
  return response.arrayBuffer();
}

// Perfetto answers PONG from when it can take a trace; resolves too if the frame is taken away.
function ready(frame) {
  return new Promise((done) => {
    const ping = setInterval(() => {
      if (frame.contentWindow === null) finish();
      else frame.contentWindow.postMessage("PING", window.location.origin);
    }, PING_MS);
    const answered = ({ source, data }) => {
      if (source === frame.contentWindow && data === "PONG") finish();
    };
    const finish = () => {
      clearInterval(ping);
      window.removeEventListener("message", answered);
      done();
    };
    window.addEventListener("message", answered);
  });
}
