// Chooses a run and a view, and shows the view: TensorBoard's tab (tab.js) and the page that is one file (page.js).
//
// A view is one file. It exports
//   title            what its tab says
//   ofRun            true: it shows the chosen run; false: it shows all runs, and is shown without one
//   live             true: what it shows grows while the run's record stays, so it is asked for whenever it is opened
//   show(root, at)   async: fills the empty element `root`. What it throws is shown in its place.
// `at` is
//   run              the chosen run's folder, relative to the log folder: what the routes take as ?run=
//   listing          the answer of /runs, see answers.py in the folder above
//   colours          the answer of /colours: {parts, series, pale}, see there
//   open(run, view)  goes to a run, in the view with that title
//   place            what the address says of the tab: {run, view}, and what views noted there
//   note(changes)    has the address say more of the place, so that its link brings one back to it
// `show` is called when its tab is opened for the first time and when what it shows has changed, never while hidden.
//
// To build with: dom.js (elements, never markup), api.js (ask), units.js (figures as text), charts.js (plotly, in the
// page's light or dark colours).
import { ask, isOffline } from "./api.js";
import { button, copyButton, el, option } from "./dom.js";
import { addressOf, readPlace, writePlace } from "./tensorboard.js";

// Of `views` the first is shown where the address names none.
export class Shell {
  constructor(views) {
    this.views = views;
    this.colours = null;
    this.listing = null;
    this.place = {};
    this.read(readPlace());
    this.shown = new Map(); // view -> what it shows
    this.chooser = el("select", { "aria-label": "Run", hidden: "", onchange: () => this.open(this.chooser.value, this.view.title) });
    this.tabs = new Map(this.views.map((view) => [view, button(view.title, () => this.open(this.run, view.title))]));
    this.sections = new Map(this.views.map((view) => [view, el("section", { class: "view", "data-view": view.title })]));
    this.problems = el("div");
  }

  mount(body) {
    const tabs = el("nav", { role: "tablist" }, ...this.tabs.values());
    for (const tab of this.tabs.values()) tab.setAttribute("role", "tab");
    body.append(
      el("header", {}, tabs, this.chooser, copyButton("Copy link", () => addressOf(this.place)), ...(isOffline() ? [] : [button("Reload", () => this.reload(), { class: "plain" })])),
      this.problems,
      el("main", {}, ...this.sections.values()),
    );
  }

  async reload() {
    try {
      this.colours ??= await ask("colours");
      this.listing = await ask("runs");
    } catch (error) {
      this.problems.replaceChildren(el("div", { class: "problems" }, error.message));
      return;
    }
    const runs = this.listing.runs.filter((each) => each.stamp !== null);
    runs.sort((a, b) => (b.values.started ?? "").localeCompare(a.values.started ?? ""));
    this.run ??= runs.length ? runs[0].run : null;
    this.chooser.replaceChildren(...runs.map((each) => option(each.run, label(each), each.run === this.run)));
    this.showProblems();
    await this.show();
  }

  // Without a word of the run it is the one that began last.
  read(place) {
    this.place = place;
    this.run = place.run ?? null;
    this.view = this.views.find((view) => view.title === place.view) ?? this.views[0];
  }

  async open(run, title) {
    this.run = run;
    this.view = this.views.find((view) => view.title === title) ?? this.view;
    this.note({ run, view: this.view.title });
    await this.show();
  }

  note(changes) {
    this.place = { ...this.place, ...changes };
    writePlace(this.place);
  }

  async go(place) {
    this.read(place);
    this.shown.clear();
    await this.reload();
  }

  async show() {
    if (this.listing === null) return;
    const view = this.view;
    for (const [each, tab] of this.tabs) tab.setAttribute("aria-selected", each === view);
    for (const [each, section] of this.sections) section.hidden = each !== view;
    this.chooser.hidden = !view.ofRun;
    this.chooser.value = this.run;
    const what = this.contentOf(view);
    if (this.shown.get(view) === what) return;
    this.shown.set(view, what);
    const content = el("div", { class: "content" }); // of its own: an earlier one may still be filling
    this.sections.get(view).replaceChildren(content);
    await this.fill(view, content);
  }

  async fill(view, content) {
    if (view.ofRun && this.run === null) {
      content.append(el("p", { class: "quiet" }, `No runs in ${this.listing.where} yet.`));
      return;
    }
    const { run, listing, colours, place } = this;
    const chosen = listing.runs.find((each) => each.run === run);
    if (view.ofRun && !chosen?.stamp) {
      content.append(el("p", { class: "error" }, chosen ? end(chosen) : `There is no run ${run} in ${listing.where}: choose another one.`));
      return;
    }
    const [open, note] = [(...where) => this.open(...where), (changes) => this.note(changes)];
    try {
      await view.show(content, { run, listing, colours, open, place, note });
    } catch (error) {
      content.replaceChildren(el("p", { class: "error" }, error.message));
    }
  }

  // Two equal texts: nothing that the view shows has changed.
  contentOf(view) {
    if (!view.ofRun) return JSON.stringify(this.listing);
    return `${this.run} ${this.listing.runs.find((each) => each.run === this.run)?.stamp} ${view.live ? Date.now() : ""}`;
  }

  showProblems() {
    const { problems } = this.listing;
    this.problems.replaceChildren();
    if (!problems.length) return;
    const lines = problems.map((problem) => el("li", {}, problem));
    const title = problems.length === 1 ? "1 folder is left out" : `${problems.length} folders are left out`;
    this.problems.append(el("details", { class: "problems" }, el("summary", {}, title), el("ul", {}, ...lines)));
  }
}

function label(run) {
  return run.values.status === "ok" ? run.run : `${run.run} (${run.values.status})`;
}

// Of a cell that left no run.
const end = ({ run, values }) => `${run} left no run: ${[values.status, values.reason].filter(Boolean).join(": ")}`;
