// Figures as text, with their units. An unknown one is "unknown", never 0.

export const UNKNOWN = "unknown";

export function number(value, digits = 0) {
  if (value === null || value === undefined) return UNKNOWN;
  if (typeof value !== "number") return String(value);
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// A value of a column of /runs: in SI if it is a figure; `shown` is the column's {unit, scale, digits}.
export function show(value, shown) {
  if (value === null || value === undefined) return UNKNOWN;
  if (shown === null || typeof value !== "number") return typeof value === "number" ? number(value) : String(value);
  if (shown.unit === "GiB") return memory(value);
  const text = number(value * shown.scale, shown.digits);
  return shown.unit ? `${text} ${shown.unit}` : text;
}

// A value of an option; what is not set and what is not known look the same.
export function setting(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export const ms = (seconds, digits = 3) => show(seconds, { unit: "ms", scale: 1e3, digits });

const BYTES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

// The largest unit of which `bytes` are at least a half: [its name, how many bytes it has].
export function unitOf(bytes) {
  return BYTES.find(([, size]) => Math.abs(bytes) >= size / 2) ?? ["B", 1];
}

// Bytes in the unit that fits them, with three figures.
export function memory(bytes) {
  if (typeof bytes !== "number") return number(bytes);
  const [unit, size] = unitOf(bytes);
  const count = bytes / size;
  return `${number(count, size === 1 || Math.abs(count) >= 99.95 ? 0 : Math.abs(count) >= 9.995 ? 1 : 2)} ${unit}`;
}
