// B against A, as `lm_profiler compare` has it: what differs first, then each part with its ratio and its word.
import { ask } from "./api.js";
import { button, card, el, swatch, table } from "./dom.js";

// `chosen` holds the runs a and b of `runs`, and whether their repeats are wanted; `changed` is called when it changes.
export function sides(chosen, runs, colours, changed) {
  const { a, b } = chosen;
  if (!a || !b || a === b) {
    return card("B against A", el("p", { class: "quiet" }, "Choose one run as A and another one as B in the table above."));
  }
  const change = (changes) => {
    Object.assign(chosen, changes);
    changed();
  };
  const [one, other] = repeats(runs, a, b);
  const single = one.length === 1 && other.length === 1;
  const tick = el("input", { type: "checkbox", checked: chosen.repeats && "" });
  tick.addEventListener("change", () => change({ repeats: tick.checked }));
  const bar = el(
    "div",
    { class: "filters" },
    el("p", {}, el("b", {}, "A: "), a, el("br"), el("b", {}, "B: "), b),
    button("Swap", () => change({ a: b, b: a }), { class: "plain" }),
    ...(single ? [] : [el("label", {}, tick, `with all repeats (${one.length} and ${other.length} runs)`)]),
  );
  const body = el("div", {}, el("p", { class: "quiet" }, "Comparing …"));
  const [runsA, runsB] = chosen.repeats ? [one, other] : [[a], [b]];
  compare(body, [...runsA.map((run) => ["a", run]), ...runsB.map((run) => ["b", run])], colours);
  return card("B against A", bar, body);
}

// All runs of A's cell and of B's; of repeats of one cell these two alone.
function repeats(runs, a, b) {
  const [pointA, pointB] = [a, b].map((name) => runs.find(({ run }) => run === name).point);
  const of = (name, point) => {
    if (point === null || pointA === pointB) return [name];
    return runs.filter((run) => run.point === point && run.stamp !== null).map(({ run }) => run);
  };
  return [of(a, pointA), of(b, pointB)];
}

async function compare(body, query, colours) {
  try {
    const found = await ask("compare", query);
    if (found.unlike.length) body.replaceChildren(...refusal(found, () => body.replaceChildren(...comparison(found, colours))));
    else body.replaceChildren(...comparison(found, colours));
  } catch (error) {
    body.replaceChildren(el("p", { class: "error" }, error.message));
  }
}

function refusal({ unlike }, goOn) {
  return [
    el("p", { class: "error" }, "Not the same work on the same device: times say little about each other."),
    differences(unlike),
    el("p", {}, button("Compare anyway", goOn, { class: "plain" })),
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
