// Not written yet.
import { el } from "./dom.js";

export const title = "Compare";
export const ofRun = false;

export async function show(root, at) {
  root.append(el("p", { class: "quiet" }, "Not written yet."));
}
