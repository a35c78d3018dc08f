// A long table: sorted by a click on a column's head, filtered, and only as far in the page as a person reads.
//
// A column is
//   title         of its head
//   value(row)    to sort by: text, a figure or null; what is null comes last either way
//   text(row)     the value as text, also what the filter looks into; left out: the value itself
//   cell(row)     what the cell shows, a text or an element; left out: the text
//   figure        true: to the right, and its first click puts the largest first
import { button, el } from "./dom.js";
import { number } from "./units.js";

const PAGE = 100;
const { compare } = new Intl.Collator("en", { numeric: true });

export class LongTable {
  // `sorted` is {column: its place, down: the largest first}, and changes with the clicks; `what` names the rows.
  constructor(columns, rows, sorted, what) {
    Object.assign(this, { columns, rows, sorted, what });
    this.texts = new Map();
    this.shown = PAGE;
    this.words = [];
    this.keep = () => true;
    this.heads = columns.map((column, i) => el("th", { scope: "col" }, button(column.title, () => this.sortBy(i))));
    this.body = el("tbody");
    this.count = el("span", { class: "quiet" });
    this.more = button("Show more", () => this.showMore(), { class: "plain" });
    const classes = columns.map((column) => (column.figure ? "figure" : null));
    this.classes = classes;
    this.heads.forEach((head, i) => classes[i] && head.classList.add(classes[i]));
    this.element = el(
      "div",
      {},
      el("div", { class: "long" }, el("table", {}, el("thead", {}, el("tr", {}, ...this.heads)), this.body)),
      el("p", { class: "rows" }, this.count, this.more),
    );
    this.render();
  }

  // Only rows that hold each of the words of `text`, and that `keep` wants.
  filter(text, keep = () => true) {
    this.words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.keep = keep;
    this.shown = PAGE;
    this.render();
  }

  sortBy(column) {
    const again = this.sorted.column === column;
    this.sorted.down = again ? !this.sorted.down : Boolean(this.columns[column].figure);
    this.sorted.column = column;
    this.shown = PAGE;
    this.render();
  }

  showMore() {
    this.shown += PAGE;
    this.render();
  }

  render() {
    this.found = this.rows.filter((row) => this.keep(row) && this.holdsWords(row)).sort(this.order());
    const shown = this.found.slice(0, this.shown);
    this.body.replaceChildren(...shown.map((row) => this.line(row)));
    this.heads.forEach((head, i) => head.setAttribute("aria-sort", this.direction(i)));
    this.count.textContent = `${number(shown.length)} of ${number(this.rows.length)} ${this.what} shown`;
    this.more.hidden = shown.length === this.found.length;
  }

  direction(column) {
    if (column !== this.sorted.column) return "none";
    return this.sorted.down ? "descending" : "ascending";
  }

  holdsWords(row) {
    if (!this.words.length) return true;
    if (!this.texts.has(row)) {
      this.texts.set(row, this.columns.map((column) => textOf(column, row)).join(" ").toLowerCase());
    }
    return this.words.every((word) => this.texts.get(row).includes(word));
  }

  order() {
    const { value } = this.columns[this.sorted.column];
    const sign = this.sorted.down ? -1 : 1;
    return (one, other) => {
      const [a, b] = [value(one) ?? null, value(other) ?? null];
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (typeof a === "number" && typeof b === "number" ? a - b : compare(String(a), String(b)));
    };
  }

  line(row) {
    const cells = this.columns.map((column, i) => {
      const content = column.cell ? column.cell(row) : textOf(column, row);
      return el("td", { class: this.classes[i] }, content);
    });
    return el("tr", {}, ...cells);
  }
}

function textOf(column, row) {
  return column.text ? column.text(row) : String(column.value(row) ?? "");
}
