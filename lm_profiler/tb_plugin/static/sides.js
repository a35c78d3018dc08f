// B against A, as `lm_profiler compare` has it: what differs first, then each part with its ratio and its word.
import { ask } from "./api.js";
import { button, card, el, swatch, table } from "./dom.js";

// `chosen` holds the runs a and b; `again` is called when they were swapped, after `swapped`.
export function sides(chosen, colours, again, swapped) {
  const { a, b } = chosen;
  if (!a || !b) {
    return card("B against A", el("p", { class: "quiet" }, "Choose one run as A and another one as B in the table above."));
  }
  const swap = () => {
    Object.assign(chosen, { a: b, b: a });
    swapped();
    again();
  };
  const who = el("p", {}, el("b", {}, "A: "), a, el("br"), el("b", {}, "B: "), b);
  const body = el("div", {}, el("p", { class: "quiet" }, "Comparing …"));
  compare(body, a, b, colours);
  return card("B against A", el("div", { class: "filters" }, who, button("Swap", swap, { class: "plain" })), body);
}

async function compare(body, a, b, colours) {
  try {
    const found = await ask("compare", { a, b });
    if (found.unlike.length) body.replaceChildren(...refusal(found, () => body.replaceChildren(...comparison(found, colours))));
    else body.replaceChildren(...comparison(found, colours));
  } catch (error) {
    body.replaceChildren(el("p", { class: "error" }, error.message));
  }
}

function refusal({ unlike }, goOn) {
  return [
    el("p", { class: "error" }, "Not the same work on the same device, so that times say little about each other:"),
    differences(unlike),
    el("p", {}, button("Compare all the same", goOn, { class: "plain" })),
  ];
}

function comparison(found, colours) {
  const { unlike, config, environment, header, rows } = found;
  const [verdict, ...notes] = found.closing;
  const texts = rows.map(([part, ...cells]) => [label(part, colours), ...cells.slice(0, -1), word(cells.at(-1))]);
  return [
    ...titled("Not the same work on the same device", unlike),
    ...(config.length ? titled("Configs differ", config) : [el("p", { class: "quiet" }, "Configs: the same.")]),
    ...(environment.length ? titled("Environments differ", environment) : [el("p", { class: "quiet" }, "Environments: the same.")]),
    el("h3", {}, verdict),
    table(header, texts),
    ...notes.map((line) => el("p", { class: line.startsWith("note:") && "quiet" }, line)),
  ];
}

function titled(title, rows) {
  return rows.length ? [el("h3", {}, title), el("div", { class: "scroll" }, differences(rows))] : [];
}

function differences(rows) {
  const texts = rows.map(({ path, a, b }) => [path, value(a), value(b)]);
  const element = table(["option", "A", "B"], texts, { figures: false });
  element.classList.add("headed");
  return element;
}

const value = (given) => (typeof given === "string" ? given : JSON.stringify(given));

function label(part, colours) {
  return el("span", {}, ...(colours.parts[part] ? [swatch(colours.parts[part])] : []), part);
}

const word = (verdict) => el("span", { class: `word ${verdict.toLowerCase()}` }, verdict);
