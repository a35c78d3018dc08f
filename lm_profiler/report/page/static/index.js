// TensorBoard's tab "LM Profiler".
import * as compare from "./compare.js";
import { el } from "./dom.js";
import * as improve from "./improve.js";
import * as kernels from "./kernels.js";
import * as memory from "./memory.js";
import * as ranks from "./ranks.js";
import * as run from "./run.js";
import { Shell } from "./shell.js";
import { isFramedByOthers, onPlaceChange, onReload } from "./tensorboard.js";
import { followTheme } from "./theme.js";
import * as trace from "./trace.js";
import * as watch from "./watch.js";
import * as why from "./why.js";

export async function render() {
  const style = el("link", { rel: "stylesheet", href: "static/style.css" });
  await new Promise((done) => {
    style.onload = style.onerror = done;
    document.head.append(style);
  });
  document.title = "LM Profiler";
  followTheme();
  if (isFramedByOthers()) {
    document.body.append(el("p", { class: "error" }, "This tab is shown in TensorBoard only, not within another page."));
    return;
  }
  const shell = new Shell([run, why, memory, ranks, watch, trace, kernels, compare, improve]);
  shell.mount(document.body);
  onReload(() => shell.reload());
  onPlaceChange((place) => shell.go(place));
  await shell.reload();
}
