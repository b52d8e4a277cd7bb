"""What a process imports that forks launchers: from here on its forks are launchers, not ranks."""

from runtime import rank
from tests.runtime import forked

rank.main = forked.main  # type: ignore[assignment]
