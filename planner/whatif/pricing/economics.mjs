/**
 * What devices and runs cost: hours, rents, purchases, energy.  The twin of economics.py, which has
 * the formulas in symbols.  Money is in US dollars, before tax, as rents are quoted.
 *
 * @typedef {import("./uncertain_value.mjs").Span} Span
 * @typedef {{years: number, interest: number}} Horizon  interest a year
 * @typedef {{fixed: Span, used: Span}} Hourly  USD of a device: of every hour, of an hour in use
 * @typedef {{hardware: Span, yearly: Span, horizon: Horizon, residual: Span, idlePower: Span,
 *   running: Span, taxRate: number, depreciationYears: number,
 *   instalments: import("./financing.mjs").Instalment[], boundShare: number}} Purchase  USD of a device: once, a
 *   year, an hour in use; residual and idlePower are shares
 */
import { exact, inverse, product, times, total } from "../uncertain_value.mjs";

export const HOURS_PER_YEAR = 8760;
export const SECONDS_PER_HOUR = 3600;
const NOTHING = 1e-9, ROUNDING = 1e-12;

/** Hours on the wall clock to train a number of tokens. @returns {Span} */
export const hours = (tokens, tokensPerS, goodput) =>
  product([exact(tokens / SECONDS_PER_HOUR), inverse(tokensPerS), inverse(goodput)]);

/**
 * USD of all devices where what is fixed is paid for its own hours, and no other.
 * @param {{fixed: Span, used: Span}} hourly
 */
export const wholeUsd = (devices, hourly, fixedHours, runHours) => times(
  total([product([hourly.fixed, fixedHours]), product([hourly.used, runHours])]), devices);

/** Rent in USD of all devices for a run. @returns {Span} */
export const rentUsd = (devices, runHours, usdPerDeviceHour) =>
  product([exact(devices), runHours, usdPerDeviceHour]);

/** Watts of devices of one kind at the building's meter. @returns {Span} */
export function deviceWatts(power, devices, tdpW) {
  const each = total([times(power.nodeOverTdp, tdpW), power.networkW]);
  return product([exact(devices), each, power.usageEffectiveness]);
}

/** Energy of a run in kWh. @returns {Span} */
export const energyKwh = (watts, runHours) => times(product([watts, runHours]), 1e-3);

/** Carbon dioxide of a number of kWh, in kg. @returns {Span} */
export const carbonKg = (energy, gramsPerKwh) => times(energy, gramsPerKwh * 1e-3);

/** USD of an hour of a number of watts. @returns {Span} */
export const powerUsdPerHour = (watts, usdPerKwh) => product([times(watts, 1e-3), usdPerKwh]);

/** USD of a useful hour, where such a share of hours is used. @returns {Span} */
export const hourlyAt = (hourly, utilisation) =>
  total([times(hourly.fixed, 1 / utilisation), hourly.used]);

/** Share of hours used above which one [fixed, used] price is below another; null: never. */
export function cheaperAbove(one, other) {
  const moreFixed = one[0] - other[0], lessUsed = other[1] - one[1];
  if (lessUsed <= 0) return moreFixed < lessUsed ? 0 : null;
  const share = moreFixed / lessUsed;
  return share < 1 ? Math.max(0, share) : null;
}

/** What a dollar after a number of years is worth now. */
export const discount = (horizon, years) => Math.exp(-years * Math.log1p(horizon.interest));

/** [start, length] of each year; the last may be shorter. */
export function yearsOf({ years }) {
  const whole = Math.ceil(years - NOTHING);
  return Array.from({ length: whole }, (_, k) => [k, Math.min(1, years - k)]);
}

/** Hours of all years, each year's at its present value. */
export const discountedHours = (horizon) => HOURS_PER_YEAR * yearsOf(horizon).reduce(
  (sum, [start, length]) => sum + length * discount(horizon, start + length / 2), 0);

/** The one price an hour that costs what a changing rent does; a contract fixes it a while. */
export function levelRent(horizon, usdPerHour, changeAYear, fixedYears) {
  let paid = 0;
  for (const [start, length] of yearsOf(horizon)) {
    const middle = start + length / 2;
    const when = fixedYears ? fixedYears * Math.floor(start / fixedYears + NOTHING) : middle;
    const price = usdPerHour * Math.exp(when * Math.log1p(changeAYear));
    paid += price * HOURS_PER_YEAR * length * discount(horizon, middle);
  }
  return paid / discountedHours(horizon);
}

/** By how much a price an hour rises if a share of a contract is paid on its first day. */
export const prepaidFactor = (share, years, interest) =>
  share * HOURS_PER_YEAR * years / discountedHours({ years, interest }) + (1 - share);

