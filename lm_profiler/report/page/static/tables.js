// Tables: a short one stands in the page as it is; a long one is sorted, filtered, and drawn as far as a person reads.

// The meanings of figures, from the listing; a table names them by their place.
let meanings = [];

// A block "table": {titles, rows of texts, figures: the columns that are}, and what its cells look like.
function shortTable({ titles, rows, figures = [], colours = [], bold_rows: boldRows = [], styles = [], tips = [], shades }) {
  const cell = (tag, column, ...content) => el(tag, { class: figures.includes(column) && "figure" }, ...content);
  const lines = rows.map((texts, row) => {
    const tip = meanings[tips[row]] ?? tips[row];
    const cells = texts.map((text, column) => cell("td", column, ...(column ? [text] : firstCell(text, colours[row], tip))));
    shades?.[row].forEach((shade, column) => shade && paint(cells[column], shade));
    return el("tr", { class: boldRows.includes(row) && "bold" }, ...cells);
  });
  for (const [row, column, style] of styles) lines[row].children[column].classList.add(style);
  const heads = titles?.map((title, column) => cell("th", column, title));
  const head = heads ? [el("thead", {}, el("tr", {}, ...heads))] : [];
  return el("table", { class: titles ? "sheet" : "words" }, ...head, el("tbody", {}, ...lines));
}

function firstCell(text, colour, tip) {
  if (colour) return [swatch(colour), text];
  return [tip ? el("span", { class: "explained", title: tip, tabindex: "0" }, text) : text];
}

function paint(cell, { colour, percent }) {
  cell.style.background = `color-mix(in srgb, ${colour} ${percent}%, transparent)`;
}

// A block "long table", with the values of its figures to sort by: {column: a value for each row}.
function longTable({ titles, rows, values, colours = [], sorted_by: sortedBy }) {
  const columns = titles.map((title, column) => {
    const figures = values[column];
    const text = (row) => rows[row][column];
    const cell = (row) => (column === 0 && colours[row] ? el("span", {}, swatch(colours[row]), text(row)) : clipped(text(row)));
    return { title, isFigure: Boolean(figures), value: (row) => (figures ? figures[row] : text(row)), text, cell };
  });
  const long = new LongTable(columns, [...rows.keys()], { by: sortedBy, isDescending: true }, "rows");
  const filter = el("input", { type: "search", placeholder: "Filter by any words", "aria-label": "Filter" });
  filter.addEventListener("input", () => long.filter(filter.value));
  const filters = rows.length > 10 ? [el("div", { class: "filters" }, filter)] : [];
  return el("div", {}, ...filters, long.element);
}

// One line of a text; the whole is its tip.
const clipped = (text) => el("span", { class: "clipped", title: text }, text);

const PAGE_ROWS = 100;
const inOrder = new Intl.Collator("en", { numeric: true }).compare;

// A column is
//   title         of its head
//   value(row)    to sort by: text, a figure or null; what is null comes last either way
//   text(row)     the value as text, also what the filter looks into; left out: the value itself
//   cell(row)     what the cell shows, a text or an element; left out: the text
//   tip           what its head says to whoever points at it
//   isFigure      true: to the right, and its first click puts the largest first
//   width         in pixels, of a column that stays in place while the others are scrolled; such columns come first
class LongTable {
  // `sorted` is {by: a column's title, isDescending}, and changes with the clicks; `noun` names the rows.
  constructor(columns, rows, sorted, noun) {
    Object.assign(this, { columns, rows, sorted, noun });
    this.texts = new Map();
    this.shownRows = PAGE_ROWS;
    this.words = [];
    this.isWanted = () => true;
    this.heads = columns.map((column) => this.cell("th", column, button(column.title, () => this.sortBy(column), { title: column.tip })));
    this.body = el("tbody");
    this.count = el("span", { class: "quiet" });
    this.more = button("Show more", () => this.showMore(), { class: "plain" });
    const table = el("table", {}, el("thead", {}, el("tr", {}, ...this.heads)), this.body);
    this.element = el("div", {}, el("div", { class: "long" }, table), el("p", { class: "rows" }, this.count, this.more));
    this.render();
  }

  // Only rows that hold each of the words of `text`, and for which `isWanted` is true.
  filter(text, isWanted = () => true) {
    this.words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.isWanted = isWanted;
    this.shownRows = PAGE_ROWS;
    this.render();
  }

  sortBy(column) {
    this.sorted.isDescending = this.sorted.by === column.title ? !this.sorted.isDescending : Boolean(column.isFigure);
    this.sorted.by = column.title;
    this.shownRows = PAGE_ROWS;
    this.render();
  }

  showMore() {
    this.shownRows += PAGE_ROWS;
    this.render();
  }

  render() {
    this.found = this.rows.filter((row) => this.isWanted(row) && this.hasWords(row)).sort(this.order());
    const shown = this.found.slice(0, this.shownRows);
    this.body.replaceChildren(...shown.map((row) => this.line(row)));
    this.heads.forEach((head, column) => head.setAttribute("aria-sort", this.direction(this.columns[column])));
    this.count.textContent = `${number(shown.length)} of ${number(this.rows.length)} ${this.noun} shown`;
    this.more.hidden = shown.length === this.found.length;
  }

  direction(column) {
    if (column.title !== this.sorted.by) return "none";
    return this.sorted.isDescending ? "descending" : "ascending";
  }

  hasWords(row) {
    if (!this.words.length) return true;
    if (!this.texts.has(row)) {
      const texts = this.columns.map((column) => this.textOf(column, row));
      this.texts.set(row, texts.join(" ").toLowerCase());
    }
    return this.words.every((word) => this.texts.get(row).includes(word));
  }

  order() {
    const sortColumn = this.columns.find((column) => column.title === this.sorted.by);
    if (!sortColumn) return () => 0; // as they came
    const sign = this.sorted.isDescending ? -1 : 1;
    return (row, other) => {
      const [a, b] = [sortColumn.value(row), sortColumn.value(other)];
      if (!isKnown(a) || !isKnown(b)) return isKnown(b) - isKnown(a);
      const areNumbers = typeof a === "number" && typeof b === "number";
      return sign * (areNumbers ? a - b : inOrder(String(a), String(b)));
    };
  }

  line(row) {
    const cells = this.columns.map((column) => this.cell("td", column, column.cell ? column.cell(row) : this.textOf(column, row)));
    return el("tr", {}, ...cells);
  }

  textOf(column, row) {
    return column.text ? column.text(row) : String(column.value(row) ?? "");
  }

  cell(tag, column, content) {
    const element = el(tag, { scope: tag === "th" && "col", class: column.isFigure && "figure" }, content);
    if (column.width === undefined) return element;
    const before = this.columns.slice(0, this.columns.indexOf(column));
    element.classList.add("stays");
    element.style.left = `${before.reduce((sum, { width }) => sum + width, 0)}px`;
    element.style.minWidth = element.style.maxWidth = `${column.width}px`;
    return element;
  }
}
