// Figures as text, with their units. An unknown one is "unknown", never 0.

export const UNKNOWN = "unknown";

export function number(value, digits = 0) {
  return value === null || value === undefined
    ? UNKNOWN
    : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// A value of a column of /runs: in SI if it is a figure; `shown` is the column's {unit, scale, digits}.
export function show(value, shown) {
  if (value === null || value === undefined) return UNKNOWN;
  if (shown === null || typeof value !== "number") return typeof value === "number" ? number(value) : String(value);
  const text = number(value * shown.scale, shown.digits);
  return shown.unit ? `${text} ${shown.unit}` : text;
}

// A value of an option; what is not set and what is not known look the same.
export function setting(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export const ms = (seconds, digits = 3) => show(seconds, { unit: "ms", scale: 1e3, digits });
export const gib = (bytes, digits = 3) => show(bytes, { unit: "GiB", scale: 2 ** -30, digits });

// Of a file.
export function size(bytes) {
  const [unit, scale] = bytes < 2 ** 20 ? ["KiB", 2 ** -10] : ["MiB", 2 ** -20];
  return `${number(bytes * scale, bytes * scale < 10 ? 1 : 0)} ${unit}`;
}