/** Levelised price of a purchase. @param {Purchase} bought @returns {Hourly} */
export function purchaseHourly(bought) {
  const { idlePower, running, residual } = bought;
  const saved = { value: 1 - idlePower.value, low: 1 - idlePower.high, high: 1 - idlePower.low };
  const lostAt = lostShare(bought);
  const lost = {
    value: lostAt(residual.value), low: lostAt(residual.high), high: lostAt(residual.low),
  };
  const capital = times(product([bought.hardware, lost]), 1 / discountedHours(bought.horizon));
  const eachYear = times(bought.yearly, 1 / HOURS_PER_YEAR);
  return {
    fixed: total([capital, eachYear, product([running, idlePower])]),
    used: product([running, saved]),
  };
}

/** What of the hardware's price is not recovered, at present value before tax, by the residual. */
function lostShare({ horizon, taxRate, depreciationYears, instalments }) {
  const writtenOff = yearsOf(horizon).reduce((sum, [start, length]) =>
    sum + Math.max(0, Math.min(length, depreciationYears - start))
      * discount(horizon, start + length / 2) / depreciationYears, 0);
  const book = Math.max(0, 1 - horizon.years / depreciationYears), end = discount(horizon, horizon.years);
  let paid = 0, interest = 0;
  for (const part of instalments) {
    const factor = discount(horizon, part.years);
    paid += part.share * factor;
    interest += part.interest * factor;
  }
  const deducted = taxRate * (writtenOff + interest);
  return (residual) => {
    const afterTax = residual - taxRate * (residual - book);
    return Math.max(0, (paid - deducted - end * afterTax) / (1 - taxRate));
  };
}

/** USD of a device in each hour beside its price, where such a share is used. @returns {Span} */
export function owningUsdPerHour(bought, utilisation) {
  const drawn = total([exact(utilisation), times(bought.idlePower, 1 - utilisation)]);
  return total([times(bought.yearly, 1 / HOURS_PER_YEAR), product([bought.running, drawn])]);
}

/** All instalments over the price of the hardware: above 1 by the interest of a loan. */
export const paidShare = ({ instalments }) => instalments.reduce((sum, { share }) => sum + share, 0);

/** USD that leave a budget for a device over its years; no resale. @returns {Span} */
export function outlayUsd(bought, utilisation, run = null) {
  const planned = HOURS_PER_YEAR * bought.horizon.years;
  const owned = run ? atLeast(run, planned) : exact(planned), paid = times(bought.hardware, paidShare(bought));
  return total([bought.leased ? product([paid, times(owned, 1 / planned)]) : paid,
    product([owningUsdPerHour(bought, utilisation), owned])]);
}

/** A figure of which a least amount is paid. @param {Span} span */
export const atLeast = (span, least) => ({
  value: Math.max(span.value, least), low: Math.max(span.low, least),
  high: Math.max(span.high, least),
});

/** How many terms of a contract a run begins. @param {Span} run  hours @returns {Span} */
export function termsBegun(run, termHours) {
  const begun = (hours) => Math.max(1, Math.ceil(hours / termHours * (1 - ROUNDING)));
  return { value: begun(run.value), low: begun(run.low), high: begun(run.high) };
}

/** USD paid for a device on the first day, then in each year; the last has the resale. */
export function purchaseCash(bought, utilisation) {
  const drawn = utilisation + (1 - utilisation) * bought.idlePower.value;
  const power = HOURS_PER_YEAR * drawn * bought.running.value;
  const paid = yearsOf(bought.horizon).map(([, length]) => length * (bought.yearly.value + power));
  paid[paid.length - 1] -= bought.residual.value * bought.hardware.value;
  const cash = [0, ...paid];
  for (const { years, share } of bought.instalments) {
    cash[Math.ceil(years - NOTHING)] += share * bought.hardware.value;
  }
  return cash;
}

/** USD of a device's rent on the first day and in each year; contracts are renewed. */
export function rentCash(usdPerHour, horizon, { utilisation, changeAYear, termYears, prepaid }) {
  const priceAt = (years) => usdPerHour * Math.exp(years * Math.log1p(changeAYear));
  const paid = [0];
  for (const [start, length] of yearsOf(horizon)) {
    let when = start + length / 2, share = utilisation;
    if (termYears) {
      when = termYears * Math.floor(start / termYears + NOTHING);
      share = 1 - prepaid;
    }
    paid.push(priceAt(when) * HOURS_PER_YEAR * length * share);
  }
  if (!termYears || !prepaid) return paid;
  for (let begins = 0; begins < horizon.years - NOTHING; begins += termYears) {
    const hoursPaid = HOURS_PER_YEAR * Math.min(termYears, horizon.years - begins);
    paid[Math.ceil(begins)] += prepaid * priceAt(begins) * hoursPaid;
  }
  return paid;
}

/** Share of its price that hardware sells for at an age in years. */
export function residualShare(age, retainedAYear, byAge) {
  if (!byAge.length) return retainedAYear ** age;
  const points = [1, ...byAge];
  const year = Math.min(Math.trunc(age), points.length - 2);
  const before = points[year], after = points[year + 1];
  if (before === 0 || after === 0) return Math.max(0, before + (after - before) * (age - year));
  return Math.min(1, before * (after / before) ** (age - year));
}
