// Light or dark as TensorBoard is: it marks its own page, of which this one is a frame. Alone, as the system is.

const system = window.matchMedia("(prefers-color-scheme: dark)");

export function followTheme() {
  const outer = tensorBoardBody();
  const apply = () => {
    const dark = outer === null ? system.matches : outer.classList.contains("dark-mode");
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.dispatchEvent(new Event("themechange"));
  };
  apply();
  if (outer === null) system.addEventListener("change", apply);
  else new MutationObserver(apply).observe(outer, { attributeFilter: ["class"] });
}

function tensorBoardBody() {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null; // embedded in somebody else's page
  }
}
