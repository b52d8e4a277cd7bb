/**
 * All candidates drawn together: how often each is the first.  The twin of draws.py.
 *
 * What candidates share is drawn once: an accelerator's kernels and links, lost hours, a quote, what
 * owning costs, power, delivery.
 */
import { DRAWS, deviated, multipliers, normals } from "./probabilities.mjs";
import { HOURS_PER_YEAR } from "./pricing/economics.mjs";
import { spreads } from "./uncertain_value.mjs";

const NOTHING = 1e-9, ROUNDING = 1e-12, MOST_PRICES = 300;

/**
 * Futures of time, cost and energy (hours, USD, Wh; of a token if no goal is set); null: unknown.
 * Plain loops: they run for every candidate whenever a control moves.  Energy and carbon are drawn
 * when they are asked for.
 */
export function drawnFigures(outcome) {
  const duration = durations(outcome);
  return {
    time: times(outcome, duration),
    cost: costs(outcome, duration),
    get outlay() { return outlays(outcome, duration); },
    get weighted() {
      if (outcome.weightedUsd === null) return null;
      return this.cost.map((usd, k) => usd + outcome.dayUsd / 24 * this.time[k]);
    },
    get energy() { return energies(outcome, duration); },
    get carbon() {
      return this.energy?.map((each) => each * outcome.assumed.grams_per_kwh) ?? null;
    },
  };
}

/** Hours of the run, or seconds of a token. */
function durations(outcome) {
  const step = stepMultipliers(outcome), found = new Float64Array(DRAWS);
  if (outcome.hours === null) {
    for (let k = 0; k < DRAWS; k++) found[k] = step[k] / outcome.tokensPerS.value;
    return found;
  }
  const goodput = multipliers(outcome.goodput, "goodput"), begun = outcome.startHours.value;
  const starts = multipliers(outcome.startHours, "start"), hours = outcome.hours.value - begun;
  for (let k = 0; k < DRAWS; k++) found[k] = hours * step[k] / goodput[k] + begun * starts[k];
  return found;
}

function times({ hours, leadDays }, duration) {
  if (hours === null || leadDays === null) return duration;
  const lead = multipliers(leadDays, "delivery"), found = new Float64Array(DRAWS);
  for (let k = 0; k < DRAWS; k++) found[k] = duration[k] + 24 * (leadDays.value * lead[k]);
  return found;
}

function energies({ watts }, duration) {
  if (watts === null) return null;
  const power = multipliers(watts, "power"), found = new Float64Array(DRAWS);
  for (let k = 0; k < DRAWS; k++) found[k] = watts.value * power[k] * duration[k];
  return found;
}

function costs(outcome, duration) {
  const { usdPerDeviceHour: hourly, devices, hours, candidate, priced } = outcome;
  if (hourly === null) return null;
  const price = priceMultipliers(hourly, candidate, outcome.quoteWeight);
  const found = new Float64Array(DRAWS);
  if (hours !== null && outcome.termHours !== null) {
    wholeCosts(outcome, duration, found);
    addData(outcome, duration, found);
    return found;
  }
  const least = hours === null ? 0 : priced.minimumHours;
  for (let k = 0; k < DRAWS; k++) {
    found[k] = hourly.value * price[k] * devices * Math.max(duration[k], least);
  }
  if (outcome.shareUsed !== null) {
    const used = multipliers(outcome.shareUsed, "utilisation");
    for (let k = 0; k < DRAWS; k++) found[k] *= 1 + outcome.waitingShare * (1 / used[k] - 1);
  }
  if (hours !== null) addData(outcome, duration, found);
  return found;
}

/** What a contract takes out of a budget: each term that the run begins; null on other terms. */
function outlays(outcome, duration) {
  const { priced: { hourly, reservation }, capitalUsd, hours, jobs, fixedHours, candidate } = outcome;
  if (!reservation || !hourly || capitalUsd === null) return null;
  const term = reservation.years * HOURS_PER_YEAR, found = new Float64Array(DRAWS);
  const price = priceMultipliers(hourly.fixed, candidate, outcome.quoteWeight);
  const year = jobs.length && fixedHours ? fixedHours.value : null;
  for (let k = 0; k < DRAWS; k++) {
    const terms = hours === null ? 1
      : Math.max(1, Math.ceil((year ?? duration[k]) / term * (1 - ROUNDING)));
    found[k] = capitalUsd * price[k] * terms;
  }
  if (hours !== null) addData(outcome, duration, found);
  return found;
}

