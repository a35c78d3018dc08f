// Elements of the page. Text goes in as text: nothing here or elsewhere turns data into markup.

const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

// `text` with everything spelled out that shows as nothing or turns the direction of writing; \n and \t stay.
function seen(text) {
  return text.replace(UNSEEN, (c) => ("\n\t".includes(c) ? c : `\\u{${c.codePointAt(0).toString(16)}}`));
}

// An attribute that starts with "on" is a listener; one that is false, null or undefined is left out.
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "title" && value) element.title = seen(value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (typeof child === "string" ? seen(child) : child)));
  return element;
}

function button(text, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, text);
}

function option(value, text, isSelected = false) {
  return el("option", { value, selected: isSelected && "" }, text);
}

function quietLine(...children) {
  return el("p", { class: "quiet" }, ...children);
}

function card(title, ...children) {
  return el("article", { class: "card" }, el("h2", {}, title), ...children);
}

// A square of a phase's colour, beside its name; "none" keeps the place of one.
function swatch(colour) {
  const square = el("span", { class: "swatch" });
  square.style.background = colour;
  return square;
}

// A word for a run, such as "noisy".
function pill(word) {
  return el("span", { class: `status ${word}` }, word);
}

// Buttons of which one is pressed. `onchange` gets its position.
function chooseOne(label, titles, onchange) {
  const buttons = titles.map((title, position) => button(title, () => press(position)));
  const mark = (pressed) => buttons.forEach((each, position) => each.setAttribute("aria-pressed", position === pressed));
  const press = (position) => {
    mark(position);
    onchange(position);
  };
  mark(0);
  return el("div", { class: "choose", role: "group", "aria-label": label }, ...buttons);
}

// Puts what `text()` gives into the clipboard.
function copyButton(title, text) {
  const copy = button(title, onclick, { class: "plain" });
  async function onclick() {
    await toClipboard(text());
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = title), 1500);
  }
  return copy;
}

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch {
    // Over plain http from another machine a browser gives pages no clipboard.
  }
  const field = el("textarea", { readonly: "" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

// -- figures as text; an unknown one is "unknown", never 0 ------------------------------------------------------------

const UNKNOWN = "unknown";
const BYTE_UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

const isKnown = (value) => value !== null && value !== undefined;

function number(value, digits = 0) {
  if (!isKnown(value)) return UNKNOWN;
  if (typeof value !== "number") return String(value);
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// A value of a column of the listing: in SI if it is a figure; `shown` is the column's {unit, scale, digits}.
function figureText(value, shown) {
  if (!isKnown(value)) return UNKNOWN;
  if (shown === null || typeof value !== "number") return number(value);
  if (shown.unit === "GiB") return memoryText(value);
  const text = number(value * shown.scale, shown.digits);
  return shown.unit ? `${text} ${shown.unit}` : text;
}

// A value of an option; what is not set and what is not known look the same.
function settingText(value) {
  if (!isKnown(value)) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// The largest unit of which `bytes` are at least a half: [its name, how many bytes it has].
function byteUnit(bytes) {
  return BYTE_UNITS.find(([, size]) => Math.abs(bytes) >= size / 2) ?? ["B", 1];
}

// Bytes in the unit that fits them, with three figures.
function memoryText(bytes) {
  const [unit, size] = byteUnit(bytes);
  const count = Math.abs(bytes / size);
  let digits = 2;
  if (size === 1 || count >= 99.95) digits = 0;
  else if (count >= 9.995) digits = 1;
  return `${number(bytes / size, digits)} ${unit}`;
}
