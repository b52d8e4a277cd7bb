"""Partners: what the ranks of one node have copied is stored on another node, too.

The launcher of each node sends what its ranks write into their slots to that of its partner, as it
finds it there, and keeps what that of its ward sends.  Training waits for neither; it copies a
state only when the one before is stored everywhere (`runtime.resilience.in_memory_checkpoint`), so
that of two generations one is always whole.  A node that is lost then costs the steps since the
last copy.

    ward     -> partner     {"run", "epoch", "from"}, then for each slot {"rank", "label", "size",
                            "code"} and its bytes
    partner  -> ward        {"stored": rank} when they are whole, {"refused": why}

Who does not know the job's secret is not heard (`runtime.run.authenticated_channel`).  Nothing here
imports torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.runtime.resilience.membership import Agent, Held
from meshwright.runtime.resilience.shared_memory import Slots, StateSlot
from meshwright.runtime.run.authenticated_channel import (
    GREETING_BYTES,
    MAX_INTRODUCTION_BYTES,
    Channel,
    Unauthentic,
    exactly,
)

LOOK_S = 0.05
"""Between two looks at what ranks have written."""
GREET_S = 10.0
"""Seconds that a connection may take to show that it knows the secret."""
SILENT_S = 30.0
"""Seconds of silence allowed from the other side in the middle of a copy."""
AGAIN_S = 0.2
"""Until a partner that did not answer is called again."""
MOST_CONNECTIONS = 8
MOST_LABEL_BYTES = 2**26


def partner_places(domains: Sequence[int]) -> list[int]:
    """Return whose node keeps the copies of each: one of another domain, as far as there are.

    Members stand in the order of their domains, and each takes the one that is as many places
    further as the largest domain has members: if that is at most half of them, no two partners are
    of one domain.

    >>> partner_places([0, 0, 1, 1, 2, 2])
    [2, 3, 4, 5, 0, 1]
    >>> partner_places([0, 0, 0]), partner_places([0, 0, 1]), partner_places([5])
    ([1, 2, 0], [2, 0, 1], [0])
    """
    count = len(domains)
    order = sorted(range(count), key=lambda place: (domains[place], place))
    largest = max(domains.count(domain) for domain in set(domains))
    shift = largest if largest < count else 1
    partners = [0] * count
    for at, place in enumerate(order):
        partners[place] = order[(at + shift) % count]
    return partners


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """The ward whose copies a node keeps in an epoch, and the partner that keeps the node's own."""

    run: str
    epoch: int
    own: Agent
    partner: Agent | None
    """None where the node is alone."""
    ward: Agent | None


