// The page that is one file: the tab's views of runs that the page holds. Traces and comparisons need more than it has.
import * as compare from "./compare.js";
import * as improve from "./improve.js";
import * as kernels from "./kernels.js";
import * as memory from "./memory.js";
import * as ranks from "./ranks.js";
import * as run from "./run.js";
import { Shell } from "./shell.js";
import { onPlaceChange } from "./tensorboard.js";
import { followTheme } from "./theme.js";
import * as watch from "./watch.js";
import * as why from "./why.js";

document.documentElement.classList.add("alone");
followTheme();
const shell = new Shell([compare, run, why, memory, ranks, watch, kernels, improve]);
shell.mount(document.body);
onPlaceChange((place) => shell.go(place));
shell.reload();
