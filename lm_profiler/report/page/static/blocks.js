// Draws the blocks that a view is made of, whichever view it is: what each kind holds is said in blocks.py.

const BLOCKS = {
  card: ({ title, words = [], blocks }) => el("article", { class: "card" }, el("h2", {}, title, ...words.map(pill)), ...drawn(blocks)),
  fold: drawFold,
  beside: ({ blocks }) => el("div", { class: "beside" }, ...drawn(blocks)),
  section: ({ title, blocks }) => el("section", { class: "facts" }, el("h3", {}, title), ...drawn(blocks)),
  line: ({ text, look }) => el("p", { class: look }, text),
  verbatim: ({ text }) => el("pre", {}, text),
  command: ({ text }) => el("div", { class: "command" }, el("code", {}, text), copyButton("Copy", () => text)),
  legend: ({ entries }) => el("p", { class: "legend" }, ...entries.map(([name, colour]) => el("span", {}, swatch(colour), name))),
  table: shortTable,
  "long table": longTable,
  chart: ({ data, layout }) => chartElement(data, layout),
  choice: drawChoice,
  bars: drawBars,
};

// Each by itself: a block that is damaged hides no other.
function drawn(blocks) {
  return blocks.map((block) => {
    try {
      return BLOCKS[block.kind](block);
    } catch (error) {
      return el("p", { class: "error" }, `This part cannot be shown: ${error.message}`);
    }
  });
}

// What is inside is drawn when it is opened for the first time.
function drawFold({ title, blocks }) {
  const inside = el("div", { class: "inside" });
  const fold = el("details", { class: "card fold" }, el("summary", {}, el("h2", {}, title)), inside);
  fold.addEventListener("toggle", () => inside.append(...drawn(blocks)), { once: true });
  return fold;
}

function drawChoice({ label, choices }) {
  const body = el("div", { class: "stack" });
  const show = (position) => body.replaceChildren(...drawn(choices[position].blocks));
  show(0);
  const titles = choices.map(({ title }) => title);
  if (titles.length <= 4) return el("div", { class: "stack" }, chooseOne(label, titles, show), body);
  const chooser = el("select", { "aria-label": label, onchange: () => show(chooser.selectedIndex) }, ...titles.map((title) => option(title, title)));
  return el("div", { class: "stack" }, el("label", {}, `${label} `, chooser), body);
}

// Rows of a title, a bar and cells; a row with something inside opens by a click or, as any summary, by the keyboard.
function drawBars({ headings, rows }) {
  const head = barRow("div", "head", headings);
  const element = el("div", { class: "bars" }, head, ...rows.map(drawBar));
  element.style.setProperty("--cells", headings.length - 2);
  return element;
}

function drawBar({ title, name, tip, pieces = [], cells = [], inside = [], whisker, is_total: isTotal }) {
  const track = el("span", { class: "track" }, ...pieces.map(drawPiece));
  if (whisker) track.append(placed(el("span", { class: "whisker", title: whisker.tip }), whisker));
  if (!inside.length) return barRow("div", isTotal ? "total" : "", [title, track, ...cells]);
  const summary = barRow("summary", "", [title, track, ...cells], tip);
  return el("details", { "data-term": name }, summary, el("div", { class: "inside" }, ...drawn(inside)));
}

function barRow(tag, name, cells, tip = null) {
  return el(tag, { class: `bar-row ${name}`, title: tip }, ...cells.map((cell) => el("span", {}, cell)));
}

function drawPiece(piece) {
  const classes = ["piece", !piece.colour && "hatched", piece.is_pale && "pale"].filter(Boolean);
  const element = placed(el("span", { class: classes.join(" "), title: piece.tip }), piece);
  if (piece.colour) element.style.background = piece.colour;
  return element;
}

// Something on a track, from the left, by its shares of it.
function placed(element, { left, width }) {
  element.style.left = `${left * 100}%`;
  element.style.width = `${width * 100}%`;
  return element;
}
