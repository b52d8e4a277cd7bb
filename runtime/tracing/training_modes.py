"""Train and eval mode of a module, set by its own `train`.

An overridden `train` decides for all that stands below it: detectors that keep BatchNorms in eval
mode, teachers that never train, stages that are frozen until an epoch.  Elsewhere what the module
was built with in eval mode stays there while the rest trains.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


class TrainingModes:
    """The modes of a module and of its parts."""

    def __init__(self, module: nn.Module, modes: Mapping[str, bool] | None = None) -> None:
        """`modes` are those of parts while the module trains: by default those of now."""
        self._module = module
        deciding = [path for path, part in module.named_modules() if _decides(part)]
        self._resting = [
            part
            for path, part in module.named_modules()
            if not (modes or {}).get(path, part.training)
            and not any(_is_below(path, above) for above in deciding)
        ]

    def set_mode(self, *, training: bool) -> None:
        """Set the mode as the module's own `train` and `eval` do."""
        if not training:
            self._module.eval()
            return
        self._module.train()
        for part in self._resting:
            part.training = False


def _decides(part: nn.Module) -> bool:
    return type(part).train is not nn.Module.train or "train" in vars(part)


def _is_below(path: str, above: str) -> bool:
    return above in ("", path) or path.startswith(f"{above}.")
