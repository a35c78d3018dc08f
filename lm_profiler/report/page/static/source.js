// What surrounds the views: where answers come from, TensorBoard's address, its reloads, and light or dark.

const TAB = "lm_profiler";
const OURS = `p.${TAB}.`; // TensorBoard keeps what stands in its address under this prefix for its plugin
const NO_TEXT = /\p{Cs}/gu; // of a folder whose name is not UTF-8

// What an HTML page holds: the answers by their route, and plotly. The tab holds nothing, and asks the plugin.
const held = new Map([...document.querySelectorAll("script[data-route]")].map((script) => [script.dataset.route, script]));
const unpacked = new Map();

// Whether there is no server to ask.
const isOffline = () => held.size > 0;

// The text that a page holds, packed by gzip and base64.
async function heldText(route) {
  const bytes = Uint8Array.from(atob(held.get(route).textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function heldAnswer(route) {
  if (!unpacked.has(route)) unpacked.set(route, heldText(route).then(JSON.parse));
  return unpacked.get(route);
}

// The address of a route, relative to the plugin's own, so that a path prefix of TensorBoard's is kept.
function routeAddress(route, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return query ? `${route}?${query}` : route;
}

// The JSON of a route. Throws an Error with the server's own words, less what TensorBoard puts before them.
async function ask(route, parameters = {}) {
  if (isOffline()) return heldAnswer(route);
  const response = await fetch(routeAddress(route, parameters), { cache: "no-cache" });
  if (!response.ok) throw new Error((await response.text()).replace(/^(Invalid argument|Not found): /, ""));
  return response.json();
}

// The blocks of a view of one run. A page holds the first block of all runs, then the second of all, and so on.
async function askForBlocks(view, run) {
  if (!isOffline()) return (await ask(view, { run })).blocks;
  const { names, blocks } = await heldAnswer(view);
  const place = names.indexOf(run);
  return blocks.map((column) => column[place]).filter(Boolean);
}

// -- TensorBoard, of which the tab is a frame; a page that is a file is its own host ----------------------------------

// Whether somebody else's page shows this one as a frame: TensorBoard is of the same origin, and so readable.
function isFramedByOthers() {
  try {
    return window.parent.location.origin !== window.location.origin;
  } catch {
    return true;
  }
}

// TensorBoard tells its frames when it has reloaded (by its button or by its timer) through a port that they open.
function onReload(reload) {
  if (window.parent === window) return;
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = ({ data }) => {
    if (JSON.parse(data).type === "experimental.DataReloaded") reload();
  };
  window.parent.postMessage("experimental.bootstrap", window.location.origin, [port2]);
}

// What the address says of this tab: {name: text}, such as #lm_profiler&p.lm_profiler.run=a&p.lm_profiler.view=run.
function readPlace() {
  const place = {};
  for (const piece of addressPieces().filter(isOurs)) {
    const [name, text = ""] = piece.slice(OURS.length).split("=");
    place[decoded(name)] = decoded(text);
  }
  return place;
}

// The whole address that opens the tab at `place`; what is null or empty is left out.
function addressOf(place) {
  const set = Object.entries(place).filter(([, value]) => value);
  const ours = set.map(([name, value]) => `${OURS}${name}=${encodeURIComponent(value.replace(NO_TEXT, "\ufffd"))}`);
  const others = addressPieces().filter((piece) => piece.includes("=") && !isOurs(piece));
  return `${window.parent.location.href.split("#")[0]}#${[TAB, ...others, ...ours].join("&")}`;
}

// The address says `place` from now on; not while another tab is open, whose address it is.
function writePlace(place) {
  const { history } = window.parent;
  const isOpen = window.parent === window || addressPieces()[0] === TAB;
  if (isOpen) history.replaceState(history.state, "", addressOf(place));
}

// When a person changes the address, by a link or by hand.
function onPlaceChange(go) {
  window.parent.addEventListener("hashchange", () => {
    if (addressPieces()[0] === TAB) go(readPlace());
  });
}

const addressPieces = () => window.parent.location.hash.slice(1).split("&").filter(Boolean);
const isOurs = (piece) => piece.startsWith(OURS);

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // cut off within a character
  }
}

// -- light or dark as TensorBoard is: it marks its own page. Alone, as the system is -----------------------------------

function followTheme() {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const outer = tensorBoardBody();
  const apply = () => {
    const isDark = outer === null ? system.matches : outer.classList.contains("dark-mode");
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    document.dispatchEvent(new Event("themechange"));
  };
  apply();
  if (outer === null) system.addEventListener("change", apply);
  else new MutationObserver(apply).observe(outer, { attributeFilter: ["class"] });
}

function tensorBoardBody() {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null; // embedded in somebody else's page
  }
}
