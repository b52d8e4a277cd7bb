/** Inputs of a study that can flip its decision, with their ranges, for the tornado. */
import { assumptionsOf, controlsOf, goalOf, priceId } from "./state.mjs";

const RANGED = { electricity: "electricity_usd_per_kwh", lead: "lead_days" };
const SHARE = 0.25; // of an input whose source states no range

/** Inputs of one model's study. @returns {import("../../whatif/sensitivity.mjs").Input[]} */
export function inputsOf(data, model, values, outcomes) {
  const all = () => true, assumed = assumptionsOf(data.assumed, values);
  const quotes = quotesOf(data, outcomes);
  const inputs = controlsOf(data).flatMap((control) => {
    const now = values[control.id] ?? control.now;
    if (!now || control.id === "deadline" || control.id === "budget") return [];
    if (control.id === "utilisation" && !assumed.shared) return []; // the work says it
    const priced = control.id.startsWith("price.");
    const same = quotes.find((ids) => ids.includes(control.id)) ?? [control.id];
    if (same[0] !== control.id) return []; // it moves with the first price of its quote
    const touches = priced ? (c) => same.includes(priceId(data, c)) : all;
    const span = priced ? outcomes.find((o) => touches(o.candidate))?.candidate.terms.quote
      : rangeOf(control.id, assumed, now);
    if (!span) return [];
    const { low, high } = span;
    const [least, most] = priced ? [now / 5, now * 5] : [low / 2, high * 2];
    return [{
      id: control.id, ids: same, now, low, high, unit: control.unit, touches,
      label: priced ? `Price: ${control.label}${others(same.length - 1)}` : control.label,
      least: Math.max(least, control.least), most: Math.min(most, control.most),
    }];
  });
  return [...inputs, ...stepInputs(outcomes), ...lostHours(assumed)];
}

const others = (count) => (count ? ` and ${count} more of the same quote` : "");

/** Ids of prices by the quote that they rest on: one quote has one price. @returns {string[][]} */
function quotesOf(data, outcomes) {
  const firsts = new Map(); // of sizes of an offer the first, whose price the control has
  for (const { candidate } of outcomes) {
    const id = priceId(data, candidate);
    if (!firsts.has(id)) firsts.set(id, candidate);
  }
  const byQuote = new Map();
  for (const [id, { cause, terms: { quote } }] of firsts) {
    const key = cause && quote ? `${cause} ${quote.value}` : id;
    byQuote.set(key, [...(byQuote.get(key) ?? []), id]);
  }
  return [...byQuote.values()];
}

function rangeOf(id, assumed, now) {
  if (RANGED[id]) return assumed[RANGED[id]];
  if (id === "residual") return assumed.owning.retained_a_year;
  const most = id === "utilisation" ? 1 : Infinity;
  return { low: now * (1 - SHARE), high: Math.min(most, now * (1 + SHARE)) };
}

/** Kernels and links: the step of every cluster of an accelerator together. */
function stepInputs(outcomes) {
  const kinds = new Map(outcomes.map((o) => [o.candidate.accelerator, o]));
  return [...kinds].map(([accelerator, { candidate }]) => {
    const planned = candidate.plan.step_s;
    const low = planned.low / planned.value, high = planned.high / planned.value;
    return {
      id: `step ${accelerator}`, ids: [`step ${accelerator}`], label: `Seconds of a step on ${accelerator} over those planned`, now: 1, low, high,
      unit: "times the predicted step", least: Math.min(low, 0.5), most: Math.max(high, 2),
      touches: (c) => c.accelerator === accelerator,
    };
  });
}

/** Goodput: hours that are lost at any size. */
function lostHours(assumed) {
  if (assumed.goodput) return [];
  const { value, low, high } = assumed.failures.other;
  return [{
    id: "lost", ids: ["lost"], label: "Goodput: hours lost at any size", now: value, low, high,
    unit: "share of hours", least: low, most: high, touches: () => true,
  }];
}

/** The goal that a tornado compares under, without probabilities. */
export const midpointGoal = (data, values) => ({ ...goalOf(data, values), confidence: 0 });
