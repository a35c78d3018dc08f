// What `lm_profiler improve` found: of each search the way down, a bar after each change that was kept, and all that was tried.
import { placed, whisker } from "./bars.js";
import { copyButton, el, pill } from "./dom.js";
import { sheet } from "./sheet.js";

export const title = "Improve";
export const ofRun = false;

export async function show(root, { listing, colours }) {
  if (!listing.searches.length) {
    const call = el("code", {}, "lm_profiler improve --config demo");
    root.append(el("p", { class: "quiet" }, `Nobody has searched for what is faster in ${listing.where}: `, call));
  }
  root.append(...listing.searches.map((search) => card(search, colours)));
}

function card({ name, ended, headline, command, way, way_titles, table }, colours) {
  return el(
    "article",
    { class: "card", "data-search": name },
    el("h2", {}, name, pill(ended)),
    el("p", { class: "headline" }, headline),
    ...(way.length ? [down(way, way_titles, colours)] : []),
    sheet(table, colours.parts),
    el("div", { class: "command" }, el("code", {}, command), copyButton("Copy", () => command)),
  );
}

// A change's bar ends where the step does with it; the pale piece behind it is what the change saved.
function down(way, titles, colours) {
  const scale = 1 / Math.max(...way.map(({ step_s, high_s }) => Math.max(step_s, high_s ?? 0)));
  const head = el("div", { class: "rung head" }, ...["", "", ...titles].map((text) => el("span", {}, text)));
  return el("div", { class: "way" }, head, ...way.map((point, i) => row(point, way[i - 1] ?? point, scale, colours)));
}

function row({ name, step_s, low_s, high_s, text, interval }, before, scale, colours) {
  const bar = el("span", { class: "track" }, piece(0, step_s, colours.series[0], scale));
  if (before.step_s > step_s) bar.append(piece(step_s, before.step_s, colours.pale, scale, "saved"));
  bar.append(...whisker(low_s, high_s, interval, scale));
  return el("div", { class: "rung" }, ...[name, bar, text, interval].map((cell) => el("span", {}, cell)));
}

function piece(from_s, to_s, colour, scale, name = "") {
  const drawn = placed(el("span", { class: `piece ${name}` }), from_s * scale);
  drawn.style.width = `${(to_s - from_s) * scale * 100}%`;
  drawn.style.background = colour;
  return drawn;
}
