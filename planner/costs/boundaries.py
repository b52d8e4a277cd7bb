"""What layers hand on: bytes of their outputs, and of what crosses a boundary of the pipeline."""

from __future__ import annotations

from functools import cached_property

from planner.costs.crossings import narrowest_bytes, widest_bytes
from planner.documents.model import ModelGraph
from planner.layers.operator_table import FP32, Setting


class Boundaries:
    """Bytes of one micro-batch on a rank, for any setting of a model's layers."""

    def __init__(self, model: ModelGraph) -> None:
        self._model = model
        self._layers = {layer.kind: layer for layer in model.layers}

    def output_bytes(self, setting: Setting) -> dict[str, float]:
        """Bytes of an output, by kind of layer."""
        stream = self._stream_bytes(setting)
        scale = setting.micro_batch / setting.context * setting.element_bytes / FP32
        return {
            kind: layer.trace.output_bytes * scale if layer.trace else stream
            for kind, layer in self._layers.items()
        }

    def crossing_bytes(self, setting: Setting) -> tuple[float, float]:
        """Most and least bytes that cross a boundary."""
        scale = setting.micro_batch / setting.context * setting.element_bytes / FP32
        if self._model.edges and self._model.architecture is None:
            widest, narrowest = self._sample_crossings
            return widest * scale, narrowest * scale
        a = self._model.architecture
        if a is None:
            # What the last layer returns crosses no boundary.
            traces = [layer.trace for _, layer in self._model.chain[:-1] if layer.trace]
            largest = max((trace.output_bytes for trace in traces), default=0) * scale
            return largest, largest
        stream = self._stream_bytes(setting)
        if self._model.edges:
            return widest_bytes(self._model, dict.fromkeys(self._layers, stream)), stream
        return stream, stream

    def _stream_bytes(self, setting: Setting) -> float:
        a = self._model.architecture
        return setting.stream_tokens * a.hidden_size * setting.element_bytes if a else 0.0

    @cached_property
    def _sample_crossings(self) -> tuple[float, float]:
        """Most and least bytes of one sample in fp32 that cross a boundary of a traced graph."""
        output_bytes = {
            kind: float(layer.trace.output_bytes) if layer.trace else 0.0
            for kind, layer in self._layers.items()
        }
        return (
            widest_bytes(self._model, output_bytes),
            narrowest_bytes(self._model, output_bytes),
        )
