/**
 * When hardware is paid: at once, by a loan, by a lease.  The twin of financing.py, which has the
 * formulas.
 *
 * @typedef {{years: number, share: number, interest: number}} Instalment  share: of the price of the
 *   hardware, or of all that a lease costs; interest: what of it is interest of a loan
 */
const MONTHS_PER_YEAR = 12, NOTHING = 1e-9;

/** @type {Instalment[]} */
export const AT_ONCE = [{ years: 0, share: 1, interest: 0 }];

const known = new WeakMap(); // by loan, its instalments of the years that were asked for last

/** What is paid for hardware of which a share is borrowed. @returns {Instalment[]} */
export function loanInstalments(loan, years) {
  if (known.get(loan)?.years !== years) known.set(loan, { years, instalments: workedOut(loan, years) });
  return known.get(loan).instalments;
}

function workedOut({ share, interest, months }, years) {
  const monthly = Math.expm1(Math.log1p(interest) / MONTHS_PER_YEAR);
  const rate = monthly ? monthly / -Math.expm1(-months * Math.log1p(monthly)) : 1 / months;
  const found = [{ years: 0, share: 1 - share, interest: 0 }];
  let owed = share;
  for (let month = 1; month <= Math.min(months, monthsOf(years)); month++) {
    const part = owed * monthly;
    found.push({ years: month / MONTHS_PER_YEAR, share: rate * share, interest: part });
    owed += part - rate * share;
  }
  if (months > monthsOf(years)) {
    const since = MONTHS_PER_YEAR * years - monthsOf(years);
    const part = owed * Math.expm1(since * Math.log1p(monthly));
    found.push({ years, share: owed + part, interest: part });
  }
  return found;
}

/** Months that a lease is paid for, its term at least. */
export const leaseMonths = ({ term_months: term }, years) => Math.max(usedMonths(years), term);

/** Equal shares of all that a lease costs, at the beginning of each month. @returns {Instalment[]} */
export function leaseInstalments(lease, years) {
  const used = usedMonths(years), whole = leaseMonths(lease, years);
  const paid = Array.from({ length: used },
    (_, month) => ({ years: month / MONTHS_PER_YEAR, share: 1 / whole, interest: 0 }));
  const left = whole > used ? [{ years, share: (whole - used) / whole, interest: 0 }] : [];
  return [...paid, ...left];
}

const usedMonths = (years) => Math.max(1, Math.ceil(MONTHS_PER_YEAR * years - NOTHING));
const monthsOf = (years) => Math.floor(MONTHS_PER_YEAR * years + NOTHING);
