// Elements. Text goes in as text: nothing here or elsewhere turns data into markup.

// An attribute that starts with "on" is a listener; one that is false, null or undefined is left out.
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function button(text, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, text);
}

export function option(value, text, selected = false) {
  return el("option", { value, selected: selected && "" }, text);
}

// A card with a heading.
export function card(title, ...children) {
  return el("article", { class: "card" }, el("h2", {}, title), ...children);
}

// A table of texts or elements. The first column is of words, the others of figures, if `figures`.
export function table(header, rows, { figures = true } = {}) {
  const cells = (tag, row) => row.map((cell) => el(tag, {}, cell));
  return el(
    "table",
    { class: figures ? "figures" : "words" },
    el("thead", {}, el("tr", {}, ...cells("th", header))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells("td", row)))),
  );
}

// A square of a phase's colour, beside its name.
export function swatch(colour) {
  const square = el("span", { class: "swatch" });
  square.style.background = colour;
  return square;
}

// One button of several is pressed. `choices` are [value, text].
export function choose(label, choices, chosen, onchange) {
  const buttons = choices.map(([value, text]) => button(text, () => press(value), { "data-value": value }));
  const press = (value) => {
    for (const each of buttons) each.setAttribute("aria-pressed", each.dataset.value === value);
    onchange(value);
  };
  for (const each of buttons) each.setAttribute("aria-pressed", each.dataset.value === chosen);
  return el("div", { class: "choose", role: "group", "aria-label": label }, ...buttons);
}
