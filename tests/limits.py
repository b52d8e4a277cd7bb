"""How long tests wait: limits that no load of the machine reaches.

A wait in tests ends what hangs, and measures nothing: it is so long that twenty other programs on
the same cores do not end it.  What a test claims about cost is in CPU seconds, `children_cpu_s` and
`time.process_time`.
"""

from __future__ import annotations

import resource

PATIENCE_S = 1200.0
"""Wall-clock seconds of any one wait, for a process, a thread or a message."""


def children_cpu_s() -> float:
    """Return CPU seconds of all ended children of this process, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
