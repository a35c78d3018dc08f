// Why a step takes as long as it does: a bar a term, from the ideal step to the measured one. Each opens what it consists of.
import { ask } from "./api.js";
import { placed, whisker } from "./bars.js";
import { card, el, pill, swatch } from "./dom.js";
import { sheet } from "./sheet.js";
import { ms, number } from "./units.js";

export const title = "Why";
export const ofRun = true;

export async function show(root, { run, colours }) {
  const found = await ask("why", { run });
  if (found.why) {
    root.append(el("p", { class: "quiet" }, found.why));
    return;
  }
  const { step, terms, facts, notes, words } = found;
  const scale = 1 / Math.max(step.seconds, step.high_s ?? 0, ...terms.map(({ start_s, seconds }) => start_s + seconds));
  const heading = `From the ideal step to the measured one: ${step.text} ms ${step.interval}`;
  root.append(
    el(
      "article",
      { class: "card" },
      el("h2", {}, heading, ...words.map(pill)),
      el("p", {}, summary(found)),
      legend([...terms, step], 0.002 * step.seconds, colours),
      el(
        "div",
        { class: "waterfall" },
        row("div", { name: "head" }, "", "", "ms", "share", "could save at most"),
        ...terms.map((term) => rung(term, scale, colours)),
        measured(step, scale, colours),
      ),
      el("p", { class: "quiet" }, `Open a bar to see what it consists of. Could save at most: ${found.to_win}.`),
      ...notes.map((note) => el("p", { class: "quiet" }, `Note: ${note}`)),
    ),
    card("What it is measured against", sheet(facts, colours.parts)),
  );
}

// The answer in a sentence: what would be ideal, and the two largest of the others.
function summary({ terms, step }) {
  const [ideal, ...others] = terms;
  const largest = others.filter(({ seconds }) => seconds >= 0.01 * step.seconds).sort((a, b) => b.seconds - a.seconds);
  const named = largest.slice(0, 2).map(({ title, text }) => `${text.replace("+", "")} ms ${title}`).join(", ");
  return `${ideal.text} ms (${percent(ideal.share)}) would be ideal.${named ? ` Most is added by: ${named}.` : ""}`;
}

const percent = (share) => (share === null ? "" : `${number(share * 100, 1)} %`);

function row(tag, { name = "", tip = null } = {}, ...cells) {
  return el(tag, { class: `rung ${name}`, title: tip }, ...cells.map((cell) => el("span", {}, cell)));
}

// A term opens by a click or, as any summary, by the keyboard.
function rung(term, scale, colours) {
  const end = (term.start_s + term.seconds) * scale;
  const bar = track(term.start_s, term.pieces, scale, colours);
  bar.append(placed(el("span", { class: "lead" }), end));
  return el(
    "details",
    { "data-term": term.name },
    row("summary", { tip: term.meaning || null }, term.title, bar, term.text, percent(term.share), term.at_most ?? ""),
    el("div", { class: "inside" }, el("p", {}, sentence(term)), consists(term, colours)),
  );
}

function sentence({ title, meaning, at_most, ends }) {
  const sure = `${ends ? ` It took ${ends}.` : ""}${at_most ? ` Could save at most ${at_most} ms.` : ""}`;
  return meaning ? `${title[0].toUpperCase()}${title.slice(1)}: ${meaning}.${sure}` : sure;
}

function consists({ contributors }, colours) {
  if (!contributors.rows.length) return el("p", { class: "quiet" }, "What it consists of is not known.");
  return sheet(contributors, colours.parts);
}

function measured(step, scale, colours) {
  const bar = track(0, step.pieces, scale, colours);
  bar.append(...whisker(step.low_s, step.high_s, `of 95 % ${step.interval}`, scale));
  return row("div", { name: "whole" }, "measured step", bar, step.text, "100.0 %", "");
}

// Pieces one behind the other, from `start_s` on; hatched is what is of no known phase.
function track(start_s, pieces, scale, colours) {
  const bar = el("span", { class: "track" });
  let at = start_s;
  for (const [part, seconds] of Object.entries(pieces)) {
    const piece = placed(el("span", { class: `piece${part ? "" : " hatched"}`, title: `${part || "no known phase"}: ${ms(seconds)}` }), Math.min(at, at + seconds) * scale);
    piece.style.width = `${Math.abs(seconds) * scale * 100}%`;
    if (part) piece.style.background = colours.parts[part] ?? colours.pale;
    bar.append(piece);
    at += seconds;
  }
  return bar;
}

// Of the phases that can be seen.
function legend(drawn, least, colours) {
  const occurring = Object.keys(colours.parts).filter((part) => drawn.some(({ pieces }) => pieces[part] >= least));
  return el("p", { class: "legend" }, ...occurring.map((part) => el("span", {}, swatch(colours.parts[part]), part)));
}
