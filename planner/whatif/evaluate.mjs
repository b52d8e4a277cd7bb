/**
 * A planned candidate priced: hours, cost, energy, goals.  The twin of evaluate.py and goals.py.
 *
 * @typedef {import("./uncertain_value.mjs").Span} Span
 */
import { within } from "./probabilities.mjs";
import { drawnFigures } from "./monte_carlo.mjs";
import {
  atLeast, carbonKg, energyKwh, hourlyAt, hours, HOURS_PER_YEAR, owningUsdPerHour, paidShare, rentUsd,
  SECONDS_PER_HOUR, termsBegun, wholeUsd,
} from "./pricing/economics.mjs";
import { leaseMonths } from "./pricing/financing.mjs";
import { goodputOf } from "./pricing/goodput.mjs";

import { exact, inverse, product, times, total } from "./uncertain_value.mjs";
import { movedUsd, storedUsdPerHour } from "./pricing/transfers.mjs";
import { boundUsd, outlayOf, pricedOf, quoteWeight, usefulHour, wattsOf } from "./pricing/terms.mjs";

const ROUNDING = 1e-12;

/** Tokens to train a model of a number of parameters on; null if left open. */
export function tokensOf(goal, parameters) {
  if (goal.epochs && goal.dataset_tokens) return goal.epochs * goal.dataset_tokens;
  if (goal.tokens_per_parameter) return goal.tokens_per_parameter * parameters;
  return goal.tokens ?? null;
}

/**
 * The outcome of a plan on a candidate's terms.
 * @param {object} candidate  as the page's data has it, with its plan
 * @param {object} assumed    the study's assumptions, with the offer's own in their place
 * @param {object} goal       days, USD, W, kg
 * @param {boolean} drawn     whether futures are drawn; without, no probability is known
 */
export function evaluate(candidate, given, goal, drawn = true) {
  const { plan, devices } = candidate;
  const goodput = goodputFor(candidate, given);
  const tokensPerS = product([exact(plan.tokens_per_step), inverse(plan.step_s)]);
  const tokens = tokensOf(goal, plan.parameters);
  const runs = plan.jobs.reduce((sum, job) => sum + job.runs_a_year * tokens / plan.tokens_per_step, 0) || 1;
  const startHours = times(given.start_hours, runs);
  const run = tokens === null ? null : total([hours(tokens, tokensPerS, goodput), startHours]);
  const jobs = plan.jobs.length ? yearly(plan, tokens, run) : [];
  const termHours = jobs.length ? HOURS_PER_YEAR : wholeTermHours(candidate, given);
  const termRenews = candidate.terms.kind === "rented";
  const fixedHours = fixedHoursOf({ termHours, termRenews, hours: run, jobs });
  const assumed = fixedHours
    ? { ...given, utilisation: Math.min(1, run.value / fixedHours.value) } : given;
  const priced = pricedOf(candidate, assumed);
  const watts = wattsOf(candidate.groups, assumed, candidate.power_limit);
  const outcome = {
    candidate, assumed, priced, plan, devices, watts, startHours, tokensPerS, goodput, jobs, tokens, termHours, termRenews, fixedHours,
    leadDays: jobs.length ? null : waitFor(candidate, priced, assumed),
    usdPerDeviceHour: priced.hourly ? usefulHour(priced, assumed) : null,
    capitalUsd: null, outlayUsd: null, hours: run, usd: null, energyKwh: null, carbonKg: null,
    resultHours: null, weightedUsd: null, shareUsed: null, waitingShare: 0, dayUsd: goal.day_usd ?? null,
  };
  const bound = boundUsd(priced), outlay = outlayOf(priced, assumed.utilisation);
  withData(outcome);
  if (bound !== null) outcome.capitalUsd = bound * devices;
  if (outlay !== null) outcome.outlayUsd = times(outlay, devices);
  if (outcome.tokens !== null) withRun(outcome);
  outcome.tokensInBudget = tokensInBudget(goal, outcome);
  const limits = limitsOf(goal, outcome);
  outcome.misses = limits.filter(({ figure, limit }) =>
    figure === null || figure > limit * (1 + ROUNDING));
  if (!drawn) return { ...outcome, chance: 1 };
  outcome.quoteWeight = quoteWeight(candidate, assumed, priced.hourly);
  outcome.drawn = drawnFigures(outcome);
  outcome.chances = Object.fromEntries(limits.filter(({ figure }) => figure !== null)
    .map(({ name, limit }) => [name, chanceOf(name, outcome, limit * (1 + ROUNDING))]));
  outcome.chance = Math.min(plan.fit_probability, ...Object.values(outcome.chances));
  return outcome;
}

