/**
 * Goodput: the share of the wall clock that trains.  The twin of goodput.py.
 *
 * @typedef {import("./span.mjs").Span} Span
 */
import { SECONDS_PER_HOUR } from "./economics.mjs";

const OPPOSITE = { value: "value", low: "high", high: "low" };

/** Seconds between checkpoints at which the least is lost (Young, Daly). */
export const intervalS = (checkpointS, betweenFailuresS) =>
  Math.sqrt(2 * checkpointS * betweenFailuresS);

/** Seconds that training waits for a checkpoint, with all figures at one end. */
export const saveS = (failures, parameters, devices, at = "value") =>
  parameters * failures.checkpoint_bytes_per_parameter[at]
  / (devices * failures.store_bytes_per_s_per_device[OPPOSITE[at]]);

/** Share of the wall clock that trains, between checkpoints at the best interval. */
export function goodputShare({ failuresPerHour, checkpointS, restartS, other }) {
  if (failuresPerHour === 0) return 1 - other;
  const betweenS = SECONDS_PER_HOUR / failuresPerHour;
  const everyS = intervalS(checkpointS, betweenS);
  const writing = everyS ? checkpointS / everyS : 0;
  return (1 - other) / (1 + writing + (everyS / 2 + restartS) / betweenS);
}

/** Goodput of a run with its range: all figures good at once, and all bad. @returns {Span} */
export function goodputOf(failures, { parameters, devices, nodes, spot }) {
  const share = (at) => goodputShare({
    failuresPerHour: devices * failures.per_device_hour[at]
      + (spot ? nodes * failures.spot_per_node_hour[at] : 0),
    checkpointS: saveS(failures, parameters, devices, at),
    restartS: failures.restart_s[at],
    other: failures.other[at],
  });
  return { value: share("value"), low: share("high"), high: share("low") };
}
