// Chooses a run and a view, and shows the view: TensorBoard's tab (showTab) and the page that is one file (showPage).
//
// The views are those of the listing: {name, title, of_run, is_live}. Most are blocks, which the route of their name
// answers. These three are drawn otherwise: `show(root, at)` fills the empty element `root`, and what it throws is shown
// in its place. `at` is {run, listing, open(run, view), place, note(changes)}: `open` goes to a run, in the view with that title,
// `place` is what the address says, and `note` has the address say more.
const DRAWERS = {
  compare: showCompare,
  trace: showTrace,
  improve: (root, { listing }) => root.append(...drawn(listing.improve)),
};

class Shell {
  constructor() {
    this.listing = null;
    this.views = [];
    this.shown = new Map(); // view -> what it shows
    this.place = readPlace();
    this.chooser = el("select", { "aria-label": "Run", hidden: "", onchange: () => this.open(this.chooser.value, this.view.title) });
    this.tabList = el("nav", { role: "tablist" });
    this.problems = el("div");
    this.main = el("main");
  }

  mount(body) {
    const buttons = [copyButton("Copy link", () => addressOf(this.place))];
    if (!isOffline()) buttons.push(button("Reload", () => this.reload(), { class: "plain" }));
    body.append(el("header", {}, this.tabList, this.chooser, ...buttons), this.problems, this.main);
  }

  async reload() {
    try {
      this.listing = await ask("runs");
    } catch (error) {
      this.problems.replaceChildren(el("div", { class: "problems" }, error.message));
      return;
    }
    meanings = this.listing.meanings;
    if (!this.views.length) this.addViews();
    const runs = this.listing.runs.filter((run) => run.stamp !== null);
    runs.sort((a, b) => (b.values.started ?? "").localeCompare(a.values.started ?? ""));
    this.latestRun = runs.length ? runs[0].run : null;
    const run = this.place.run ?? this.latestRun;
    this.chooser.replaceChildren(...runs.map((each) => option(each.run, runTitle(each), each.run === run)));
    this.showProblems();
    await this.show();
  }

  addViews() {
    for (const view of this.listing.views) {
      view.tab = button(view.title, () => this.open(this.run, view.title), { role: "tab" });
      view.section = el("section", { class: "view", "data-view": view.title });
      this.tabList.append(view.tab);
      this.main.append(view.section);
      this.views.push(view);
    }
  }

  // Where the address names no run it is the one that began last.
  get run() {
    return this.place.run ?? this.latestRun;
  }

  get view() {
    return this.views.find(({ title }) => title === this.place.view) ?? this.views[0];
  }

  async open(run, view) {
    this.note({ run, view });
    await this.show();
  }

  note(changes) {
    this.place = { ...this.place, ...changes };
    writePlace(this.place);
  }

  async go(place) {
    this.place = place;
    this.shown.clear();
    await this.reload();
  }

  async show() {
    if (this.listing === null) return;
    const open = this.view;
    const chosen = this.listing.runs.find(({ run }) => run === this.run);
    for (const view of this.views) {
      view.tab.setAttribute("aria-selected", view === open);
      const emptyViews = view.of_run ? chosen?.empty_views : this.listing.empty_views;
      view.tab.classList.toggle("empty", emptyViews?.includes(view.name) ?? false);
      view.section.hidden = view !== open;
    }
    this.chooser.hidden = !open.of_run;
    this.chooser.value = this.run;
    const version = this.versionOf(open, chosen);
    if (this.shown.get(open) === version) return;
    this.shown.set(open, version);
    const content = el("div", { class: "content" }); // of its own: an earlier one may still be filling
    open.section.replaceChildren(content);
    await this.fill(open, chosen, content);
  }

  // Two equal texts: nothing that the view shows has changed.
  versionOf(view, chosen) {
    if (!view.of_run) return JSON.stringify(this.listing.runs) + JSON.stringify(this.listing.improve);
    return `${this.run} ${chosen?.stamp} ${view.is_live ? Date.now() : ""}`;
  }

  async fill(view, chosen, content) {
    const problem = view.of_run ? this.problemOf(chosen) : null;
    if (problem) {
      content.append(problem);
      return;
    }
    try {
      const draw = DRAWERS[view.name];
      if (draw) await draw(content, this.surroundings());
      else content.append(...drawn(await askForBlocks(view.name, this.run)));
    } catch (error) {
      content.replaceChildren(el("p", { class: "error" }, error.message));
    }
  }

  problemOf(chosen) {
    const { where } = this.listing;
    if (this.run === null) return quietLine(`No runs in ${where} yet.`);
    if (!chosen) return el("p", { class: "error" }, `There is no run ${this.run} in ${where}: choose another one.`);
    if (chosen.stamp !== null) return null;
    const reason = [chosen.values.status, chosen.values.reason].filter(Boolean).join(": ");
    return el("p", { class: "error" }, `${chosen.run} has no results: ${reason}`);
  }

  surroundings() {
    const { run, listing, place } = this;
    return { run, listing, place, open: (...where) => this.open(...where), note: (changes) => this.note(changes) };
  }

  showProblems() {
    const { problems } = this.listing;
    this.problems.replaceChildren();
    if (!problems.length) return;
    const title = problems.length === 1 ? "1 folder is left out" : `${problems.length} folders are left out`;
    const lines = problems.map((problem) => el("li", {}, problem));
    this.problems.append(el("details", { class: "problems" }, el("summary", {}, title), el("ul", {}, ...lines)));
  }
}

function runTitle({ run, values }) {
  return values.status === "ok" ? run : `${run} (${values.status})`;
}

async function showTab() {
  document.title = "LM Profiler";
  followTheme();
  if (isFramedByOthers()) {
    document.body.append(el("p", { class: "error" }, "This tab is shown in TensorBoard only, not within another page."));
    return;
  }
  const shell = new Shell();
  shell.mount(document.body);
  onReload(() => shell.reload());
  onPlaceChange((place) => shell.go(place));
  await shell.reload();
}

function showPage() {
  document.documentElement.classList.add("alone");
  followTheme();
  const shell = new Shell();
  shell.mount(document.body);
  onPlaceChange((place) => shell.go(place));
  shell.reload();
}
