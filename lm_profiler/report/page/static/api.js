// The plugin's routes, or what a page that is one file holds of their answers. The tab's base is the plugin's own address,
// so that a path prefix of TensorBoard's is kept.

import { unpacked } from "./unpack.js";

// What the page holds, unpacked when it is first asked for: answers by their route, and plotly.
const held = new Map([...document.querySelectorAll("script[data-bytes]")].map((script) => [script.dataset.route ?? script.dataset.script, script]));
const answers = new Map();

// Whether there is no server to ask.
export const isOffline = () => held.size > 0;

export function heldText(name) {
  const { textContent, dataset } = held.get(name);
  return unpacked(textContent, Number(dataset.bytes));
}

function heldAnswer(route) {
  if (!answers.has(route)) answers.set(route, JSON.parse(heldText(route)));
  return answers.get(route);
}

export function address(route, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return query ? `${route}?${query}` : route;
}

// The JSON of a route. Throws an Error with the server's own words, less what TensorBoard puts before them.
export async function ask(route, parameters = {}) {
  if (isOffline()) return parameters.run === undefined ? heldAnswer(route) : heldAnswer(route)[parameters.run];
  const response = await fetch(address(route, parameters), { cache: "no-cache" });
  if (!response.ok) throw new Error((await response.text()).replace(/^(Invalid argument|Not found): /, ""));
  return response.json();
}
