"""Documents: what is written reads back, and whatever is wrong becomes one message with its place.

Valid documents are made at random from the types themselves; where fields depend on each other, a
strategy of their own makes them fit.
"""

from __future__ import annotations

import json
import os
import socket
import types
import typing
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, ValidationError

from meshwright.planner import schemas
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup, LinkTier
from meshwright.planner.documents.document import (
    Document,
    Part,
    plain,
    read_text,
    write,
    write_text,
)
from meshwright.planner.documents.model import Architecture, Edge, Experts, Layer, ModelGraph
from meshwright.planner.documents.plan import (
    INSIDE_OUT,
    Mesh,
    PlacedLayer,
    Plan,
    PlannedModel,
    Stage,
)
from meshwright.planner.documents.prediction import Certificate, Prediction
from meshwright.planner.documents.profile import CollectiveCurve, LinkPoint, Profile
from meshwright.planner.documents.training import Lora, RateSchedule, Training
from meshwright.planner.documents.units import SMALLEST
from meshwright.planner.errors import DocumentError

PLANS = Path(__file__).parents[3] / "plans"
MANY = settings(
    max_examples=30,
    deadline=None,
    # Most random plans contradict themselves; a seed that finds none would say nothing.
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
NAME = st.text(
    st.characters(exclude_categories=["C", "Z"], exclude_characters="/\\."), min_size=1, max_size=12
).filter(str.isprintable)
DIGEST = st.binary(min_size=32, max_size=32).map(lambda of: f"sha256:{of.hex()}")


def made(  # noqa: PLR0911, PLR0912 - one return for each kind of type
    annotation: Any, constraints: tuple[Any, ...] = ()
) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a field's type."""
    if annotation in BY_HAND:
        return BY_HAND[annotation]()
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        flat = [m for item in metadata for m in getattr(item, "metadata", [item])]
        return made(inner, (*constraints, *flat))
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if origin in (Union, types.UnionType):
        return st.one_of([made(option) for option in get_args(annotation)])
    if origin is tuple:
        return st.lists(made(get_args(annotation)[0]), max_size=3).map(tuple)
    if origin is dict:
        key, value = get_args(annotation)
        return st.dictionaries(made(key), made(value), max_size=3)
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        if any(getattr(c, "pattern", None) for c in constraints):
            return DIGEST
        return NAME if any(isinstance(c, AfterValidator) for c in constraints) else TEXT
    low = max((c.ge for c in constraints if isinstance(c, annotated_types.Ge)), default=None)
    above = max((c.gt for c in constraints if isinstance(c, annotated_types.Gt)), default=None)
    high = min((c.le for c in constraints if isinstance(c, annotated_types.Le)), default=None)
    below = min((c.lt for c in constraints if isinstance(c, annotated_types.Lt)), default=None)
    if annotation is int:
        return st.integers(low, min(high or 2**40, 2**40))
    if annotation is float:
        if above is not None and any(isinstance(c, AfterValidator) for c in constraints):
            low, above = SMALLEST, None  # an invertible figure
        return st.floats(
            low if above is None else above,
            high if below is None else below,
            exclude_min=above is not None,
            exclude_max=below is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return part(annotation)
    raise AssertionError(f"no strategy for {annotation}")


@cache
def fields_of(cls: type[Part]) -> dict[str, st.SearchStrategy[Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        name: st.deferred(lambda hint=hints[name]: made(hint))  # type: ignore[misc]
        for name in cls.model_fields
        if name != "format"
    }


def part(cls: type[Part], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for a part, field by field; parts that do not fit together are dropped."""
    fields = {name: value for name, value in fields_of(cls).items() if name not in fixed}

    def build(values: dict[str, Any]) -> Any:
        try:
            return cls(**values)
        except ValidationError:
            return None

    return st.fixed_dictionaries(fields | fixed).map(build).filter(lambda value: value is not None)


@st.composite
def experts(draw: st.DrawFn) -> Experts:
    count = draw(st.integers(1, 64))
    return draw(part(Experts, count=st.just(count), per_token=st.integers(1, count)))


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    kv_heads, times = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    return draw(
        part(
            Architecture,
            kv_heads=st.just(kv_heads),
            heads=st.just(kv_heads * times),
            layers=st.integers(1, 200),
        )
    )


@st.composite
def models(draw: st.DrawFn) -> ModelGraph:
    names = draw(st.lists(NAME.map(lambda t: t + "!"), min_size=1, max_size=4, unique=True))
    layers = tuple(
        draw(part(Layer, name=st.just(name), repeat=st.integers(1, 5))) for name in names
    )
    chain = ModelGraph(name="x", layers=layers).chain
    pairs = st.tuples(st.integers(0, len(chain) - 1), st.integers(0, len(chain) - 1))
    forward = draw(st.lists(pairs.filter(lambda p: p[0] < p[1]), max_size=4)) if chain[1:] else []
    edges = tuple(Edge(source=chain[a][0], target=chain[b][0]) for a, b in forward)
    return draw(part(ModelGraph, layers=st.just(layers), edges=st.just(edges)))


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    groups = tuple(
        draw(part(DeviceGroup, nodes=st.integers(1, 64), devices_per_node=st.integers(1, 8)))
        for _ in range(draw(st.integers(1, 2)))
    )
    devices = sum(group.devices for group in groups)
    narrower = sorted(draw(st.lists(st.integers(1, devices), max_size=2)))
    tiers = tuple(draw(part(LinkTier, devices=st.just(n))) for n in [*narrower, devices])
    return draw(part(ClusterSpec, groups=st.just(groups), tiers=st.just(tiers)))


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    schedule = draw(st.sampled_from(get_args(RateSchedule)))
    warmup, rest = draw(st.integers(0, 9)), draw(st.integers(1, 9))
    return draw(
        part(
            Training,
            rate_schedule=st.just(schedule),
            warmup_steps=st.just(warmup),
            rate_steps=st.just(warmup + rest),
            decay_steps=st.integers(1, rest) if schedule == "wsd" else st.just(0),
            floor=st.floats(0, 1),
            weight_decay=st.floats(0, 0.99),  # below 1 by learning rates of at most 1
        )
    )


@st.composite
def adapters(draw: st.DrawFn) -> Lora:
    targets = st.lists(TEXT, min_size=1, max_size=3).map(tuple)
    return draw(part(Lora, targets=targets))


@st.composite
def planned_models(draw: st.DrawFn) -> PlannedModel:
    graph = draw(st.one_of(st.none(), models()))
    digest = st.just(graph.digest) if graph else NAME
    return draw(part(PlannedModel, graph=st.just(graph), digest=digest))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ranks = draw(st.integers(1, 3))
    schedule, virtual = draw(st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 2)]))
    stages = ranks * virtual
    zero = draw(st.integers(0, 3))
    shard = 1 if zero == 0 else draw(st.integers(1, 4))
    mesh = draw(
        part(
            Mesh,
            pipeline=st.just(ranks),
            data_shard=st.just(shard),
            data_replicate=st.integers(1, 4),
            tensor=st.integers(1, 64),
            context=st.integers(1, 64),
            order=st.permutations(INSIDE_OUT).map(tuple),
        )
    )
    names = iter(draw(st.lists(NAME, min_size=2 * stages, max_size=2 * stages, unique=True)))
    placed = tuple(
        Stage(layers=tuple(draw(part(PlacedLayer, layer=st.just(next(names)))) for _ in range(2)))
        for _ in range(stages)
    )
    micro_batch, micro_batches = draw(st.integers(1, 8)), ranks * draw(st.integers(1, 4))
    return draw(
        part(
            Plan,
            mesh=st.just(mesh),
            schedule=st.just(schedule),
            virtual_stages=st.just(virtual),
            groups=st.none(),
            shares=st.none(),
            zero=st.just(zero),
            stages=st.just(placed),
            micro_batch=st.just(micro_batch),
            micro_batches=st.just(micro_batches),
            global_batch=st.just(micro_batch * micro_batches * shard * mesh.data_replicate),
        )
    )


@st.composite
def curves(draw: st.DrawFn) -> CollectiveCurve:
    sizes = sorted(draw(st.sets(st.integers(1, 2**30), min_size=1, max_size=4)))
    points = tuple(draw(part(LinkPoint, size_bytes=st.just(size))) for size in sizes)
    return draw(part(CollectiveCurve, points=st.just(points)))


BY_HAND: dict[Any, typing.Callable[[], st.SearchStrategy[Any]]] = {
    Experts: experts,
    Architecture: architectures,
    ModelGraph: models,
    PlannedModel: planned_models,
    ClusterSpec: clusters,
    Lora: adapters,
    Training: trainings,
    Plan: plans,
    CollectiveCurve: curves,
}
DOCUMENTS = [Plan, ClusterSpec, ModelGraph, Profile, Prediction, Certificate]
ANY_DOCUMENT = st.one_of([made(cls) for cls in DOCUMENTS])


@pytest.mark.spread(1)
@pytest.mark.parametrize("examples", [8, MANY.max_examples])
@pytest.mark.parametrize("cls", DOCUMENTS)
def test_a_document_written_reads_back_the_same(cls: type[Document], examples: int) -> None:
    @settings(MANY, max_examples=examples)
    @given(made(cls))
    def round_trip(value: Document) -> None:
        assert cls.parse(value.dump()) == value
        assert cls.parse(value.model_dump_json(exclude_none=True)) == value
        assert cls.parse(value.dump()).digest == value.digest

    round_trip()


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**400), 1e308]),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
    st.dictionaries(st.integers(), st.integers(), max_size=1),
)


@MANY
@given(ANY_DOCUMENT, st.data())
def test_a_changed_text_is_valid_or_gives_one_message(value: Document, data: Any) -> None:
    text = value.dump()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 5)))
    inserted = data.draw(
        st.text(max_size=4)
        | st.sampled_from(
            ["*a", "&a ", "!x ", "\t", "\0", "<<: ", "? ", "---\n", "{", "[", "'", "%"]
        )
    )

    try:
        read_again = type(value).parse(text[:start] + inserted + text[end:], file="x.yaml")
    except DocumentError as error:
        assert str(error).startswith("x.yaml: ")
        assert "\n" not in str(error)
    else:
        assert type(value).parse(read_again.dump()) == read_again


@MANY
@given(st.text(max_size=60))
def test_no_text_at_all_ends_in_a_traceback(text: str) -> None:
    try:
        Plan.parse(text)
    except DocumentError:
        return
    raise AssertionError("random text is no plan")


@MANY
@given(st.recursive(JUNK, lambda inner: st.lists(inner, max_size=3), max_leaves=4))
def test_json_reads_as_json(value: Any) -> None:
    text = json.dumps([value])
    if "NaN" in text or "Infinity" in text:
        return

    assert plain(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("on", "on"),
        ("~", None),
        ("010", 10),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("1e3", 1000.0),
        ("1.5e-6", 1.5e-6),
        (".nan", ".nan"),
        (".inf", float("inf")),
        ("1_000", "1_000"),
        ("='x'", "='x'"),
        ("\ufeff12", 12),
    ],
)
def test_a_scalar_is_what_yaml_1_2_says(text: str, value: object) -> None:
    assert plain(text) == value
    assert type(plain(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("a: &x 1\nb: *x", "line 2, column 4", "alias"),
        ("a: !!python/object/apply:os.system ['true']", "line 1, column 4", "tag"),
        ("a: !mine 1", "line 1, column 4", "tag"),
        ("a: ! 1", "line 1, column 4", "tag"),
        ('{"a": 1, "a": 2}', "line 1, column 10", "'a' appears twice"),
        ('{"a": NaN1, b: [}', "line 1, column 17", "is not YAML"),
        ("a: 1\na: 2", "line 2, column 1", "'a' appears twice"),
        ("a: {b: 1, b: 2}", "line 1, column 11", "'b' appears twice"),
        ("1: 2", "line 1, column 1", "is not a word"),
        ("? [1, 2]\n: 3", "line 1, column 3", "is not a word"),
        ("[" * 41 + "]" * 41, "line 1, column 41", "nested more than 40 deep"),
        ("[" * 100_000, "line 1, column 41", "nested more than 40 deep"),
        ("a: 1\n b: 2", "line 2, column 3", "is not YAML"),
        ("a: 1\n---\nb: 2", "line 2, column 1", "is not YAML"),
        ("a: '", "line 1, column 5", "is not YAML"),
        ("a: \0", "", "is not YAML"),
        ("a: \ud800", "", "is not YAML"),
        ("9" * 5000, "", "is not YAML that can be read"),
    ],
)
def test_text_that_could_harm_or_means_nothing_is_refused_at_its_place(
    text: str, place: str, says: str
) -> None:
    with pytest.raises(DocumentError, match=says) as caught:
        plain(text)

    assert caught.value.path == place
    assert "\n" not in str(caught.value)


def test_forty_levels_are_read() -> None:
    assert plain("[" * 40 + "]" * 40)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(DocumentError, match=r"global_batch: is missing") as caught:
        Plan.of({"model": {"name": "x", "source": "x", "digest": "x"}, "cluster": "x"})

    assert caught.value.path == "global_batch"
    assert "more)" in caught.value.message


def test_another_format_is_refused() -> None:
    data = json.loads(resolve_model("gpt2").model_dump_json(exclude_none=True))

    with pytest.raises(DocumentError, match=r"format: is 2, and this version .* reads 1;"):
        ModelGraph.of(data | {"format": 2, "of_a_later_version": 1})
    with pytest.raises(DocumentError, match=r"format: is 1, and this version .* reads 2;"):
        Certificate.of({"format": 1, "of_an_earlier_version": 1})
    with pytest.raises(DocumentError, match=r"format: is 10{56}\.\.\., and this version"):
        ModelGraph.of(data | {"format": 10**400})  # beyond what a float can be


def test_equal_documents_have_equal_digests_and_others_not() -> None:
    model = resolve_model("gpt2")

    assert model.digest == resolve_model("gpt2").digest
    assert model.digest != resolve_model("gpt2-medium").digest
    assert model.digest.startswith("sha256:")


def test_a_file_too_large_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "MAX_BYTES", 10)
    (tmp_path / "large.yaml").write_text("a" * 11)

    with pytest.raises(DocumentError, match="has more than"):
        read_text(tmp_path / "large.yaml")
    with pytest.raises(DocumentError, match="has more than"):
        plain("a" * 11)


def test_writing_makes_folders_and_honours_the_umask(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "plan.yaml"

    old = os.umask(0o027)
    try:
        write_text("x: 1\n", target)
    finally:
        os.umask(old)

    assert target.read_text() == "x: 1\n"
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.yaml"
    write(resolve_model("gpt2"), target)
    before = target.read_text()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(DocumentError, match="cannot be written: No space left"):
        write_text("new", target)
    with pytest.raises(DocumentError, match="cannot be written"):
        write_text("\ud800", target)

    assert target.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.yaml"]


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_text("x", "/dev/null")

    assert not Path("/dev/null").is_file()


def test_what_is_written_means_the_same_to_other_readers_of_yaml() -> None:
    text = resolve_cluster("2xp5.48xlarge").dump()

    assert yaml.safe_load(text)["groups"][0]["accelerator"]["peak_flops"]["fp32"] == 67e12


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "link to a pipe"])
def test_what_may_never_end_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind in ("pipe", "link to a pipe"):
        os.mkfifo(path)
    if kind == "link to a pipe":
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    if kind == "device":
        path = Path("/dev/zero")
    if kind == "folder":
        path.mkdir()

    for reader in (document.read_text, document.read_table):
        with pytest.raises(DocumentError, match=r"regular file|No such device|Is a directory"):
            reader(path)


@pytest.mark.parametrize("text", ['{"\\ud800": 1}', '"\\ud800": 1', 'name: "\\ud800"'])
def test_half_a_character_is_refused(text: str) -> None:
    with pytest.raises(DocumentError):
        ModelGraph.parse(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"," * 1001, "header: has more than 1000 columns"),
        (b"a\n" + b"1\n" * 500_001, "has more than 500,000 rows"),
        (b'a\n"' + b"x" * 200_000, "is no CSV table: field larger"),
        ("a\n".encode("utf-16"), "is not UTF-8 text"),
    ],
    ids=["columns", "rows", "cell", "encoding"],
)
def test_a_table_beyond_all_bounds_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)

    with pytest.raises(DocumentError, match=rf"t\.csv: {message}"):
        document.read_table(tmp_path / "t.csv")


def test_schemas_for_editors_are_fresh() -> None:
    folder = Path(__file__).parents[3] / "meshwright" / "schemas"

    written = {file.name: file.read_text() for file in folder.glob("*.json")}

    assert written == schemas.texts(), "run python -m meshwright.planner.schemas"


def test_schemas_are_written_where_asked(tmp_path: Path) -> None:
    schemas.main(tmp_path)

    assert {file.name for file in tmp_path.iterdir()} == set(schemas.texts())
    assert json.loads((tmp_path / "plan.json").read_text())["title"] == "Plan"


def test_every_field_of_every_document_has_a_description() -> None:
    missing = [
        f"{cls.__name__}: {part.__name__}.{name}"
        for cls in schemas.DOCUMENTS
        for part in schemas.parts_of(cls)
        for name in part.model_fields
        if not schemas.meanings(part).get(name, "").endswith(".")
    ]

    assert missing == []
    described = schemas.described_schema(Plan)
    assert described["properties"]["zero"]["description"] == schemas.meanings(Plan)["zero"]
    stage = described["$defs"]["Stage"]["properties"]["layers"]
    assert stage["description"].endswith(".")


def test_the_schema_of_clusters_takes_a_file_that_names_its_accelerator(tmp_path: Path) -> None:
    """`catalog cluster` writes such a file; every key that the schema requires is in the least."""
    least = {"groups": [{"accelerator": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 2}]}
    (tmp_path / "c.yaml").write_text(yaml.dump({"format": 1, "name": "mine", **least}))

    described = schemas.described_schema(ClusterSpec)

    assert resolve_cluster(str(tmp_path / "c.yaml")).tiers
    assert set(described["required"]) == {"name", "groups"}
    group = described["$defs"]["DeviceGroup"]
    assert set(group["required"]) <= least["groups"][0].keys()
    assert {"type": "string"} in group["properties"]["accelerator"]["anyOf"]


@pytest.mark.parametrize("name", [str(cls.schema_file) for cls in schemas.DOCUMENTS])
def test_a_written_document_names_its_schema_and_is_read_again(name: str) -> None:
    (cls,) = (cls for cls in schemas.DOCUMENTS if cls.schema_file == name)
    files = [*PLANS.glob(f"*/{name.removesuffix('.json')}.yaml")]
    files += PLANS.glob("studies/*.yaml") if name == "study.json" else ()
    line = f"# yaml-language-server: $schema={document.SCHEMAS_URL}{name}"

    assert (PLANS.parent / "meshwright" / "schemas" / name).is_file()
    for file in files:
        assert file.read_text().splitlines()[0] == line
    for file in files[:1]:
        read = document.read(cls, file)
        assert read.dump().splitlines()[0] == line
        assert cls.parse(read.dump()) == read


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "text",
    [
        '{"a": [' + "1," * document.MAX_VALUES + "1]}",
        "a: [" + "[]," * document.MAX_VALUES + "1]",
        "- 1\n" * (document.MAX_VALUES + 1),
        "a: {" + ", ".join(f"k{n}: 1" for n in range(document.MAX_VALUES // 2)) + "}",
    ],
)
def test_a_document_of_too_many_values_is_refused(text: str) -> None:
    with pytest.raises(DocumentError, match="has more than 200,000 keys and values"):
        plain(text)


def test_commas_in_text_count_no_values() -> None:
    text = "," * (2 * document.MAX_VALUES)

    assert plain(json.dumps({"a": text})) == {"a": text}


@pytest.mark.parametrize(
    "content",
    [
        ",".join(f"c{n}" for n in range(1000)) + "\n" + "1\n" * 2001,
        "a\n" + "," * (document.MAX_CELLS + 1),
    ],
)
def test_a_table_of_too_many_cells_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)

    with pytest.raises(DocumentError, match="has more than 2,000,000 cells; divide it"):
        document.read_table(path)