/** What is paid whole: a year of jobs has one year, a run each term of a contract it begins. */
function wholeCosts(outcome, duration, found) {
  const { priced: { hourly: { fixed, used } }, devices, termHours: term, hours, candidate } = outcome;
  const [fixedPrice, usedPrice] = [fixed, used].map((part) => (part.value === 0 ? null
    : priceMultipliers(part, candidate, outcome.quoteWeight)));
  const year = outcome.jobs.length ? Math.max(term, hours.value) : null;
  for (let k = 0; k < DRAWS; k++) {
    const whole = year ?? (outcome.termRenews
      ? term * Math.max(1, Math.ceil(duration[k] / term * (1 - ROUNDING)))
      : Math.max(term, duration[k]));
    const fixedUsd = fixedPrice === null ? 0 : fixed.value * fixedPrice[k] * whole;
    const usedUsd = usedPrice === null ? 0 : used.value * usedPrice[k] * duration[k];
    found[k] = (fixedUsd + usedUsd) * devices;
  }
}

const prices = new Map();

/** A price over its value: its quotes' deviations, moves until a later order, and those of owning. */
function priceMultipliers(hourly, { cause, how, moves_weight: moves = 0 }, weight) {
  const causes = cause || how;
  const named = causes.split("\n").map((cause) => `price ${cause}`);
  if (weight === 1 && named.length === 1 && moves === 0) return multipliers(hourly, named[0]);
  const [down, up] = spreads(hourly), key = `${causes}|${down}|${up}|${weight}|${moves}`;
  if (!prices.has(key)) {
    if (prices.size >= MOST_PRICES) prices.clear();
    const each = named.map(normals), owning = normals("owning"), rest = Math.sqrt(1 - weight * weight);
    const now = each[0].map((_, k) => each.reduce((sum, of) => sum + of[k], 0) / Math.sqrt(each.length));
    const moved = moves === 0 ? null : normals("moves of prices"), stays = Math.sqrt(1 - moves * moves);
    const quote = moved === null ? now : now.map((one, k) => stays * one + moves * moved[k]);
    prices.set(key, deviated(down, up, weight === 1 ? quote
      : quote.map((one, k) => weight * one + rest * owning[k])));
  }
  return prices.get(key);
}

function addData({ storedUsdPerHour: stored, movedUsd: moved }, duration, costsOf) {
  if (stored?.value) {
    const price = multipliers(stored, "price of storage");
    for (let k = 0; k < DRAWS; k++) costsOf[k] += stored.value * price[k] * duration[k];
  }
  if (moved.value) {
    const price = multipliers(moved, "price of transfers");
    for (let k = 0; k < DRAWS; k++) costsOf[k] += moved.value * price[k];
  }
}

const steps = new Map();

/** The step's seconds over its value, from the uncertainty of kernels and of links. */
function stepMultipliers({ plan, candidate }) {
  const [down, up] = spreads(plan.step_s), link = plan.link_share;
  const key = `${candidate.accelerator}|${down}|${up}|${link}`;
  if (!steps.has(key)) {
    const [kernels, links] = ["kernels", "links"].map((c) => normals(`${c} ${candidate.accelerator}`));
    const whole = Math.hypot(1 - link, link);
    const together = kernels.map((each, k) => ((1 - link) * each + link * links[k]) / whole);
    steps.set(key, deviated(down, up, together));
  }
  return steps.get(key);
}

/** Probability of each that its futures' figure is the least of those that are known. */
export function chancesToBeFirst(figures) {
  const known = figures.filter((figure) => figure !== null);
  const most = new Float64Array(DRAWS).fill(Infinity), tied = new Uint16Array(DRAWS);
  for (const figure of known) {
    for (let k = 0; k < DRAWS; k++) if (figure[k] < most[k]) most[k] = figure[k];
  }
  for (let k = 0; k < DRAWS; k++) most[k] *= 1 + NOTHING;
  const firsts = known.map((figure) => {
    const first = [];
    for (let k = 0; k < DRAWS; k++) {
      if (figure[k] <= most[k]) {
        first.push(k);
        tied[k]++;
      }
    }
    return first;
  });
  const shares = firsts.map((first) => first.reduce((sum, k) => sum + 1 / tied[k], 0) / DRAWS);
  let next = 0;
  return figures.map((figure) => (figure === null ? null : shares[next++]));
}
