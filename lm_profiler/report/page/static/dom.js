// Elements. Text goes in as text: nothing here or elsewhere turns data into markup.

const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

// `text` with everything spelled out that shows as nothing or turns the direction of writing; \n and \t stay.
export function seen(text) {
  return text.replace(UNSEEN, (c) => ("\n\t".includes(c) ? c : `\\u{${c.codePointAt(0).toString(16)}}`));
}

const readable = (child) => (typeof child === "string" ? seen(child) : child);

// An attribute that starts with "on" is a listener; one that is false, null or undefined is left out.
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, name === "title" ? seen(value) : value);
  }
  element.append(...children.map(readable));
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

// A word for a run, such as "noisy".
export const pill = (word) => el("span", { class: `status ${word}` }, word);

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

// A long name on one line: what does not fit is left out of its middle, since names differ at their ends. The tip has it all.
export function middle(text, { tail = 20 } = {}) {
  const whole = [...seen(text)];
  if (whole.length <= 2 * tail) return el("span", { class: "middle", title: text }, seen(text));
  const end = el("span", { class: "tail" }, whole.slice(-tail).join(""));
  return el("span", { class: "middle", title: text }, el("span", { class: "head" }, whole.slice(0, -tail).join("")), end);
}

// Puts what `text()` gives into the clipboard.
export function copyButton(title, text) {
  const copy = button(title, async () => {
    await toClipboard(text());
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = title), 1500);
  }, { class: "plain" });
  return copy;
}

// Over plain http from another machine a browser gives pages no clipboard: then the old way.
async function toClipboard(text) {
  try {
    return await navigator.clipboard.writeText(text);
  } catch {
    // none, or not now
  }
  const field = el("textarea", { readonly: "" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
