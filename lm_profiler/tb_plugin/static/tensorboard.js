// TensorBoard tells its frames when it has reloaded (by its button or by its timer) through a port that they open.

export function onReload(reload) {
  if (window.parent === window) return;
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = ({ data }) => {
    if (JSON.parse(data).type === "experimental.DataReloaded") reload();
  };
  window.parent.postMessage("experimental.bootstrap", window.location.origin, [port2]);
}
