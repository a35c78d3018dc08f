// A table as the server has it: headings and rows of texts, lines above and below. Short: all of it is in the page.
import { el, swatch } from "./dom.js";

// `colours` are of the parts of a step, which the first column may name. Where no column has a title and there are three,
// the third says what the first means: the tip of its row.
export function sheet({ headings, rows, above, below }, colours) {
  const named = headings.some(({ title }) => title);
  const explained = !named && headings.length === 3;
  const ofParts = rows.some(([text]) => colours[text]);
  const shown = explained ? headings.slice(0, 2) : headings;
  const head = el("tr", {}, ...shown.map((heading) => cell("th", heading, heading.title)));
  const lines = rows.map((row) => {
    const cells = shown.map((heading, i) => cell("td", heading, i ? row[i] : first(row[0], explained && row[2], ofParts && colours)));
    return el("tr", {}, ...cells);
  });
  const texts = (of) => of.map((line) => el("p", { class: "quiet" }, line));
  const table = el("table", { class: named ? "sheet" : "words" }, ...(named ? [el("thead", {}, head)] : []), el("tbody", {}, ...lines));
  return el("div", {}, ...texts(above), ...(headings.length ? [table] : []), ...texts(below));
}

const cell = (tag, { figure }, content) => el(tag, { class: figure && "figure" }, content);

function first(text, meaning, colours) {
  if (colours) return el("span", {}, swatch(colours[text] ?? "none"), text);
  return meaning ? el("span", { class: "explained", title: meaning, tabindex: "0" }, text) : text;
}
