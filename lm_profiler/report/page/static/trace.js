// The view Trace: Perfetto's own page in a frame, with one of the run's traces. Nothing leaves this machine.

const EXPAND = JSON.stringify([{ id: "dev.perfetto.ExpandTracksByRegex", args: [".*"] }]);
const PERFETTO = `perfetto/index.html#!/viewer?mode=embedded&hideSidebar=true&startupCommands=${encodeURIComponent(EXPAND)}`;
const PING_MS = 250;
const PERFETTO_SETTINGS = "perfettoSettings"; // where Perfetto's page keeps them in this browser

async function showTrace(root, { run }) {
  root.classList.add("fill");
  const { traces, perfetto } = await ask("traces", { run });
  if (!traces.length) {
    root.append(quietLine("This run has no trace. None was requested (--trace.steps), or the run ended before its trace stage: see the Run view."));
    return;
  }
  const choices = traces.map(({ file, bytes }) => option(file, `${file} (${memoryText(bytes)})`));
  const chooser = el("select", { "aria-label": "Trace", onchange: open }, ...choices);
  const download = el("a", {}, "Download");
  const place = el("div", { class: "perfetto" });
  root.append(el("div", { class: "bar" }, chooser, download), place);
  async function open() {
    const file = chooser.value;
    download.href = routeAddress("trace", { run, file });
    download.download = `${run.replaceAll("/", "_")}_${file}`;
    if (perfetto) await openInPerfetto(place, run, file);
    else place.replaceChildren(...perfettoRemedy());
  }
  await open();
}

function perfettoRemedy() {
  const install = el("code", {}, 'pip install "lm_profiler[perfetto]"');
  return [
    el("p", {}, "To see traces here, install Perfetto’s page: ", install),
    el("p", {}, "Or download the trace above, and open it at ui.perfetto.dev."),
  ];
}

async function openInPerfetto(place, run, file) {
  matchPerfettoTheme();
  const frame = el("iframe", { src: PERFETTO, title: "Perfetto" });
  place.replaceChildren(frame);
  const [buffer] = await Promise.all([loadTrace(run, file), perfettoReady(frame)]);
  const message = { buffer, title: `${run} ${file}`, fileName: file };
  frame.contentWindow?.postMessage({ perfetto: message }, window.location.origin, [buffer]);
}

// As light or dark as this page is when it is opened.
function matchPerfettoTheme() {
  const settings = JSON.parse(localStorage.getItem(PERFETTO_SETTINGS)) ?? {};
  const { theme } = document.documentElement.dataset;
  localStorage.setItem(PERFETTO_SETTINGS, JSON.stringify({ ...settings, theme }));
}

// Compressed as it is: Perfetto unpacks it.
async function loadTrace(run, file) {
  const response = await fetch(routeAddress("trace", { run, file }));
  if (!response.ok) throw new Error(await response.text());
  return response.arrayBuffer();
}

// Perfetto answers PONG from when it can take a trace; resolves too if the frame is taken away.
function perfettoReady(frame) {
  return new Promise((done) => {
    const ping = setInterval(() => {
      if (frame.contentWindow === null) finish();
      else frame.contentWindow.postMessage("PING", window.location.origin);
    }, PING_MS);
    const onAnswer = ({ source, data }) => {
      if (source === frame.contentWindow && data === "PONG") finish();
    };
    function finish() {
      clearInterval(ping);
      window.removeEventListener("message", onAnswer);
      done();
    }
    window.addEventListener("message", onAnswer);
  });
}
