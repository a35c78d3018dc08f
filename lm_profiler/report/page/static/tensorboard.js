// The TensorBoard around this page, which is a frame in it; alone in its window, the page is its own host.

const TAB = "lm_profiler";
const NO_TEXT = /\p{Cs}/gu; // of a folder whose name is not UTF-8
const OURS = `p.${TAB}.`; // TensorBoard keeps what stands in its address under this prefix for its plugin

// Whether somebody else's page shows this one as a frame: TensorBoard is of the same origin, and so readable.
export function isFramedByOthers() {
  try {
    return window.parent.location.origin !== window.location.origin;
  } catch {
    return true;
  }
}

// TensorBoard tells its frames when it has reloaded (by its button or by its timer) through a port that they open.
export function onReload(reload) {
  if (window.parent === window) return;
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = ({ data }) => {
    if (JSON.parse(data).type === "experimental.DataReloaded") reload();
  };
  window.parent.postMessage("experimental.bootstrap", window.location.origin, [port2]);
}

// What the address says of this tab: {name: text}, such as #lm_profiler&p.lm_profiler.run=a&p.lm_profiler.view=Run.
export function readPlace() {
  const pairs = pieces().filter(isOurs).map((piece) => piece.slice(OURS.length).split("="));
  return Object.fromEntries(pairs.map((pair) => pair.map(decoded)));
}

// The whole address that opens the tab at `place`; what is null or empty is left out.
export function addressOf(place) {
  const set = Object.entries(place).filter(([, value]) => value);
  const ours = set.map(([name, value]) => `${OURS}${name}=${encodeURIComponent(value.replace(NO_TEXT, "\ufffd"))}`);
  const others = pieces().filter((piece) => piece.includes("=") && !isOurs(piece));
  return `${window.parent.location.href.split("#")[0]}#${[TAB, ...others, ...ours].join("&")}`;
}

// The address says `place` from now on; not while another tab is open, whose address it is.
export function writePlace(place) {
  const { history } = window.parent;
  if (window.parent === window || pieces()[0] === TAB) history.replaceState(history.state, "", addressOf(place));
}

// When a person changes the address, by a link or by hand.
export function onPlaceChange(go) {
  window.parent.addEventListener("hashchange", () => pieces()[0] === TAB && go(readPlace()));
}

const pieces = () => window.parent.location.hash.slice(1).split("&").filter(Boolean);
const isOurs = (piece) => piece.startsWith(OURS);

function decoded(text = "") {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // cut off within a character
  }
}
