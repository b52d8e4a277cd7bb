/** Cash by year, present value and break-even over utilisation.  The twin of break_even.py. */
import {
  cheaperAbove, discountedHours, hourlyAt, HOURS_PER_YEAR, levelRent, purchaseCash, rentCash, yearsOf,
} from "./economics.mjs";
import { times } from "../uncertain_value.mjs";

const horizonOf = (assumed) => ({ years: assumed.years, interest: assumed.interest });

/** Whether terms are compared over years: what is owned already is not, nor what has no price. */
export const comparable = ({ priced, candidate }) =>
  Boolean(priced.hourly) && candidate.terms.kind !== "owned";

/** Price of an hour over the years that are compared: rents may change. */
export function overYears({ priced, assumed }) {
  if (priced.purchase) return priced.hourly;
  const factor = levelRent(
    horizonOf(assumed), 1, assumed.rent_change_a_year, priced.reservation?.years ?? 0);
  return { fixed: times(priced.hourly.fixed, factor), used: times(priced.hourly.used, factor) };
}

/** With what the devices that are not bought cost in each year. */
function withBeside(cash, { beside }, { utilisation, years }) {
  if (!beside) return cash;
  const aYear = HOURS_PER_YEAR * utilisation * hourlyAt(beside, utilisation).value;
  const lengths = [0, ...yearsOf({ years }).map(([, length]) => length)];
  return cash.map((usd, k) => usd + aYear * lengths[k]);
}

/** USD of an hour in use, or of any hour of a contract; what is owned in part costs in all hours. */
const priceOf = ({ hourly, reservation }, { utilisation }) => (reservation
  ? reservation.price.value : hourlyAt(hourly, utilisation).value);

/** USD of all devices on the first day and in each year, before tax; the last has the resale. */
export function cashUsd({ priced, assumed, devices }) {
  const { purchase, reservation } = priced;
  const each = purchase ? withBeside(purchaseCash(purchase, assumed.utilisation), priced, assumed)
    : rentCash(priceOf(priced, assumed), horizonOf(assumed), {
      utilisation: assumed.utilisation,
      changeAYear: assumed.rent_change_a_year,
      termYears: reservation ? reservation.years : null,
      prepaid: reservation ? reservation.prepaid : 0,
    });
  return each.map((usd) => usd * devices);
}

/** Present value in USD of what all devices cost over the years, before tax. @returns Span */
export function presentValueUsd(outcome) {
  const { assumed, devices } = outcome;
  const useful = discountedHours(horizonOf(assumed)) * assumed.utilisation * devices;
  return times(hourlyAt(overYears(outcome), assumed.utilisation), useful);
}

/** How far terms bind: rent on demand 0, a contract 1, a purchase 2. */
export const bond = ({ priced }) => (priced.purchase ? 2 : Number(Boolean(priced.reservation)));

/** Share of hours used above which one is cheaper a useful hour than another; null: never. */
export function breakEven(one, other) {
  const [mine, its] = [overYears(one), overYears(other)];
  const at = (hourly, end) => [hourly.fixed[end], hourly.used[end]];
  const [share, low, high] = ["value", "low", "high"].map(
    (end) => cheaperAbove(at(mine, end), at(its, "value")));
  return { share, low, high };
}
