"""torch's Muon with its products in the type of the gradient.

Muon rounds a gradient to bf16 before five Newton-Schulz steps, and each of these multiplies small
singular values by 3.4.  Two runs whose gradients differ in the last bit of fp32 then differ by 2^-8
of an update and more, by how much depends on the processor's kernels.  Without that rounding they
agree to 1e-6, whatever the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor
from torch.optim import _muon
from torch.overrides import TorchFunctionMode


class WithoutRounding(TorchFunctionMode):
    """A copy in bf16 is made in the same type."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def muon_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Muon compute in the gradient's type, here and in ranks forked from here."""
    rounded = _muon._zeropower_via_newtonschulz

    def exact(gradient: Tensor, *settings: Any) -> Tensor:
        with WithoutRounding():
            made = rounded(gradient, *settings)
        assert made.dtype == gradient.dtype, "torch's Muon rounds in another way"
        return made

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", exact)
