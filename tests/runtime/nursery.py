"""What a process imports that forks launchers: from here on its forks are launchers, not ranks.

Whoever collects examples imports this too, and forks ranks.
"""

import sys

from meshwright.runtime.launch import rank_main as rank
from tests.runtime import forked

if "_pytest" not in sys.modules:
    rank.main = forked.main  # type: ignore[assignment]
