/** Outcomes compared: order with ties, Pareto front, price of a tie.  The twin of ranking.py. */
import { chancesToBeFirst } from "./monte_carlo.mjs";
import { dataUsdOf } from "./evaluate.mjs";

const ORDERS = ["cost", "time", "energy", "carbon", "weighted"];
const FRONT = ["time", "cost", "energy"];

/** What outcomes are ranked by: the goal's figure, or time where none has it. */
export function orderedBy(goal, outcomes) {
  const unknown = outcomes.every((outcome) => figureOf(outcome, goal.by) === Infinity);
  return goal.by !== "time" && unknown ? "time" : goal.by;
}

/** What an outcome is ranked by: less is better; infinite where it is not known. */
export function figureOf(outcome, by) {
  const rate = outcome.tokensPerS.value;
  if (by === "time") return outcome.resultHours === null ? 1 / rate : outcome.resultHours.value;
  if (by === "energy") {
    if (outcome.energyKwh !== null) return outcome.energyKwh.value;
    return outcome.watts === null ? Infinity : outcome.watts.value / rate;
  }
  if (by === "carbon") {
    return outcome.carbonKg === null ? figureOf(outcome, "energy") * outcome.assumed.grams_per_kwh
      : outcome.carbonKg.value;
  }
  if (by === "weighted") return outcome.weightedUsd ?? Infinity;
  if (outcome.usd !== null) return outcome.usd.value;
  const hourly = outcome.usdPerDeviceHour;
  return hourly === null ? Infinity : hourly.value * outcome.devices / rate;
}

/** Whether it is sold and misses no goal at its midpoint. */
export const eligible = (outcome) => !outcome.misses.length && !outcome.candidate.hypothetical;

/** Whether it meets each goal as likely as the study wants. */
export const sure = (goal, outcome) => outcome.chance >= goal.confidence;

/** Outcomes in order, the first one first: as ranking.py says. */
export function ordered(goal, outcomes, by = orderedBy(goal, outcomes)) {
  const keys = (o) => [
    o.candidate.hypothetical, o.misses.length > 0, !sure(goal, o), figureOf(o, by),
  ].map(Number);
  const rows = outcomes.map((outcome) => ({ outcome, keys: keys(outcome) }));
  rows.sort((a, b) => {
    for (let at = 0; at < a.keys.length; at++) {
      if (a.keys[at] !== b.keys[at]) return a.keys[at] < b.keys[at] ? -1 : 1;
    }
    return a.outcome.candidate.name < b.outcome.candidate.name ? -1 : 1;
  });
  return rows.map(({ outcome }) => outcome);
}

/** Places, ties, Pareto front and probabilities (of the least cost, time, ...) of outcomes. */
export function ranked(goal, outcomes, tie, orders = ORDERS) {
  const by = orderedBy(goal, outcomes), list = ordered(goal, outcomes, by), first = list[0];
  const chances = firstChances(list, orders);
  return list.map((outcome, index) => {
    const tied = index > 0 && eligible(outcome) && eligible(first)
      && sure(goal, outcome) === sure(goal, first)
      && tiedFigures(figureOf(first, by), figureOf(outcome, by), tie);
    return {
      outcome, tied, place: tied || index === 0 ? 1 : index + 1,
      pareto: !list.some((other) => other !== outcome && beats(other, outcome)),
      tiesAtUsd: index === 0 ? null : tiePrice(first, outcome),
      first: chances.get(outcome) ?? {},
    };
  });
}

function firstChances(list, orders) {
  const chosen = list.filter(eligible), found = new Map(chosen.map((outcome) => [outcome, {}]));
  for (const by of orders) {
    const shares = chancesToBeFirst(chosen.map((outcome) => outcome.drawn[by]));
    shares.forEach((share, at) => {
      const outcome = chosen[at];
      if (share !== null) found.get(outcome)[by] = share * outcome.plan.fit_probability;
    });
  }
  return found;
}

const tiedFigures = (one, other, margin) => Math.max(one, other) < Infinity
  && Math.abs(one - other) <= margin * Math.max(one, other);

function beats(other, mine) {
  const pairs = FRONT.map((by) => [figureOf(other, by), figureOf(mine, by)]);
  return pairs.every(([a, b]) => a <= b) && pairs.some(([a, b]) => a < b);
}

/** USD per device hour at which an outcome would cost what the first one costs; null: unknown. */
export function tiePrice(first, outcome) {
  const ours = figureOf(outcome, "cost"), best = figureOf(first, "cost");
  const price = outcome.usdPerDeviceHour;
  if (ours === Infinity || best === Infinity || price === null) return null;
  const beside = outcome.usd === null ? 0 : dataUsdOf(outcome).value;
  return best > beside ? price.value * (best - beside) / (ours - beside) : null;
}
