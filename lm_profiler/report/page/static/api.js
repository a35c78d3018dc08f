// The plugin's routes, or what a page that is one file holds of their answers. The tab's base is the plugin's own address,
// so that a path prefix of TensorBoard's is kept.

// The elements that hold answers, by what they answer.
const held = new Map([...document.querySelectorAll("script[data-route]")].map((script) => [key(script.dataset), script]));

function key({ route, run }) {
  return run === undefined ? route : `${route} ${JSON.parse(run)}`;
}

// Whether there is no server to ask.
export const isOffline = () => held.size > 0;

export function address(route, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return query ? `${route}?${query}` : route;
}

// The JSON of a route. Throws an Error with the server's own words, less what TensorBoard puts before them.
export async function ask(route, parameters = {}) {
  if (isOffline()) return JSON.parse(held.get(parameters.run === undefined ? route : `${route} ${parameters.run}`).textContent);
  const response = await fetch(address(route, parameters), { cache: "no-cache" });
  if (!response.ok) throw new Error((await response.text()).replace(/^(Invalid argument|Not found): /, ""));
  return response.json();
}