class KeptCopies:
    """A node's side of both, while a `with` block lasts."""

    def __init__(
        self,
        slots: Slots,
        listening: socket.socket,
        secret: bytes,
        holds: Callable[[Held], None],
    ) -> None:
        """`holds` gets parts that are whole here: of this node's ranks, and of its ward's."""
        self._slots, self._listening, self._secret, self._holds = slots, listening, secret, holds
        self._pairing: Pairing | None = None
        self._ended = threading.Event()
        self._places = threading.Semaphore(MOST_CONNECTIONS)
        self._received_s = 0.0
        self._calling: Channel | None = None
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("sends copies", self._send), ("keeps copies", self._serve))
        ]

    def __enter__(self) -> KeptCopies:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._hang_up()
        for thread in self._threads:
            thread.join()

    def begin(self, pairing: Pairing) -> None:
        """Take notice of an epoch, before its ranks start."""
        self._pairing = pairing
        self._hang_up()

    def _hang_up(self) -> None:
        """Let nobody wait for the partner of an epoch that is over."""
        calling = self._calling
        if calling is not None:
            with contextlib.suppress(OSError):
                calling.connection.shutdown(socket.SHUT_RDWR)

    # --- what is sent -----------------------------------------------------------------------

    def _send(self) -> None:
        """Send what ranks of the epoch write, until the end."""
        while not self._ended.is_set():
            pairing = self._pairing
            if pairing is None:
                self._ended.wait(LOOK_S)
                continue
            try:
                if pairing.partner is not None:
                    self._calling = _call_partner(pairing, pairing.partner, self._secret)
                self._send_all(pairing, self._calling)
            except (OSError, ValueError):
                self._ended.wait(AGAIN_S)  # whoever is gone is found by its silence
            finally:
                if self._calling is not None:
                    self._calling.close()
                self._calling = None

    def _send_all(self, pairing: Pairing, channel: Channel | None) -> None:
        sent: dict[int, tuple[int, str]] = {}
        announced: tuple[int, str] | None = None
        took_s, since_s = 0.0, math.inf
        while self._pairing is pairing and not self._ended.is_set():
            node = self._slots.node
            newest = [_newest(slots, pairing.epoch) for slots in node.own]
            found = {rank: state for rank, state in enumerate(newest) if state is not None}
            states = {_generation(label) for _, label in found.values()}
            if states and states != {announced}:
                since_s = min(since_s, time.monotonic() - LOOK_S)  # between two looks
            whole = len(found) == self._slots.ranks and len(states) == 1 and states != {announced}
            for _, label in found.values() if whole else ():
                self._holds(_held_state(label))
            if channel is not None:
                begin_s = time.thread_time()
                for rank, (slot, label) in found.items():
                    # What is not sent is written anew, and found the next time.
                    if sent.get(rank) != _generation(label) and _send_slot(channel, rank, slot):
                        sent[rank] = _generation(label)
                took_s += time.thread_time() - begin_s
            if whole and (channel is None or {sent.get(rank) for rank in found} == states):
                (announced,) = states
                if node.kept is not None:
                    step, run = announced
                    node.kept.write_step(
                        run,
                        step,
                        processor_s=took_s + self._received_s,
                        stored_s=time.monotonic() - since_s,
                    )
                took_s, since_s = 0.0, math.inf
            self._ended.wait(LOOK_S)

    # --- what is kept -----------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ended.is_set():
            if not select.select([self._listening], [], [], LOOK_S * 5)[0]:
                continue
            try:
                connection, _ = self._listening.accept()
            except OSError:
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._keep_copies, args=(connection,), daemon=True).start()

    def _keep_copies(self, connection: socket.socket) -> None:
        channel = Channel(connection, self._secret, serves=True)
        try:
            until = time.monotonic() + GREET_S
            connection.settimeout(GREET_S)
            connection.sendall(channel.greeting)
            channel.meet(exactly(connection, GREETING_BYTES, until=until))
            greeting = channel.receive(limit=MAX_INTRODUCTION_BYTES, until=until)
            pairing = self._pairing
            if pairing is None or greeting != _introduction(pairing, pairing.ward):
                channel.send({"refused": "it is not this node's ward"})
                return
            channel.send({"welcome": pairing.epoch})
            connection.settimeout(SILENT_S)
            while self._pairing is pairing and not self._ended.is_set():
                if select.select([connection], [], [], LOOK_S * 5)[0]:
                    self._keep_one(channel, pairing)
        except (OSError, ValueError, KeyError, TypeError):
            return  # it calls again, if it lives
        finally:
            channel.close()
            self._places.release()

    def _keep_one(self, channel: Channel, pairing: Pairing) -> None:
        """Take one rank's copy into the slot that has no state that is needed."""
        said = channel.receive(limit=MOST_LABEL_BYTES, until=time.monotonic() + GREET_S)
        begin_s = time.thread_time()
        rank, text, size = int(said["rank"]), str(said["label"]), int(said["size"])
        label = json.loads(text)
        wards = self._slots.node.wards
        if not 0 <= rank < len(wards) or label["epoch"] != pairing.epoch:
            raise Unauthentic("it sends what is not its own")
        code = at = 0
        slot = to_write(wards[rank], label)
        with slot.fill(text, size) as filling:
            # What is slow is no reason to give up: who is gone closes the connection.
            for piece in channel.content(size):
                filling[at : at + len(piece)] = piece
                code = zlib.crc32(piece, code)
                at += len(piece)
            if code == said["code"]:
                filling.commit(code)
        if slot.is_replaced:
            channel.send({"refused": "its memory was removed meanwhile"})
            return
        if code != said["code"]:
            channel.send({"refused": "its bytes are not those of its checksum"})
            return
        self._received_s = time.thread_time() - begin_s
        self._holds(_held_state(label))
        channel.send({"stored": rank})


def to_write(slots: Sequence[StateSlot], label: dict[str, Any]) -> StateSlot:
    """Return the slot of a pair that a copy goes into: never that of the state before it.

    A label says which state its rank went on from, or copied before.
    """
    needed = label["behind"] and tuple(label["behind"])

    def worth(slot: StateSlot) -> tuple[bool, int]:
        label = slot.label()
        return (False, -1) if label is None else (_generation(label) == needed, label["step"])

    return min(slots, key=worth)


def _generation(label: dict[str, Any]) -> tuple[int, str]:
    return label["step"], label["run"]


def _newest(slots: Sequence[StateSlot], epoch: int) -> tuple[StateSlot, dict[str, Any]] | None:
    """Return what a rank of an epoch wrote last."""
    labels = ((slot, slot.label()) for slot in slots)
    labelled = [
        (slot, label) for slot, label in labels if label is not None and label["epoch"] == epoch
    ]
    return max(labelled, key=lambda one: one[1]["step"], default=None)


def _held_state(label: dict[str, Any]) -> Held:
    return Held(epoch=label["epoch"], step=label["step"], of=label["world"], parts=(label["rank"],))


def _introduction(pairing: Pairing, agent: Agent | None) -> dict[str, Any]:
    start = None if agent is None else agent.start
    return {"run": pairing.run, "epoch": pairing.epoch, "from": start}


def _call_partner(pairing: Pairing, partner: Agent, secret: bytes) -> Channel:
    """Return a channel to the partner, which has taken this node for its ward."""
    connection = socket.create_connection((partner.host, partner.copies_port), timeout=GREET_S)
    channel = Channel(connection, secret, serves=False)
    try:
        greeting = _introduction(pairing, pairing.own)
        answer = channel.introduce(greeting, until=time.monotonic() + GREET_S)
        if answer != {"welcome": pairing.epoch}:
            raise ConnectionRefusedError("it has another ward")
    except BaseException:
        channel.close()
        raise
    connection.settimeout(SILENT_S)
    return channel


def _send_slot(channel: Channel, rank: int, slot: StateSlot) -> bool:
    """Send what is in a slot; say whether it is kept."""
    read = slot.contents()
    if read is None:
        return False
    label, content, code = read
    channel.send({"rank": rank, "label": label, "size": len(content), "code": code})
    channel.send_content(content)
    answer = channel.receive(limit=MAX_INTRODUCTION_BYTES)
    if answer != {"stored": rank}:
        raise ConnectionError(f"the partner has not stored it: {answer}")
    return True
