/** Inputs of a study that can flip its decision, with their ranges, for the tornado. */
import { assumptionsOf, controlsOf, goalOf, priceId } from "./state.mjs";

const RANGED = { electricity: "electricity_usd_per_kwh", lead: "lead_days" };
const SHARE = 0.25; // of an input whose source states no range

/** Inputs of one model's study. @returns {import("../../whatif/sensitivity.mjs").Input[]} */
export function inputsOf(data, model, values, outcomes) {
  const all = () => true, assumed = assumptionsOf(data.assumed, values);
  const inputs = controlsOf(data).flatMap((control) => {
    const now = values[control.id] ?? control.now;
    if (!now || control.id === "deadline" || control.id === "budget") return [];
    const priced = control.id.startsWith("price.");
    const touches = priced ? (c) => priceId(data, c) === control.id : all;
    const span = priced ? outcomes.find((o) => touches(o.candidate))?.candidate.terms.quote
      : rangeOf(control.id, assumed, now);
    if (!span) return [];
    const { low, high } = span;
    const [least, most] = priced ? [now / 5, now * 5] : [low / 2, high * 2];
    return [{
      id: control.id, label: priced ? `Price: ${control.label}` : control.label, now, low, high,
      unit: control.unit, touches, least: Math.max(least, control.least),
      most: Math.min(most, control.most),
    }];
  });
  return [...inputs, ...stepInputs(outcomes), ...lostHours(assumed)];
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
      id: `step ${accelerator}`, label: `Kernels and links: step on ${accelerator}`, now: 1, low, high,
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
    id: "lost", label: "Goodput: hours lost at any size", now: value, low, high, unit: "share of hours",
    least: low, most: high, touches: () => true,
  }];
}

/** The goal that a tornado compares under, without probabilities. */
export const midpointGoal = (data, values) => ({ ...goalOf(data, values), confidence: 0 });
