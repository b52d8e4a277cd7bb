/**
 * A candidate's price by its terms: rented, reserved, bought, owned.  The twin of what candidates.py
 * computes; which offers make a cluster and what they ask is in the page's data.
 *
 * @typedef {import("./uncertain_value.mjs").Span} Span
 * @typedef {{devices: number, tdp_w: ?number, listed: ?Span}} Group  listed: USD of a device
 * @typedef {{kind: string, commitment: string, quote: ?Span, network: ?Span, years: number,
 *   prepaid: number, minimum_hours: number, parts: string[], part_rent: ?Span}} Terms
 *   parts: of each group "owned", "bought" or "rented"; part_rent: of what is rented beside a purchase
 */
import {
  deviceWatts, hourlyAt, HOURS_PER_YEAR, outlayUsd, powerUsdPerHour, prepaidFactor, purchaseHourly,
  residualShare, termsBegun,
} from "./economics.mjs";
import { AT_ONCE, leaseInstalments, leaseMonths, loanInstalments } from "./financing.mjs";
import { exact, product, spreads, times, total } from "../uncertain_value.mjs";

const MONTHS_PER_YEAR = 12;

/** Devices of several groups. @param {Group[]} groups */
export const devicesOf = (groups) => groups.reduce((sum, group) => sum + group.devices, 0);

/** Watts of groups at the meter; null if a device's power is not known. @returns {?Span} */
export function wattsOf(groups, assumed, powerLimit) {
  if (groups.some((group) => group.tdp_w === null)) return null;
  const power = {
    nodeOverTdp: assumed.node_power_over_tdp,
    networkW: assumed.network_w_per_device,
    usageEffectiveness: assumed.power_usage_effectiveness,
  };
  return total(groups.map((g) => deviceWatts(power, g.devices, g.tdp_w * powerLimit)));
}

/** All that is known of the price of a device on a candidate's terms; {} if nothing is. */
export function pricedOf(candidate, assumed) {
  const { terms, groups, power_limit: limit } = candidate;
  switch (terms.kind) {
    case "owned":
      return { hourly: keptHourly(groups, assumed, limit), minimumHours: 0 };
    case "part":
      return { ...inParts(candidate, assumed), minimumHours: 0 };
    case "bought": {
      const purchase = terms.lease ? leaseOf(assumed, terms, groups, limit)
        : financed(purchaseOf(assumed, terms.quote, terms.network, groups, limit), terms.loan);
      return { hourly: purchaseHourly(purchase), purchase, minimumHours: 0 };
    }
    case "rented":
      return { minimumHours: terms.minimum_hours, ...rented(terms, assumed) };
    default:
      return {};
  }
}

/** How much of a price's deviation is its quotes'; the rest is what owning costs. */
export function quoteWeight(candidate, assumed, hourly) {
  const { terms } = candidate;
  if (!hourly || !["bought", "part"].includes(terms.kind)) return terms.kind === "owned" ? 0 : 1;
  const signed = (quote) => (quote ? exact(quote.value) : quote);
  const settled = pricedOf({
    ...candidate, terms: { ...terms, quote: signed(terms.quote), part_rent: signed(terms.part_rent) },
  }, assumed).hourly;
  const [whole, rest] = [hourly, settled].map((of) => {
    const [down, up] = spreads(hourlyAt(of, assumed.utilisation));
    return down + up;
  });
  return whole ? Math.sqrt(Math.max(0, 1 - (rest / whole) ** 2)) : 0;
}

function rented(terms, assumed) {
  if (terms.commitment !== "reserved") return { hourly: { fixed: exact(0), used: terms.quote } };
  const { years, prepaid, quote } = terms;
  return {
    hourly: { fixed: times(quote, prepaidFactor(prepaid, years, assumed.interest)), used: exact(0) },
    reservation: { years, prepaid, price: quote },
    minimumHours: 0,
  };
}

function inParts({ terms, groups, power_limit: limit }, assumed) {
  const groupsOf = (role) => groups.filter((_, at) => terms.parts[at] === role);
  const shareOf = (role) => devicesOf(groupsOf(role)) / devicesOf(groups);
  const beside = [];
  if (shareOf("owned")) {
    beside.push(partOf(keptHourly(groupsOf("owned"), assumed, limit), shareOf("owned")));
  }
  if (shareOf("rented")) {
    const quote = shareOf("bought") ? terms.part_rent : terms.quote;
    const commitment = terms.bought ? terms.rent_commitment : terms.commitment;
    beside.push(partOf(rented({ ...terms, quote, commitment }, assumed).hourly, shareOf("rented")));
  }
  if (!shareOf("bought")) return { hourly: summed(beside) };
  const whole = financed(
    purchaseOf(assumed, terms.quote, terms.network, groupsOf("bought"), limit), terms.loan);
  const share = shareOf("bought"), purchase = {
    ...whole, hardware: times(whole.hardware, share), yearly: times(whole.yearly, share),
    running: times(whole.running, share),
  };
  return { purchase, beside: summed(beside), hourly: summed([purchaseHourly(purchase), ...beside]) };
}