/** Days until devices are there, bought or waited for; null of what can be used at once. @returns {?Span} */
function waitFor({ wait_days: waits }, priced, assumed) {
  const each = [...(waits ? [exact(waits)] : []), ...(priced.purchase ? [assumed.lead_days] : [])];
  return each.length ? total(each) : null;
}

/** Hours of a commitment that one run pays whole, of what is bought or owned a year; null where others share it. */
function wholeTermHours({ terms }, { shared, years }) {
  if (shared) return null;
  const { kind, lease } = terms;
  if (kind === "bought" || kind === "part" && terms.parts.includes("bought")) {
    return HOURS_PER_YEAR * (lease ? years * lease.term_months / leaseMonths(lease, years)
      : Math.min(1, years));
  }
  if (kind === "owned" || kind === "part") return HOURS_PER_YEAR * Math.min(1, years);
  return kind === "rented" && terms.years ? terms.years * HOURS_PER_YEAR : null;
}

/** Hours whose fixed price is paid whole; null where other work shares it. @returns {?Span} */
function fixedHoursOf({ termHours, termRenews, hours: run, jobs }) {
  if (termHours === null || run === null) return null;
  if (jobs.length) return exact(Math.max(termHours, run.value));
  return termRenews ? times(termsBegun(run, termHours), termHours) : atLeast(run, termHours);
}

const goodputFor = ({ plan, devices, nodes, spot }, assumed) => assumed.goodput
  ?? goodputOf(assumed.failures, {
    parameters: plan.parameters,
    devices: devices - plan.idle,
    nodes: Math.round(nodes * (1 - plan.idle / devices)),
    spot,
  });

/** [runs a year, hours of a run] of each job; where a year has more tokens, there are more runs. */
const yearly = ({ jobs, tokens_per_step: planned }, tokens, yearHours) => jobs.map((job) => {
  const runs = job.runs_a_year * tokens / planned;
  return [runs, job.share * yearHours.value / runs];
});

/** What storage costs an hour, beside rented devices, and what transfers cost. */
function withData(outcome) {
  const { assumed: { data }, priced, jobs, candidate: { terms } } = outcome;
  const stored = priced.purchase || terms.kind === "owned" ? null : storedUsdPerHour(data);
  const moved = movedUsd(data);
  outcome.storedUsdPerHour = stored;
  outcome.movedUsd = moved;
  if (!jobs.length) return;
  const runs = jobs.reduce((sum, [each]) => sum + each, 0);
  outcome.storedUsdPerHour = null;
  outcome.movedUsd = total([times(moved, runs), ...(stored ? [times(stored, HOURS_PER_YEAR)] : [])]);
}

/** The share of a commitment's hours that all work uses; null where nothing is paid unused. @returns {?Span} */
function shareUsed({ fixed }, { utilisation: value, utilisation_factor: factor }) {
  return fixed.value === 0 ? null : { value, low: value / factor, high: Math.min(1, value * factor) };
}

/** The price of a useful hour over its value, as more or fewer hours are used. @returns {Span} */
function unusedFactor({ shareUsed: share, waitingShare }) {
  if (share === null) return exact(1);
  const [low, high] = [share.high, share.low].map((end) => 1 + waitingShare * (share.value / end - 1));
  return { value: 1, low, high };
}

/** What leaves a budget: what terms bind to, and what a run pays of the rest. @returns {Span} */
function outlayWith(outcome, rent) {
  const { priced, devices, hours: run, assumed: { utilisation } } = outcome;
  const { jobs, fixedHours: fixed } = outcome;
  const each = outlayOf(priced, utilisation, jobs.length ? fixed : run), { beside } = priced;
  if (each === null) return rent;
  const outlay = times(each, devices);
  if (!beside) return outlay;
  return total([outlay, fixed ? wholeUsd(devices, beside, fixed, run)
    : rentUsd(devices, run, hourlyAt(beside, utilisation))]);
}

/** USD of storage and transfers of a run. @returns {Span} */
export const dataUsdOf = ({ storedUsdPerHour: stored, movedUsd: moved, hours: run }) => total(
  [...(stored && run ? [product([stored, run])] : []), moved]);

