/**
 * Goodput: the share of the wall clock that trains.  The twin of goodput.py.
 *
 * @typedef {import("./uncertain_value.mjs").Span} Span
 */
import { SECONDS_PER_HOUR } from "./economics.mjs";

const OPPOSITE = { value: "value", low: "high", high: "low" };

/** Seconds between checkpoints at which the least is lost (Young, Daly). */
export const intervalS = (checkpointS, betweenFailuresS) =>
  Math.sqrt(2 * checkpointS * betweenFailuresS);

const bytesOf = (failures, parameters, at) =>
  parameters * failures.checkpoint_bytes_per_parameter[at];

/** Seconds until a checkpoint is written, with all figures at one end. */
export const writtenS = (failures, parameters, devices, at = "value") =>
  failures.checkpoint_stall_s[at]
  + bytesOf(failures, parameters, at) / (devices * failures.store_bytes_per_s_per_device[OPPOSITE[at]]);

/** Seconds that training waits for a checkpoint: a stall, and until it is on the host. */
export const blockedS = (failures, parameters, devices, at = "value") => Math.min(
  failures.checkpoint_stall_s[at]
  + bytesOf(failures, parameters, at) / (devices * failures.copy_bytes_per_s_per_device[OPPOSITE[at]]),
  writtenS(failures, parameters, devices, at));

/** Share of the wall clock that trains, between checkpoints at the best interval. */
export function goodputShare({ failuresPerHour, blocked, written, restart, other }) {
  if (failuresPerHour === 0) return 1 - other;
  const betweenS = SECONDS_PER_HOUR / failuresPerHour;
  const everyS = Math.max(written, intervalS(blocked, betweenS));
  const waiting = everyS ? blocked / everyS : 0;
  const againS = everyS / 2 + written - blocked;
  return (1 - other) / (1 + waiting + (againS + restart) / betweenS);
}

/** Goodput of a run with its range: all figures good at once, and all bad. @returns {Span} */
export function goodputOf(failures, { parameters, devices, nodes, spot }) {
  const share = (at) => goodputShare({
    failuresPerHour: devices * failures.per_device_hour[at]
      + (spot ? nodes * failures.spot_per_node_hour[at] : 0),
    blocked: blockedS(failures, parameters, devices, at),
    written: writtenS(failures, parameters, devices, at),
    restart: failures.restart_s[at],
    other: failures.other[at],
  });
  return { value: share("value"), low: share("high"), high: share("low") };
}
