"""Expressions of users for MODEL and CLUSTER, turned into documents.

MODEL is a name of the catalogue or of the Hugging Face hub, a `config.json` or a folder that has
one, or a model document.  CLUSTER is `8xh100-sxm-80gb`, `16x8xh100-sxm-80gb` (nodes x devices), a
node type (`p5.48xlarge`, `4xp5.48xlarge`), several of these joined by `+`, `local`, `local:4`, or a
cluster document.  `CLUSTER:3x4` is a part of a cluster: 3 of its nodes, and 4 devices of each;
`8xh100-sxm-80gb:1x6+4xl40s` is one of several groups, and `cluster.yaml:GROUP+GROUP:1x6` one of a
document's.

A user's own modules (`file.py:factory`) are recognised here and built elsewhere, with torch.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.planner.architectures.architecture import (
    architecture_of,
    language_model,
    model_of_config,
)
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog import (
    AcceleratorEntry,
    NodeEntry,
    accelerator_name,
    accelerators,
    hub,
    model_config,
    model_name,
    models,
    node_name,
    nodes,
    nodes_of,
    pcie,
    rents,
)
from meshwright.planner.catalog.cluster_settings import ClusterSettings
from meshwright.planner.catalog.host_capacity import host_capacity
from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup, LinkTier, Price
from meshwright.planner.documents.document import (
    is_file,
    is_folder,
    is_there,
    nearest,
    plain,
    read_text,
    unreadable,
)
from meshwright.planner.documents.model import (
    FIGURES,
    ModelGraph,
    is_factory,
    is_recorded,
    is_script,
)
from meshwright.planner.documents.units import MOST_DEVICES, name_of
from meshwright.planner.errors import DocumentError

ROUND_S = 3e-6
"""Seconds of a ring's round inside nodes while the ring crosses a network: NCCL's figure for a send
of its simple protocol (2.20, src/graph/tuning.cc, netOverhead)."""
NETWORK_LATENCY_S = 4.0e-6
NETWORK_FRACTION = 0.79
NODE_NETWORK_BYTES_PER_S = 12.5e9
ALONE = "-language-model-alone"
"""Suffix of the name of a model without its towers for images or sound."""
CLUSTER_FORMS = (
    "write DEVICESxACCELERATOR, NODESxDEVICESxACCELERATOR, NODE-TYPE, NODESxNODE-TYPE, or several "
    "of them joined by +"
)
Shape = tuple[int, int]
"""Nodes, and devices of each."""


def resolve_model(text: str) -> ModelGraph:
    """Return the model that MODEL names.

    >>> resolve_model("llama-3.1-8b").parameters
    8030261248
    """
    if not text.isprintable():
        raise DocumentError("", f"{text[:60]!a} is no model that a plan could name; rename it")
    if is_factory(text):
        raise DocumentError(
            "",
            f"'{text}' is a Python function; it needs torch, which plans are made without; "
            "give its model.yaml",
        )
    if is_recorded(text):
        raise DocumentError(
            "",
            f"'{text}' is recorded with torch, which plans are made without here; "
            "give its model.yaml",
        )
    if is_script(text):
        raise DocumentError(
            "", f"'{text}' is a function of a script; give the plan that the script made"
        )
    if text.startswith(FIGURES):
        raise DocumentError(
            "", f"'{text}' is of another framework's configuration; give the plan of its import"
        )
    if _is_path(text):
        return _model_at(_path(text), text)
    try:
        name = _catalogued_model(text)
    except DocumentError as error:
        if hub.is_hub_name(text):
            file = hub.config_file(text)
            return _model_at(file, text, called=text.rpartition("/")[2])
        way = "a config.json, a folder that has one, or file.py:factory"
        begin = " Or give" if error.message.endswith("?") else "; give a name,"
        raise DocumentError("", f"{error.message}{begin} {way}") from error
    return graph_of(architecture_of(model_config(name), name=name), name=name, source=name)


def _catalogued_model(text: str) -> str:
    """Return the catalogue's name of MODEL, also for a variant of the same shape.

    The configuration that the hub's cache has of exactly this name goes before a variant's.

    >>> _catalogued_model("Qwen/Qwen2.5-32B-Instruct"), _catalogued_model("google/gemma-3-27b-it")
    ('qwen2.5-32b', 'gemma-3-27b')
    """
    try:
        return model_name(text)
    except DocumentError:
        is_cached = hub.is_hub_name(text) and hub.cached_config(text) is not None
        name = model_alike(text, lambda name: hub.plain_name(name).lower())
        if name is None or is_cached:
            raise
        return name


def model_alike(text: str, form: Callable[[str], str]) -> str | None:
    """Return the first model of the catalogue of which a name has the same form as a text."""
    wanted = form(text)
    names = ((name, (name, *entry.aliases)) for name, entry in models().items())
    return next((name for name, every in names if wanted in map(form, every)), None)


def locate_model(source: str, document: str | os.PathLike[str]) -> str:
    """Return a model's source as it is found from here: a relative file may be beside the document.

    >>> locate_model("gpt2", "plans/plan.yaml")
    'gpt2'
    """
    file, colon, factory = source.partition(":")
    beside = Path(document).parent / file
    if not is_there(file) and is_there(beside):
        return f"{beside}{colon}{factory}"
    return source


def resolve_beside(source: str, document: str | os.PathLike[str]) -> ModelGraph:
    """Return the model that a document names, as the same model wherever its file is found."""
    path = locate_model(source, document)
    model = resolve_model(path)
    return model if path == source else model.model_copy(update={"source": source})


def resolve_cluster(text: str) -> ClusterSpec:
    """Return the cluster that CLUSTER names.

    >>> cluster = resolve_cluster("16x8xh100-sxm-80gb")
    >>> cluster.devices, [(tier.name, tier.devices) for tier in cluster.tiers]
    (128, [('nvlink', 8), ('network', 128)])
    """
    file = _document_in(text)
    if file:
        return _named_part(resolve_cluster(file), text.removeprefix(f"{file}:"), text)
    if "+" not in text and (shape := _shape_in(text)) is not None:
        return _part_of_cluster(resolve_cluster(text.rpartition(":")[0]), shape, text)
    if text == "local" or text.startswith("local:"):
        from meshwright.planner.catalog import local  # noqa: PLC0415 - other clusters are no machines

        return local.cluster(_ranks(text))
    if _is_path(text):
        return _read_cluster(_path(text))
    return _join_groups(text) if "+" in text else _of_one_kind(text)


def full_names(text: str) -> dict[str, str]:
    """Return full names of the accelerators that a CLUSTER abbreviates, by their short ones.

    >>> full_names("4x8xa100,network=25GB/s+8xh100-sxm-80gb")
    {'a100': 'a100-sxm-80gb'}
    """
    full: dict[str, str] = {}
    if _document_in(text) or _is_path(text):
        return full
    for name in re.findall(r"(?:^|\+)(?:\d+x){0,2}([a-zA-Z][\w.\-]*)", text):
        with contextlib.suppress(DocumentError):  # a node type, or local
            if accelerator_name(name) != name.lower():
                full[name] = accelerator_name(name)
    return full


def _of_one_kind(text: str) -> ClusterSpec:
    """Return nodes of one kind, with the settings after their name."""
    plain_text, comma, words = text.partition(",")
    if comma:
        settings = ClusterSettings.parse(words)
        return settings.replace_figures(_of_one_kind(plain_text)).model_copy(
            update={"name": text[:200]}
        )
    counts, name = _counts(text)
    if len(counts) <= 1 and _is_node_type(name):
        return _of_node_type(node_name(name), nodes_in=counts[0] if counts else 1)
    try:
        accelerator = accelerator_name(name)
    except DocumentError as error:
        names = [*accelerators(), *nodes()]
        raise DocumentError(
            "",
            f"there is no accelerator or node type '{name:.60}'; {nearest(name, names)} "
            f"For CLUSTER, {CLUSTER_FORMS}, local or a cluster.yaml.",
        ) from error
    return _of_accelerator(accelerator, counts, text)


def _read_cluster(path: Path) -> ClusterSpec:
    """Read a cluster document, whose accelerators may be names of the catalogue."""
    data = plain(read_text(path))
    try:
        if isinstance(data, dict) and isinstance(data.get("groups"), list):
            named = [
                _with_accelerator(number, group) for number, group in enumerate(data["groups"])
            ]
            data = {**data, "groups": [group for group, _ in named]}
            entries = [entry for _, entry in named if entry is not None]
            if len(named) == len(entries) == 1:
                usual = _usual_tiers(entries[0], data["groups"][0])
                data["tiers"] = _with_fractions(data["tiers"], usual) if "tiers" in data else usual
        return ClusterSpec.of(data)
    except DocumentError as error:
        raise error.in_file(str(path)) from error


def _with_accelerator(number: int, group: object) -> tuple[object, AcceleratorEntry | None]:
    """Return a group of a document with the figures of the accelerator that it names."""
    if not isinstance(group, dict) or not isinstance(group.get("accelerator"), str):
        return group, None
    try:
        name = accelerator_name(group["accelerator"])
    except DocumentError as error:
        raise DocumentError(f"groups[{number}].accelerator", error.message) from error
    entry = accelerators()[name]
    usual: dict[str, object] = {"name": name, "nodes": 1}
    if entry.host_link_bytes_per_s is not None:
        usual["host_link_bytes_per_s"] = entry.host_link_bytes_per_s
    count = group.get("devices_per_node")
    if "host_memory_bytes" not in group and isinstance(count, int) and 0 < count <= MOST_DEVICES:
        usual["host_memory_bytes"], *span = host_capacity(name, entry, count)
        usual["host_memory_range_bytes"] = span
    shown = entry.accelerator(name).model_dump(mode="json", exclude_none=True)
    return {**usual, **group, "accelerator": shown}, entry


def _with_fractions(tiers: object, usual: Sequence[dict[str, Any]]) -> object:
    """Return links of a document, each with the shares that links of its kind reach.

    The kind is what the name begins with, as pcie of pcie3-x8; a link that has shares keeps them.
    """
    if not isinstance(tiers, list):
        return tiers
    return [
        _reaching(tier, next((u for u in usual if _is_kind(tier, u["name"])), None))
        for tier in tiers
    ]


def _is_kind(tier: object, kind: str) -> bool:
    return (
        isinstance(tier, dict)
        and str(tier.get("name")).startswith(kind)
        and not {"fractions", "narrow"} & set(tier)
    )


def _reaching(tier: Any, usual: dict[str, Any] | None) -> object:
    if usual is None:
        return tier
    reach = tier.get("devices")
    narrow = [
        item
        for item in usual.get("narrow", ())
        if isinstance(reach, int) and item["members"] <= reach
    ]
    return {"narrow": narrow, "fractions": usual["fractions"], "source": usual["source"], **tier}


def _usual_tiers(entry: AcceleratorEntry, group: dict[str, object]) -> list[dict[str, Any]]:
    """Return the links of nodes as the catalogue has them, for a group of one accelerator."""
    nodes_in, each = group.get("nodes"), group.get("devices_per_node")
    if not isinstance(nodes_in, int) or not isinstance(each, int) or not 1 <= each <= MOST_DEVICES:
        return []
    within = _clip_tiers(_widen_tiers(entry.tiers or pcie(entry), each), each)
    between: tuple[LinkTier, ...] = ()
    if nodes_in > 1:
        network = {"devices": nodes_in * each, "least_round_s": ROUND_S}
        between = (_network(entry, each, None).model_copy(update=network),)
    return [tier.model_dump(mode="json", exclude_none=True) for tier in (*within, *between)]


def _document_in(text: str) -> str:
    """Return the file of which a text names a part; empty where it names a file or none."""
    places = [at for at, character in enumerate(text) if character == ":"]
    if not places or is_there(text):
        return ""
    return next((text[:at] for at in places if is_file(_path(text[:at]))), "")


def _shape_in(text: str) -> Shape | None:
    """Return the nodes and the devices of each that stand behind a name, if any do.

    >>> _shape_in("3x5xh100-sxm-80gb:3x4"), _shape_in("local:4")
    ((3, 4), None)
    """
    shape = re.fullmatch(r".+:(\d{1,9})x(\d{1,9})", text)
    return None if shape is None else (int(shape[1]), int(shape[2]))


def _part_of_cluster(whole: ClusterSpec, shape: Shape, text: str) -> ClusterSpec:
    """Return some nodes of a cluster of one group, and some devices of each.

    >>> part = resolve_cluster("3x5xh100-sxm-80gb:3x4")
    >>> part.devices, [tier.devices for tier in part.tiers]
    (12, [4, 12])
    """
    if len(whole.groups) > 1:
        raise DocumentError("", f"'{text:.60}' is a part of several groups; name the nodes it has")
    _check_shape(whole.groups[0], shape, text)
    return whole.smaller(nodes=shape[0], devices_per_node=shape[1])


def _check_shape(group: DeviceGroup, shape: Shape, text: str) -> None:
    nodes, each = shape
    if not (1 <= nodes <= group.nodes and 1 <= each <= group.devices_per_node):
        raise DocumentError(
            "",
            f"'{text:.60}' is no part of {group.nodes} nodes with {group.devices_per_node} devices "
            "each; name 1 to as many",
        )


def _named_part(whole: ClusterSpec, names: str, text: str) -> ClusterSpec:
    """Return some nodes of a document, or some of its groups by their names."""
    shape = _shape_in(f"{whole.name}:{names}")
    if shape is not None and ":" not in names and len(whole.groups) == 1:
        return _part_of_cluster(whole, shape, text)
    groups = [group.name for group in whole.groups]
    shapes: dict[int, Shape] = {}
    for term in names.split("+"):
        shape = _shape_in(term)
        name = term if shape is None else term.rpartition(":")[0]
        if name not in groups:
            file = text.removesuffix(f":{names}")
            raise DocumentError("", f"'{name:.60}' is no group of {file}; {nearest(name, groups)}")
        group = whole.groups[groups.index(name)]
        if shape is not None:
            _check_shape(group, shape, text)
        shapes[groups.index(name)] = shape or (group.nodes, group.devices_per_node)
    kept = sorted(shapes)
    return _some_groups(whole, kept, [shapes[at] for at in kept])


def _some_groups(
    whole: ClusterSpec, kept: Sequence[int], shapes: Sequence[Shape] | None = None
) -> ClusterSpec:
    """Return some groups of a cluster, or some nodes of them, with the links that they can use."""
    groups = tuple(whole.groups[at] for at in kept)
    every = [(group.nodes, group.devices_per_node) for group in groups]
    shapes = list(shapes or every)
    if len(groups) == len(whole.groups):
        return whole if shapes == every else whole.with_shapes(shapes)
    part = whole.part(groups).model_copy(update={"price": whole.price})
    if len(groups) > 1:
        return part if shapes == every else part.with_shapes(shapes)
    [group], [(nodes, each)] = groups, shapes
    # Its links are the cluster's now, none wider than it is.
    alone = part.model_copy(update={"groups": (group.model_copy(update={"tiers": None}),)})
    smaller = alone.smaller(nodes=nodes, devices_per_node=each)
    return smaller.model_copy(update={"name": group.name})


def groups_part(
    called: str,
    cluster: ClusterSpec,
    kept: Sequence[int],
    shapes: Sequence[Shape] | None = None,
) -> tuple[str, ClusterSpec]:
    """Return the name of some groups of the cluster `called`, and that part.

    Where `+` joins kinds of nodes, the others are left out, with the limits of their networks.
    `shapes` are the nodes that are kept of each, and the devices of each node; by default all.

    >>> called = "2xa100-sxm-80gb+8xh100-sxm-80gb+4xl40s"
    >>> name, part = groups_part(called, resolve_cluster(called), (1,))
    >>> name, part == resolve_cluster("8xh100-sxm-80gb")
    ('8xh100-sxm-80gb', True)
    >>> groups_part(called, resolve_cluster(called), (0, 1), [(1, 2), (1, 6)])[0]
    '2xa100-sxm-80gb+8xh100-sxm-80gb:1x6'
    """
    terms = called.split("+")
    joined = not _is_path(called) and len(terms) == len(cluster.groups)
    if not joined:
        terms = [group.name for group in cluster.groups]
    names = []
    for number, at in enumerate(kept):
        group = cluster.groups[at]
        nodes, each = whole = group.nodes, group.devices_per_node
        if shapes is not None:
            nodes, each = shapes[number]
        names.append(terms[at] if (nodes, each) == whole else f"{terms[at]}:{nodes}x{each}")
    name = "+".join(names)
    if joined and _join_groups(called) == cluster:
        return name, resolve_cluster(name)
    return name if joined else f"{called}:{name}", _some_groups(cluster, kept, shapes)


def part_name(called: str, *, nodes: int, devices_per_node: int) -> str:
    """Return the name of a part of the cluster `called`.

    >>> part_name("3x5xh100-sxm-80gb", nodes=3, devices_per_node=4), part_name("local", nodes=1,
    ...     devices_per_node=2)
    ('3x5xh100-sxm-80gb:3x4', 'local:2')
    """
    if called == "local" or called.startswith("local:"):
        return f"local:{devices_per_node}"
    return f"{called}:{nodes}x{devices_per_node}"


def _join_groups(text: str) -> ClusterSpec:
    """Return the cluster of several kinds of nodes, joined by the slowest of their networks.

    >>> joined = resolve_cluster("4xa100-sxm-80gb+8xv100-sxm-32gb")
    >>> [(group.name, group.devices) for group in joined.groups], joined.tiers[0].devices
    ([('a100-sxm-80gb', 4), ('v100-sxm-32gb', 8)], 12)
    """
    shapes = [_shape_in(term) for term in text.split("+")]
    terms = [
        term if shape is None else term.rpartition(":")[0]
        for term, shape in zip(text.split("+"), shapes, strict=True)
    ]
    parts = []
    for term, shape in zip(terms, shapes, strict=True):
        if _is_path(term) or term.startswith("local"):
            raise DocumentError(
                "", f"'{text:.60}' joins '{term:.40}', which is no kind of node; {CLUSTER_FORMS}"
            )
        part = _joined_part(term)
        parts.append(part if shape is None else _part_of_cluster(part, shape, text))
    devices = sum(part.devices for part in parts)
    networks = [_network_of(term, part.groups[0]) for term, part in zip(terms, parts, strict=True)]
    slowest = min(networks, key=lambda tier: tier.bytes_per_s)
    named: list[DeviceGroup] = []
    for part in parts:
        (group,) = part.groups
        same = sum(other.accelerator == group.accelerator for other in named)
        name = f"{group.name}-{same + 1}" if same else group.name
        named.append(group.model_copy(update={"name": name, "tiers": part.tiers}))
    return ClusterSpec(
        name="+".join(part.name for part in parts),
        groups=tuple(named),
        tiers=(slowest.model_copy(update={"devices": devices}),),
    )


def _joined_part(term: str) -> ClusterSpec:
    """Return one kind of node among several, of which a single node has a network too."""
    plain_term, comma, words = term.partition(",")
    part = resolve_cluster(plain_term)
    if not comma:
        return part
    settings = ClusterSettings.parse(words)
    if all(tier.name != "network" for tier in part.tiers):
        settings = replace(settings, network_bytes_per_s=None, oversubscription=None)
    return settings.replace_figures(part)


def _network_of(term: str, group: DeviceGroup) -> LinkTier:
    """Return the tier between nodes of one kind."""
    plain_term, comma, words = term.partition(",")
    if comma:
        usual, given = _network_of(plain_term, group), ClusterSettings.parse(words)
        figures = {
            "bytes_per_s": given.network_bytes_per_s or usual.bytes_per_s,
            "oversubscription": given.oversubscription or usual.oversubscription,
        }
        return usual.model_copy(update=figures)
    _, name = _counts(term)
    node = nodes()[node_name(name)] if _is_node_type(name) else None
    if node is not None and node.network is not None:
        return node.network
    entry = accelerators()[group.accelerator.name]
    return _network(entry, group.devices_per_node, None)


def cluster_of(
    accelerator: str,
    *,
    nodes: int = 1,
    devices_per_node: int = 8,
    intra_link: str | None = None,
    network_bytes_per_s: float | None = None,
    host_memory_bytes: int | None = None,
    widened: bool = False,
) -> ClusterSpec:
    """Return a cluster of one accelerator whose node differs from the usual one.

    `intra_link` names the link inside a node where a choice exists: `nvlink` gives cards their
    bridge, `pcie` takes it away.  `network_bytes_per_s` counts one device and one direction.
    `widened` lets links inside a node join more devices than they usually do.

    >>> cluster_of("rtx-3090", devices_per_node=2, intra_link="nvlink").tiers[0].name
    'nvlink'
    """
    name = accelerator_name(accelerator)
    entry = accelerators()[name]
    tiers = entry.tiers
    if intra_link == "nvlink" and entry.bridge and all(t.name != "nvlink" for t in tiers):
        tiers = (entry.bridge, *tiers)
    elif intra_link == "pcie":
        tiers = pcie(entry) or tiers
    if widened:
        tiers = _widen_tiers(tiers or pcie(entry), devices_per_node)
    return _cluster(
        f"{nodes}x{devices_per_node}x{name}",
        name,
        entry,
        tiers,
        nodes=nodes,
        devices_per_node=devices_per_node,
        host_memory_bytes=host_memory_bytes,
        network=_network(entry, devices_per_node, network_bytes_per_s),
    )


def _widen_tiers(tiers: tuple[LinkTier, ...], devices: int) -> tuple[LinkTier, ...]:
    if not tiers or tiers[-1].devices >= devices:
        return tiers
    return (*tiers[:-1], tiers[-1].model_copy(update={"devices": devices}))


def _of_accelerator(name: str, counts: Sequence[int], text: str) -> ClusterSpec:
    entry = accelerators()[name]
    most = entry.devices_per_node
    if not counts:
        in_all, per_node = 1, 1
    elif len(counts) == 1 and counts[0] > most:
        in_all, per_node = divmod(counts[0], most)[0], most
        if counts[0] % most:
            raise DocumentError(
                "",
                f"'{text}' asks for {counts[0]} devices, and a node has {most} {name}; write "
                f"nodes x devices, as {counts[0] // most}x{most}x{name}",
            )
    else:
        in_all, per_node = (1, counts[0]) if len(counts) == 1 else (counts[0], counts[1])
    several = next(
        (node for node in nodes_of(name) if node.devices_per_node == per_node),
        None,
    )
    if per_node > most and several is not None:
        return _cluster(
            f"{in_all}x{per_node}x{name}",
            name,
            entry,
            entry.tiers,
            nodes=in_all,
            devices_per_node=per_node,
            host_memory_bytes=several.host_memory_bytes,
            network=several.network or _network(entry, per_node, None),
        )
    if per_node > most:
        raise DocumentError(
            "",
            f"'{text}' puts {per_node} devices in a node; a node has {most} {name}, others need "
            "a cluster.yaml",
        )
    return _cluster(
        f"{in_all}x{per_node}x{name}" if in_all > 1 else f"{per_node}x{name}",
        name,
        entry,
        entry.tiers,
        nodes=in_all,
        devices_per_node=per_node,
        host_memory_bytes=None,
        network=_network(entry, per_node, None),
    )


def _of_node_type(name: str, *, nodes_in: int) -> ClusterSpec:
    node = nodes()[name]
    entry = accelerators()[node.accelerator]
    return _cluster(
        f"{nodes_in}x{name}" if nodes_in > 1 else name,
        node.accelerator,
        entry,
        entry.tiers,
        nodes=nodes_in,
        devices_per_node=node.devices_per_node,
        host_memory_bytes=node.host_memory_bytes,
        network=node.network or _network(entry, node.devices_per_node, None),
        price=_price(name, node),
    )


def _cluster(
    name: str,
    accelerator: str,
    entry: AcceleratorEntry,
    within: Sequence[LinkTier],
    *,
    nodes: int,
    devices_per_node: int,
    host_memory_bytes: int | None,
    network: LinkTier,
    price: Price | None = None,
) -> ClusterSpec:
    devices = nodes * devices_per_node
    host_range = None
    if host_memory_bytes is None:
        host_memory_bytes, *host_range = host_capacity(accelerator, entry, devices_per_node)
    joined = entry.host_devices is not None and devices_per_node <= entry.host_devices
    tiers = _clip_tiers(within, devices if joined else devices_per_node)
    if joined and tiers and devices_per_node < tiers[-1].devices < devices:
        tiers = (*tiers[:-1], _rack(tiers[-1], devices, devices_per_node))
    if devices_per_node > 1 and (not tiers or tiers[-1].devices < devices_per_node):
        reach = tiers[-1].devices if tiers else 1
        raise DocumentError(
            "",
            f"links inside a node reach {reach} {accelerator}, and the node has "
            f"{devices_per_node}; describe it in a cluster.yaml",
        )
    if nodes > 1 and (not tiers or tiers[-1].devices < devices):
        tiers = (*tiers, network.model_copy(update={"devices": devices, "least_round_s": ROUND_S}))
    return ClusterSpec(
        name=name,
        groups=(
            DeviceGroup(
                name=accelerator,
                accelerator=entry.accelerator(accelerator),
                nodes=nodes,
                devices_per_node=devices_per_node,
                host_memory_bytes=host_memory_bytes,
                host_memory_range_bytes=host_range and (host_range[0], host_range[1]),
                host_link_bytes_per_s=entry.host_link_bytes_per_s,
            ),
        ),
        tiers=tiers,
        price=price,
    )


def _rack(tier: LinkTier, devices: int, devices_per_node: int) -> LinkTier:
    """Return the links of racks whose hosts are counted: so many devices of each as divide all.

    >>> [resolve_cluster(text).tiers[0].devices for text in ("1024x4xgb200", "36x4xgb200")]
    [64, 72]
    """
    reach = max(
        reach
        for reach in range(devices_per_node, tier.devices + 1, devices_per_node)
        if devices % reach == 0
    )
    if reach == tier.devices or 2 * reach < tier.devices:
        return tier
    source = f"{tier.source}; assumed: {reach} of {tier.devices} devices of each rack"
    return tier.model_copy(update={"devices": reach, "source": source})


def _clip_tiers(tiers: Sequence[LinkTier], devices: int) -> tuple[LinkTier, ...]:
    """Keep the tiers that this number of devices uses, none wider than they are."""
    if devices == 1:
        return ()
    kept: list[LinkTier] = []
    for tier in tiers:
        if not kept or kept[-1].devices < min(tier.devices, devices):
            kept.append(tier.model_copy(update={"devices": min(tier.devices, devices)}))
    return tuple(kept)


def _network(entry: AcceleratorEntry, devices_per_node: int, rate: float | None) -> LinkTier:
    """Return the tier between nodes where the node type has none."""
    source = "given"
    if rate is None and entry.network_bytes_per_s is not None:
        rate, source = entry.network_bytes_per_s, entry.sources.get("network_bytes_per_s", "usual")
    elif rate is None:
        rate = NODE_NETWORK_BYTES_PER_S / devices_per_node
        source = "default, 100 Gb/s for each node, shared by its devices"
    return LinkTier(
        name="network",
        devices=1,
        latency_s=NETWORK_LATENCY_S,
        bytes_per_s=rate,
        fractions=dict.fromkeys(
            ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"),
            NETWORK_FRACTION,
        ),
        source=f"{source}; latency of a ring step and share of line rate are defaults",
    )


def _price(name: str, node: NodeEntry) -> Price | None:
    """Return the on-demand rent of a node type where the catalogue has one."""
    for rent in rents():
        named = rent.whole_node and rent.instance in (name, *node.aliases)
        if named and rent.on_demand_usd_per_device_hour:
            return Price(
                usd_per_device_hour=rent.on_demand_usd_per_device_hour,
                commitment="on_demand",
                date=rent.date,
                source=rent.source,
            )
    return None


def _counts(text: str) -> tuple[list[int], str]:
    """Split `16x8xname` into its counts and the name.

    >>> _counts("16x8xh100"), _counts("h100")
    (([16, 8], 'h100'), ([], 'h100'))
    """
    match = re.fullmatch(r"((?:\d+x){0,2})([a-zA-Z][\w.\-]*)", text)
    if match is None:
        raise DocumentError("", f"'{text:.60}' names no cluster; {CLUSTER_FORMS}, as 2x8xh100")
    counts = [int(count[:12]) for count in match[1].split("x")[:-1]]
    devices = 1
    for count in counts:
        devices *= count
    if not 1 <= devices <= MOST_DEVICES:
        raise DocumentError(
            "", f"'{text:.60}' asks for {devices} devices; a cluster has 1 to {MOST_DEVICES:,}"
        )
    return counts, match[2]


def _ranks(text: str) -> int | None:
    if text == "local":
        return None
    count = text.removeprefix("local:")
    if not re.fullmatch(r"[1-9]\d{0,3}", count):
        raise DocumentError(
            "", f"'{text:.60}' names no cluster; write local:N with N ranks, 1 or more"
        )
    return int(count)


def _is_node_type(name: str) -> bool:
    try:
        node_name(name)
    except DocumentError:
        return False
    return True


def _is_path(text: str) -> bool:
    """Tell a path from a name: by its look, or because it is there."""
    if text.endswith((".json", ".yaml", ".yml")) or text.startswith((".", "/", "~")):
        return True
    return text.strip() != "" and is_there(text)


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~somebody who has no home
        raise unreadable(error, text) from error


def _refuse_adapter(path: Path, text: str) -> None:
    """Refuse a folder that has an adapter alone, which is trained beside another model."""
    if not is_file(path):
        return
    data = plain(read_text(path))
    base = data.get("base_model_name_or_path") if isinstance(data, dict) else None
    rank = data.get("r") if isinstance(data, dict) else None
    raise DocumentError(
        "",
        f"has adapter_config.json, an adapter of {base or 'another model'!s:.80}; name that model, "
        f"with --lora rank={rank if type(rank) is int else 'NUMBER'}",
        file=text,
    )


def _model_at(path: Path, text: str, called: str | None = None) -> ModelGraph:
    """Read a model document, a config.json, or the config.json in a folder.

    The model is `called` so, by default after its file or folder.
    """
    if is_folder(path):
        path = path / "config.json"
        if not is_file(path):
            _refuse_adapter(path.with_name("adapter_config.json"), text)
            raise DocumentError(
                "", "has no config.json; name a model's folder, or its config.json", file=text
            )
    data = plain(read_text(path))
    try:
        if isinstance(data, dict) and "layers" in data and "model_type" not in data:
            return ModelGraph.of(data)
        if not isinstance(data, dict):
            raise DocumentError("", "is no mapping; a model's config.json is one")
        stem = path.parent.resolve().name if path.name == "config.json" else path.stem
        name = called or stem or "model"
        text_alone = language_model(data)
        if text_alone is not None:
            data, name = dict(text_alone), f"{name}{ALONE}"
        name = name_of(name)
        return model_of_config(data, name=name, source=text)
    except DocumentError as error:
        raise error.in_file(str(path)) from error