function withRun(outcome) {
  const { devices, watts, priced, assumed } = outcome;
  outcome.resultHours = outcome.leadDays === null ? outcome.hours
    : total([times(outcome.leadDays, 24), outcome.hours]);
  if (outcome.usdPerDeviceHour !== null) {
    const paid = atLeast(outcome.hours, priced.minimumHours), { fixedHours: fixed } = outcome;
    outcome.shareUsed = fixed ? null : shareUsed(priced.hourly, assumed);
    outcome.waitingShare = outcome.shareUsed === null ? 0
      : priced.hourly.fixed.value / assumed.utilisation / outcome.usdPerDeviceHour.value;
    const rent = fixed ? wholeUsd(devices, priced.hourly, fixed, outcome.hours)
      : product([rentUsd(devices, paid, outcome.usdPerDeviceHour), unusedFactor(outcome)]);
    const dataUsd = dataUsdOf(outcome);
    outcome.usd = total([rent, dataUsd]);
    outcome.outlayUsd = total([outlayWith(outcome, rent), dataUsd]);
    if (outcome.dayUsd !== null) {
      outcome.weightedUsd = outcome.usd.value + outcome.dayUsd * outcome.resultHours.value / 24;
    }
  }
  if (watts !== null) {
    outcome.energyKwh = energyKwh(watts, outcome.hours);
    outcome.carbonKg = carbonKg(outcome.energyKwh, assumed.grams_per_kwh);
  }
}

/** Goals that are set: name, figure (null: not known) and limit in one unit. */
function limitsOf(goal, outcome) {
  const value = (span, factor = 1) => (span === null ? null : span.value * factor);
  return [
    { name: "hours of a year", figure: value(outcome.hours),
      limit: outcome.jobs.length ? HOURS_PER_YEAR : null, unit: "hours" },
    { name: "deadline", figure: value(outcome.resultHours, 1 / 24), limit: goal.deadline_days,
      unit: "days" },
    { name: "budget", figure: value(outcome.outlayUsd), limit: goal.budget_usd, unit: "USD" },
    { name: "power cap", figure: value(outcome.watts), limit: goal.power_cap_w, unit: "W" },
    { name: "emission cap", figure: value(outcome.carbonKg), limit: goal.emission_cap_kg,
      unit: "kg" },
  ].filter(({ limit }) => limit !== null && limit !== undefined);
}

/** Share of futures in which a figure is no greater than a limit. */
function share(drawn, most) {
  let within = 0;
  for (let k = 0; k < drawn.length; k++) if (drawn[k] <= most) within++;
  return within / drawn.length;
}

function chanceOf(name, outcome, limit) {
  if (name === "power cap") return within(outcome.watts, limit); // whatever its devices hold
  return outcome.plan.fit_probability * chanceOfRun(name, outcome, limit);
}

/** Probability that a run which fits keeps a limit. */
function chanceOfRun(name, outcome, limit) {
  if (name === "hours of a year") return share(outcome.drawn.time, limit);
  if (name === "deadline") return share(outcome.drawn.time, 24 * limit);
  if (name === "emission cap") {
    return share(outcome.drawn.energy, 1e6 * limit / outcome.assumed.grams_per_kwh);
  }
  if (name === "budget" && outcome.capitalUsd === null) return share(outcome.drawn.cost, limit);
  const { outlay } = outcome.drawn;
  return outlay === null ? within(outcome.outlayUsd, limit) : share(outlay, limit);
}

/** Tokens for which budget and deadline both suffice; null without a budget or a price. */
function tokensInBudget(goal, outcome) {
  const { priced, assumed } = outcome;
  if (!goal.budget_usd || outcome.usdPerDeviceHour === null) return null;
  let left = goal.budget_usd, anHour = outcome.usdPerDeviceHour.value;
  const used = assumed.utilisation;
  if (outcome.capitalUsd !== null) {
    left -= outcome.capitalUsd;
    anHour = priced.hourly.used.value;
  }
  if (priced.purchase) {
    anHour = owningUsdPerHour(priced.purchase, used).value / used;
    left -= priced.purchase.hardware.value * (paidShare(priced.purchase) - priced.purchase.boundShare)
      * outcome.devices;
    if (priced.beside) anHour += hourlyAt(priced.beside, used).value;
  }
  left -= outcome.movedUsd.value;
  if (outcome.storedUsdPerHour) anHour += outcome.storedUsdPerHour.value / outcome.devices;
  if (left < 0) return 0;
  const most = [anHour === 0 ? Infinity : left / (anHour * outcome.devices)];
  if (goal.deadline_days) {
    most.push(24 * Math.max(0, goal.deadline_days - (outcome.leadDays?.value ?? 0)));
  }
  if (priced.purchase) most.push(HOURS_PER_YEAR * assumed.years * used);
  if (priced.reservation) most.push(HOURS_PER_YEAR * priced.reservation.years);
  const least = Math.min(...most);
  if (least < priced.minimumHours) return most[0] < priced.minimumHours ? 0 : null;
  const trained = Math.max(0, least - assumed.start_hours.value);
  return outcome.tokensPerS.value * outcome.goodput.value * trained * SECONDS_PER_HOUR;
}
