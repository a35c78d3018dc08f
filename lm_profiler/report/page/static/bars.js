// What stands on a track, from the left by its share of it: bars, and the whisker of an interval.
import { el } from "./dom.js";

export function placed(element, at) {
  element.style.left = `${at * 100}%`;
  return element;
}

// Nothing where an end is unknown. `interval` is its text.
export function whisker(low_s, high_s, interval, scale) {
  if (low_s === null || high_s === null) return [];
  const drawn = placed(el("span", { class: "whisker", title: `interval ${interval}` }), low_s * scale);
  drawn.style.width = `${(high_s - low_s) * scale * 100}%`;
  return [drawn];
}
