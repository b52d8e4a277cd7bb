"""Errors of hardware by name: what drivers and libraries of accelerators and networks say.

A name stands for the words by which a driver or a library tells of it, in a rank's log or last
words.  `device` means that the accelerator is gone or damaged; `link` that bytes were lost between
devices or nodes, which another attempt may not meet.  Numbers of NVIDIA's driver (Xid) are those of
its catalogue; 13, 31, 43 and 45 are of programs and so not here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Part = Literal["device", "link"]
_XID = re.compile(r"\bXid \([^)]*\): (?P<number>\d+)(?P<rest>[^\n]*)")

XIDS: dict[int, tuple[Part, str]] = {
    48: ("device", "double-bit ECC error"),
    61: ("device", "microcontroller breakpoint"),
    62: ("device", "microcontroller halt"),
    63: ("device", "row remapping"),
    64: ("device", "row remapping failed"),
    74: ("device", "NVLink error"),
    79: ("device", "fallen off the bus"),
    92: ("device", "many single-bit ECC errors"),
    94: ("device", "contained ECC error"),
    95: ("device", "uncontained ECC error"),
    119: ("device", "time-out of the GSP"),
    120: ("device", "error of the GSP"),
    140: ("device", "unrecovered ECC error"),
    143: ("device", "initialisation of the device failed"),
    144: ("device", "NVLink 5: SAW"),
    145: ("device", "NVLink 5: RLW"),
    146: ("device", "NVLink 5: TLW"),
    147: ("device", "NVLink 5: TREX"),
    148: ("device", "NVLink 5: NVLPW_CTRL"),
    149: ("device", "NVLink 5: NETIR"),
    150: ("device", "NVLink 5: MSE"),
    154: ("device", "the driver asks for a reset or a restart of the node"),
}
_NVLINK_5 = range(144, 151)
"""Xids of NVLink 5, of which the driver says whether they are fatal; others pass."""

WORDS: tuple[tuple[str, Part, str], ...] = (
    (r"uncorrectable ECC error", "device", "uncorrectable ECC error"),
    (r"uncorrectable NVLink error", "device", "uncorrectable NVLink error"),
    (r"fallen off the bus", "device", "fallen off the bus"),
    (r"GPU is lost", "device", "the driver has lost the device"),
    (r"hardware stack error", "device", "hardware stack error"),
    (r"CUDA-capable device\(s\) is/are busy or unavailable", "device", "device unavailable"),
    (r"no CUDA-capable device is detected", "device", "no device is detected"),
    (r"amdgpu.*(?:GPU reset begin|GPU is lost|device lost)", "device", "AMD: reset of the device"),
    (r"amdgpu.*uncorrectable hardware error", "device", "AMD: uncorrectable hardware error (RAS)"),
    (r"amdgpu.*ring \S+ timeout", "device", "AMD: a ring does not answer"),
    (r"(?:hipErrorECCNotCorrectable|HIP error: uncorrectable ECC)", "device", "AMD: ECC error"),
    (r"(?:amdgpu|xgmi).*(?:xgmi|XGMI).*(?:error|down)", "link", "AMD: error of an XGMI link"),
    (r"(?:IBV_EVENT_DEVICE_FATAL|local catastrophic error)", "link", "InfiniBand: adapter failed"),
    (r"(?:IBV_EVENT_PORT_ERR|port_err|link_downed)", "link", "InfiniBand: a port is down"),
    (r"(?:IBV_WC_RETRY_EXC_ERR|transport retry counter exceeded)", "link",
     "InfiniBand: a peer does not answer (retry counter exceeded)"),
    (r"IBV_WC_RNR_RETRY_EXC_ERR", "link", "InfiniBand: a receiver is not ready"),
    (r"NET/IB ?: Got completion from peer .* with (?:error|status=\d+)", "link",
     "InfiniBand: a transfer failed"),
    (r"mlx5_core .*(?:Cable unplugged|Cable error|High Temperature)", "link",
     "InfiniBand: cable or module"),
    (r"NET/OFI.*(?:Request completed with error|fi_cq_readerr|RC: -5)", "link",
     "EFA: a transfer failed"),
    (r"(?:\befa\b|EFA).*(?:Unresponsive remote|unreachable remote|Device is lost|FATAL)", "link",
     "EFA: a peer or the adapter does not answer"),
)  # fmt: skip
"""Patterns of one line, with what they are of and how they are called."""
_WORDS = tuple((re.compile(pattern), part, name) for pattern, part, name in WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareError:
    """An error of hardware by name."""

    part: Part
    name: str


def hardware_error(words: str) -> HardwareError | None:
    """Return the first error of a device that words tell of, else of a link, else None.

    >>> hardware_error("NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT Fatal XC0 i0").name
    'Xid 149 (NVLink 5: NETIR)'
    >>> hardware_error("Xid (PCI:0000:3b:00): 31, pid=7, MMU fault")
    """
    errors = []
    for seen in _XID.finditer(words):
        number = int(seen["number"])
        if number not in XIDS:
            continue
        part, name = XIDS[number]
        passes = number in _NVLINK_5 and "nonfatal" in seen["rest"].lower().replace("-", "")
        errors.append(HardwareError(part="link" if passes else part, name=f"Xid {number} ({name})"))
    errors += [
        HardwareError(part=part, name=name)
        for pattern, part, name in _WORDS
        if pattern.search(words)
    ]
    of_devices = [error for error in errors if error.part == "device"]
    return next(iter(of_devices or errors), None)
