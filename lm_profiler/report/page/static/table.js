// A long table: sorted by a click on a column's head, filtered, and only as far in the page as a person reads.
//
// A column is
//   title         of its head
//   value(row)    to sort by: text, a figure or null; what is null comes last either way
//   text(row)     the value as text, also what the filter looks into; left out: the value itself
//   cell(row)     what the cell shows, a text or an element; left out: the text
//   tip           what its head says to whoever points at it
//   figure        true: to the right, and its first click puts the largest first
//   width         in pixels, of a column that stays in place while the others are scrolled; such columns come first
import { button, el } from "./dom.js";
import { number } from "./units.js";

const PAGE = 100;
const { compare } = new Intl.Collator("en", { numeric: true });

export class LongTable {
  // `sorted` is {by: a column's title, down: the largest first}, and changes with the clicks; `what` names the rows.
  constructor(columns, rows, sorted, what) {
    Object.assign(this, { columns, rows, sorted, what });
    this.texts = new Map();
    this.shown = PAGE;
    this.words = [];
    this.keep = () => true;
    this.lefts = new Map(columns.map((column, i) => [column, columns.slice(0, i).reduce((sum, { width }) => sum + width, 0)]));
    this.heads = columns.map((column) => this.cell("th", column, button(column.title, () => this.sortBy(column), { title: column.tip })));
    this.body = el("tbody");
    this.count = el("span", { class: "quiet" });
    this.more = button("Show more", () => this.showMore(), { class: "plain" });
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
    this.sorted.down = this.sorted.by === column.title ? !this.sorted.down : Boolean(column.figure);
    this.sorted.by = column.title;
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
    this.heads.forEach((head, i) => head.setAttribute("aria-sort", this.direction(this.columns[i])));
    this.count.textContent = `${number(shown.length)} of ${number(this.rows.length)} ${this.what} shown`;
    this.more.hidden = shown.length === this.found.length;
  }

  direction(column) {
    if (column.title !== this.sorted.by) return "none";
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
    const by = this.columns.find((column) => column.title === this.sorted.by);
    if (!by) return () => 0; // as they came
    const { value } = by;
    const sign = this.sorted.down ? -1 : 1;
    return (one, other) => {
      const [a, b] = [value(one) ?? null, value(other) ?? null];
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (typeof a === "number" && typeof b === "number" ? a - b : compare(String(a), String(b)));
    };
  }

  line(row) {
    const cells = this.columns.map((column) => {
      return this.cell("td", column, column.cell ? column.cell(row) : textOf(column, row));
    });
    return el("tr", {}, ...cells);
  }

  cell(tag, column, content) {
    const stays = column.width !== undefined;
    const element = el(tag, { scope: tag === "th" && "col", class: `${column.figure ? "figure" : ""} ${stays ? "stays" : ""}` }, content);
    if (stays) {
      element.style.left = `${this.lefts.get(column)}px`;
      for (const side of ["minWidth", "maxWidth"]) element.style[side] = `${column.width}px`;
    }
    return element;
  }
}

function textOf(column, row) {
  return column.text ? column.text(row) : String(column.value(row) ?? "");
}
