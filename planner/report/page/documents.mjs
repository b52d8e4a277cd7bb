/** Plain data as YAML 1.2, and rows as CSV. */

const BARE = /^[A-Za-z_][A-Za-z0-9_]*$/;
const isPart = (value) => typeof value === "object" && value !== null;

/** A document as YAML in block style; texts are in JSON's quotes, which are YAML's too. */
export function yamlText(value, indent = "") {
  if (!isPart(value)) return JSON.stringify(value);
  const rows = Array.isArray(value) ? value.map((each) => ["-", each])
    : Object.entries(value).map(([name, each]) => [
      `${BARE.test(name) ? name : JSON.stringify(name)}:`, each]);
  if (!rows.length) return Array.isArray(value) ? "[]" : "{}";
  return rows.map(([head, each]) => {
    const nested = isPart(each) && Object.keys(each).length;
    const text = yamlText(each, `${indent}  `);
    return `${indent}${head}${nested ? "\n" : " "}${text}`;
  }).join("\n");
}

const FORMULA = /^[=+\-@\t\r\n＝＋－＠]/;

/** Rows as CSV; text that a spreadsheet would compute begins with an apostrophe. */
export const csvText = (rows) => rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";

function cell(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "string" && FORMULA.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
