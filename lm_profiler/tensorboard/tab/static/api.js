// The plugin's routes. The page's base is the plugin's own address, so that a path prefix of TensorBoard's is kept.

export function address(route, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return query ? `${route}?${query}` : route;
}

// The JSON of a route. Throws an Error with the server's own words, less what TensorBoard puts before them.
export async function ask(route, parameters = {}) {
  const response = await fetch(address(route, parameters), { cache: "no-cache" });
  if (!response.ok) throw new Error((await response.text()).replace(/^(Invalid argument|Not found): /, ""));
  return response.json();
}
