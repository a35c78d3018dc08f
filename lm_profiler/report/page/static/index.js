// TensorBoard's tab "LM Profiler": it loads the style and the one script of the tab (script.js), which the HTML page
// holds, too. TensorBoard loads this file as a module, relative to the plugin's own address.

export async function render() {
  await loaded(element("link", { rel: "stylesheet", href: "static/style.css" }));
  await loaded(element("script", { src: "script.js" }));
  await window.showTab();
}

function element(tag, attributes) {
  return Object.assign(document.createElement(tag), attributes);
}

function loaded(element) {
  return new Promise((done) => {
    element.onload = element.onerror = done;
    document.head.append(element);
  });
}