const partOf = ({ fixed, used }, share) => ({ fixed: times(fixed, share), used: times(used, share) });

const summed = (parts) => ({
  fixed: total(parts.map(({ fixed }) => fixed)), used: total(parts.map(({ used }) => used)),
});

/** What owned devices cost: as if bought, but for the hardware. */
function keptHourly(groups, assumed, limit) {
  const parts = groups.map((group) => {
    const purchase = purchaseOf(
      assumed, group.listed ?? exact(0), assumed.network_usd_per_device, [group], limit);
    const hourly = purchaseHourly({ ...purchase, hardware: exact(0) });
    return [group.devices / devicesOf(groups), hourly];
  });
  return {
    fixed: total(parts.map(([share, hourly]) => times(hourly.fixed, share))),
    used: total(parts.map(([share, hourly]) => times(hourly.used, share))),
  };
}

/** A purchase that a loan pays, if there is one. */
const financed = (purchase, loan) => (loan
  ? { ...purchase, instalments: loanInstalments(loan, purchase.horizon.years) } : purchase);

/** A device's lease as a purchase that is paid each month and leaves nothing to sell. */
function leaseOf(assumed, { quote, lease }, groups, limit) {
  const { years, owning } = assumed, months = leaseMonths(lease, years);
  return {
    ...purchaseOf(assumed, groups[0].listed ?? exact(0), assumed.network_usd_per_device, groups, limit),
    hardware: times(quote, months * (1 + owning.sales_tax)),
    residual: exact(0), taxRate: 0, leased: true,
    instalments: leaseInstalments(lease, years), boundShare: lease.term_months / months,
  };
}

/** A device's purchase with all that owning it costs. */
function purchaseOf(assumed, price, network, groups, limit) {
  const own = assumed.owning;
  const bare = total([price, network, own.storage_usd_per_device]);
  const withSpares = total([exact(1), own.spares]);
  const watts = wattsOf(groups, assumed, limit), devices = devicesOf(groups);
  const kilowatts = watts === null ? exact(0)
    : times(watts, 1e-3 / devices / assumed.power_usage_effectiveness.value);
  return {
    hardware: times(product([bare, withSpares]), 1 + own.sales_tax),
    yearly: total([
      product([bare, own.support_a_year]),
      product([bare, own.insurance_a_year]),
      own.staff_usd_per_device_year,
      product([kilowatts, times(own.hosting_usd_per_kw_month, MONTHS_PER_YEAR)]),
    ]),
    horizon: { years: assumed.years, interest: assumed.interest },
    residual: residualOf(assumed),
    idlePower: own.idle_power,
    running: watts === null ? exact(0)
      : powerUsdPerHour(times(watts, 1 / devices), assumed.electricity_usd_per_kwh),
    taxRate: own.income_tax,
    depreciationYears: own.depreciation_years,
    instalments: AT_ONCE, boundShare: 1,
  };
}

/** Share of the hardware's price that it sells for at the end of the years. @returns {Span} */
export function residualOf({ owning, years }) {
  if (owning.residual_by_age.length) return exact(residualShare(years, 1, owning.residual_by_age));
  const at = (end) => residualShare(years, owning.retained_a_year[end], []);
  return { value: at("value"), low: at("low"), high: at("high") };
}

/** USD of a useful device hour. @returns {Span} */
export const usefulHour = (priced, assumed) => hourlyAt(priced.hourly, assumed.utilisation);

/** USD that signing binds to for each device; null on terms that bind to nothing. */
export function boundUsd({ purchase, reservation }) {
  if (purchase) return purchase.hardware.value * purchase.boundShare;
  return reservation ? reservation.price.value * (reservation.years * HOURS_PER_YEAR) : null;
}

/**
 * USD that binding terms take out of a budget for each device; null on others.
 * @param {?Span} run  hours: one that takes longer than the terms takes more
 * @returns {?Span}
 */
export function outlayOf({ purchase, reservation }, utilisation, run = null) {
  if (purchase) return outlayUsd(purchase, utilisation, run);
  if (!reservation) return null;
  const hours = reservation.years * HOURS_PER_YEAR, once = times(reservation.price, hours);
  return run ? product([once, termsBegun(run, hours)]) : once;
}
