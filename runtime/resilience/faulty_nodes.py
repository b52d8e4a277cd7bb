"""Nodes that faulted: written down beside the checkpoints, so that the next job leaves them out.

    SAVED/faults/1764362341-5f2c.json       one for each fault: the node's address, cause, when

A node with MOST_FAULTS of them trains only where no other node is there in its place.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from meshwright.planner.documents.document import Part, json_line, read_text
from meshwright.planner.documents.events import Cause
from meshwright.planner.documents.units import Amount, Text
from meshwright.planner.errors import MeshwrightError
from meshwright.planner.system.safe_files import folder_within, replace_file
from meshwright.runtime.checkpoint import object_store
from meshwright.runtime.resilience.membership import Agent
from meshwright.runtime.run.recovery_policy import RankEnd
from meshwright.runtime.run.run_clock import unix_now_s

MOST_FAULTS = 2
"""From so many on a node is left out."""
MOST_READ = 1000
"""Faults of all nodes, the newest, that are looked at."""
_OF_NODE = frozenset({"crash", "device", "node", "hang", "corruption", "straggler"})
_Node = TypeVar("_Node")


class NodeFault(Part):
    """One fault of a node."""

    node: Text
    """Identity of the node, as `identity_of` returns it."""
    cause: Cause
    at_unix_s: Amount


def identity_of(agent: Agent) -> str:
    """Return what a node is known by in the next job: its address, where that is one of its own."""
    is_own = not agent.host.startswith("127.") and agent.host != "::1"
    return agent.host if is_own else f"{agent.host} as node {agent.node}"


class FaultRegister:
    """The faults of nodes, in a folder of checkpoints or its object store."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._store = folder, object_store.store_of(folder)

    def add(self, agent: Agent, end: RankEnd) -> None:
        """Write a fault down, if it may be the node's."""
        if end.cause not in _OF_NODE or end.waits or not end.named:
            return
        fault = NodeFault(node=identity_of(agent), cause=end.cause, at_unix_s=unix_now_s())
        name = f"{int(fault.at_unix_s):010}-{secrets.token_hex(4)}.json"
        if self._store is not None:
            self._store.put_text(json_line(fault), f"faults/{name}")
        else:
            replace_file(json_line(fault), folder_within(self._folder, "faults") / name)

    def counts(self) -> Mapping[str, int]:
        """Return how many faults each node has had; what cannot be read is no fault."""
        faults: Counter[str] = Counter()
        for text in self._texts():
            try:
                faults[NodeFault.model_validate_json(text).node] += 1
            except ValueError:
                continue
        return faults

    def _texts(self) -> list[str]:
        if self._store is not None:
            names = sorted(self._store.sizes("faults"))[-MOST_READ:]
            return [self._store.text(f"faults/{name}") for name in names]
        texts = []
        for file in sorted((self._folder / "faults").glob("*.json"))[-MOST_READ:]:
            try:
                texts.append(read_text(file))
            except MeshwrightError:
                continue
        return texts


def sound_first(
    nodes: Sequence[_Node], identities: Sequence[str], faults: Mapping[str, int]
) -> list[_Node]:
    """Return nodes in their order, those that faulted too often behind all others.

    >>> sound_first([0, 1, 2], ["a", "b", "c"], {"a": 2, "b": 1})
    [1, 2, 0]
    """
    faulty = [faults.get(identity, 0) >= MOST_FAULTS for identity in identities]
    return [node for place in (False, True) for node, is_faulty in zip(nodes, faulty, strict=True)
            if is_faulty == place]  # fmt: skip
