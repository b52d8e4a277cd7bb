"""Configurations read as plans: what was written is read back, and what others published is."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api import commands
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.document import write
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.framework_configs.configuration import FRAMEWORKS as WRITTEN
from meshwright.planner.framework_configs.configuration import configuration
from meshwright.planner.framework_configs.import_plan import READERS, Imported, import_plan
from meshwright.planner.framework_configs.readers import shell
from tests.planner.framework_configs import public_configurations as public
from tests.planner.framework_configs.test_export_oracles import MODEL, written

FRAMEWORKS = [name for name in READERS if name in WRITTEN]
OWN = {"timeout_s", "framework", "read_from"}
"""What a configuration of another framework does not say."""
ASSUMED = re.compile(
    "micro-batch|samples have all their tokens|no block is recomputed, which the script says"
)
"""What no configuration says: samples of a plan are as long as it says."""
FINE_TUNERS = {"axolotl", "llama-factory", "trl"}
"""Whose files of others are in docs/results/inputs.md."""
UNSAID = {
    "deepspeed": {"recompute", "rates", "seed"},
    "accelerate": {"micro_batch", "training"},
    "fsdp": {"rates"},
}
"""What the training script says instead (`in_the_script`)."""
RATES = {"warmup_steps", "rate_schedule", "rate_steps", "decay_steps", "floor"}


def said(plan: Plan, of: str) -> dict[str, object]:
    """Return what a framework's configuration can say of a plan."""
    unsaid = UNSAID.get(of, set())
    if of == "accelerate" and not plan.zero:
        unsaid = unsaid | {"recompute"}
    told = plan.model_dump(exclude={"stages", *OWN})
    if "rates" in unsaid:
        told["training"] = {k: v for k, v in told["training"].items() if k not in RATES}
    rates = told["training"]
    if rates.get("decay_steps") == rates.get("rate_steps", 0) - rates.get("warmup_steps", 0):
        # One that begins to fall behind its warm-up is a line.
        rates |= {"rate_schedule": "linear"}
        del rates["decay_steps"]
    if "training" in unsaid:
        del told["training"]
    if "micro_batch" in unsaid:
        del told["micro_batch"], told["micro_batches"]
    blocks = [
        [
            (item.layer, "" if "recompute" in unsaid else item.recompute)
            for item in stage.layers
            if item.layer.startswith("block")
        ]
        for stage in plan.stages
    ]
    return {**told, "blocks": blocks}


def read(text: str, of: str, plan: Plan) -> Imported:
    return import_plan(
        text,
        of,
        resolve_cluster(plan.cluster),
        model=MODEL,
        called=plan.cluster,
        seq_len=plan.seq_len,
        global_batch=plan.global_batch,
    )


@pytest.mark.spread(2)
@pytest.mark.parametrize("of", FRAMEWORKS)
def test_what_was_written_of_a_plan_is_read_back(of: str) -> None:
    for wide, _ in written(of)[:60]:
        # Ranks are counted by the cluster where a configuration does not say them.
        devices = wide.mesh.devices
        cluster = f"{devices}xh100-sxm-80gb" if devices <= 8 else f"{devices // 8}x8xh100-sxm-80gb"
        machine = resolve_cluster(cluster)
        if machine.devices != devices:
            continue
        plan = wide.model_copy(update={"cluster": cluster})
        text = configuration(plan, MODEL, of, machine)
        found = read(text, of, plan)
        assert said(found.plan, of) == said(plan, of), plan.layout.text()
        assert not found.not_understood
        assert [one for one in found.assumed if not ASSUMED.search(one)] == []


def asks_of(plan: Plan) -> tuple[int, ...]:
    layout = plan.layout
    return (
        *(layout.tensor, layout.pipeline, layout.context, layout.expert, layout.data),
        *(plan.zero, plan.micro_batch, plan.micro_batches),
    )


PUBLISHED = [
    *(("slurm", row) for row in public.MEGATRON),
    *(("megatron-bridge", row) for row in public.MEGATRON_BRIDGE),
    *(("torchtitan@0.2", row) for row in public.TORCHTITAN),
    *(("torchtitan", row) for row in public.TORCHTITAN_PYTHON),
    *(("deepspeed", row) for row in public.DEEPSPEED),
    *(("accelerate", row) for row in public.ACCELERATE),
    *(("transformers", row) for row in public.TRANSFORMERS),
    *(("nanotron", row) for row in public.NANOTRON),
    *(("fsdp", row) for row in public.FSDP),
]
KINDS = list(dict.fromkeys(of for of, _ in PUBLISHED))


def model_of(row: public.Row, folder: Path) -> ModelGraph | None:
    """Return the model that a row names; a configuration in JSON becomes a file first."""
    if row.model is None or not row.model.startswith("{"):
        return None if row.model is None else resolve_model(row.model)
    file = folder / "config.json"
    file.write_text(row.model)
    return resolve_model(str(file))


def imported_row(of: str, row: public.Row, folder: Path) -> tuple[Imported, ModelGraph]:
    """Read a published configuration as a plan of its model."""
    model = model_of(row, folder)
    found = import_plan(
        row.text,
        of,
        resolve_cluster(row.cluster),
        model=model,
        called=row.cluster,
        global_batch=48 * 64 if of == "accelerate" else None,
    )
    return found, model or resolve_model(found.plan.model.source)


@pytest.mark.spread(2)
@pytest.mark.parametrize("of", KINDS)
def test_published_configurations_are_read_and_priced(of: str, tmp_path: Path) -> None:
    for number, row in enumerate(row for kind, row in PUBLISHED if kind == of):
        found, model = imported_row(of, row, tmp_path)
        plan = found.plan
        if of == "accelerate":  # which says nothing of micro-batches but what it accumulates
            assert asks_of(plan)[:6] == row.asks[:6], row.source
            assert row.asks[6] in (0, plan.micro_batches), row.source
        else:
            assert asks_of(plan) == row.asks, row.source
        if number % 7 == 0:
            told = predict(plan, model, resolve_cluster(row.cluster))
            assert told.step_time_s > 0, row.source


def test_twenty_of_each_kind_were_published() -> None:
    assert {*KINDS, "megatron"} == ({*WRITTEN, "slurm"} & set(READERS)) - FINE_TUNERS
    for kind in KINDS:
        rows = [row for of, row in PUBLISHED if of == kind]
        assert len({row.source for row in rows}) >= 20, kind
        # Recipes that differ in data alone say the same here.
        assert len({(row.text, row.model, row.cluster) for row in rows}) >= 18, kind


@pytest.mark.spread(1)
@pytest.mark.parametrize("of", KINDS)
def test_compare_answers_for_a_published_configuration(of: str, tmp_path: Path) -> None:
    """The smallest one; `make matrix` compares all of them."""
    rows = (row for kind, row in PUBLISHED if kind == of)
    compare(of, min(rows, key=lambda row: resolve_cluster(row.cluster).devices), tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("of", "row"), PUBLISHED, ids=[row.source for _, row in PUBLISHED])
def test_compare_answers_for_every_published_configuration(
    of: str, row: public.Row, tmp_path: Path
) -> None:
    compare(of, row, tmp_path)


def compare(of: str, row: public.Row, folder: Path) -> None:
    """Hold a published configuration against the best of its job."""
    found, _ = imported_row(of, row, folder)
    try:
        told = commands.compare_best(found.plan)
    except NoPlanFits as error:  # an answer too: the closest, or why the framework has none
        assert "The closest" in str(error) or "can run none of" in str(error), row.source
        return

    assert told.best.prediction.fits
    saved = sum(change.saved_s for change in told.changes)
    gained = told.prediction.step_time_s - told.best.prediction.step_time_s
    assert saved == pytest.approx(gained, abs=1e-9 * told.prediction.step_time_s), row.source
    if told.prediction.fits:
        faster = told.best.prediction.step_time_s <= told.prediction.step_time_s * (1 + 1e-9)
        assert faster or "not searched" in " ".join(told.warnings), row.source


def test_a_script_s_variables_arrays_defaults_and_sums_are_put_in() -> None:
    text = """
    GPUS=8; # a comment
    NODES=${NNODES:-2}
    WORLD=$(( $GPUS * NODES ))
    ARGS=(
      --micro-batch-size 1   # one
      --global-batch-size $((WORLD * 4))
    )
    EXTRA="--bf16 \\
       --seq-length 2048"
    OMP_NUM_THREADS=1 torchrun --nproc_per_node $GPUS pretrain_gpt.py "${ARGS[@]}" $EXTRA
    """.replace("GPUS=8;", "GPUS=8")

    told = shell.flags(shell.words(text))

    assert told["micro-batch-size"] == "1"
    assert told["global-batch-size"] == "64"
    assert told["bf16"] is True
    assert told["seq-length"] == "2048"


def test_nothing_of_a_python_configuration_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = (
        f"import pathlib\npathlib.Path({str(mark)!r}).write_text('ran')\n"
        "def planned(config):\n    config.parallelism.tensor_parallel_degree = 2\n"
        f"    config.training.seq_len = pathlib.Path({str(mark)!r}).write_text('x')\n"
    )
    for of in ("torchtitan", "fsdp"):
        try:
            found = import_plan(text, of, resolve_cluster("8xh100-sxm-80gb"), model=MODEL)
        except DocumentError:
            continue
        assert found.plan.mesh.tensor == 2
        assert "training.seq_len" in found.not_understood
    assert not mark.exists()


def test_a_model_is_known_by_its_figures_experts_among_them() -> None:
    dense = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    dense += "--group-query-attention --num-query-groups 8 --micro-batch-size 1 --bf16 "
    machine = resolve_cluster("8xh100-sxm-80gb")

    llama = import_plan(dense, "megatron", machine)
    mixtral = import_plan(dense + "--num-experts 8 --moe-router-topk 2", "megatron", machine)

    assert llama.plan.model.name == "llama-3-8b"
    assert "mistral-7b" in " ".join(llama.assumed)
    assert mixtral.plan.model.name == "mixtral-8x7b"
    with pytest.raises(DocumentError, match="name it with --model"):
        import_plan(dense.replace("4096", "4095"), "megatron", machine)
    with pytest.raises(DocumentError, match=r"hidden_size 4096, and llama-3\.2-1b has"):
        import_plan(dense, "megatron", machine, model=MODEL)


def test_megatron_gathers_in_16_bits_what_no_flag_says_to_gather_in_8() -> None:
    machine = resolve_cluster("8xh100-sxm-80gb")
    flags = "--bf16 --fp8-format hybrid --micro-batch-size 1 --global-batch-size 64 "
    flags += "--seq-length 4096 --tensor-model-parallel-size 2 --use-distributed-optimizer "
    narrow = "--fp8-param-gather"

    wide = import_plan(flags, "megatron", machine, model=MODEL)
    told = import_plan(flags + narrow, "megatron", machine, model=MODEL)

    assert (wide.plan.framework, told.plan.framework) == ("megatron+16-bit-gathers", "megatron")
    assert narrow not in configuration(wide.plan, MODEL, "megatron")
    assert narrow in configuration(told.plan, MODEL, "megatron")


@pytest.mark.parametrize(
    ("modules", "option", "not_understood"),
    [
        ("", "", ()),
        (" core_attn", "", ()),
        (
            " mla_up_proj moe_act layernorm",
            "+recompute-layernorm+recompute-mla-up-proj+recompute-moe-act",
            (),
        ),
        (" layernorm", "+recompute-layernorm", ()),
        (" mlp core_attn", "+recompute-core-attn+recompute-mlp", ()),
        (" mlp mhc", "+recompute-mlp", ("--recompute-modules=['mlp', 'mhc']",)),
    ],
)
def test_megatron_recomputes_the_modules_that_are_named(
    modules: str, option: str, not_understood: tuple[str, ...]
) -> None:
    flags = "--bf16 --micro-batch-size 1 --global-batch-size 64 --seq-length 4096"
    flags += " --recompute-granularity selective"
    flags += f" --recompute-modules{modules}" if modules else ""

    found = import_plan(flags, "megatron", resolve_cluster("8xh100-sxm-80gb"), model=MODEL)

    assert found.plan.framework == f"megatron{option}"
    assert found.not_understood == not_understood


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama-3.1-8b", "layernorm"),
        ("mixtral-8x7b", "layernorm moe_act"),
        ("deepseek-v3", "layernorm mla_up_proj moe_act"),
    ],
)
def test_what_is_cheap_to_recompute_is_exported_by_its_modules(name: str, modules: str) -> None:
    model, machine = resolve_model(name), resolve_cluster("8xh100-sxm-80gb")
    flags = "--bf16 --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 "
    flags += f"--recompute-granularity selective --recompute-modules {modules}"

    plan = import_plan(flags, "megatron", machine, model=model).plan

    assert f"--recompute-modules {modules}\n" in configuration(plan, model, "megatron")
    bridge = yaml.safe_load(configuration(plan, model, "megatron-bridge"))
    assert bridge["model"]["recompute_modules"] == modules.split()


@pytest.mark.parametrize(
    ("of", "text", "message"),
    [
        ("megatron", "--tensor-model-parallel-size many", "is 'many'; it is a whole number"),
        ("megatron", "--tensor-model-parallel-size 3", "does not divide 8 ranks"),
        ("megatron", "--micro-batch-size 1 --global-batch-size 12", "global_batch: is 12"),
        ("megatron", "--pipeline-model-parallel-size 0 --micro-batch-size 1", "pipeline"),
        ("deepspeed", "{", "is no JSON"),
        ("deepspeed", '{"zero_optimization": {"stage": 7}}', "is 7; it is 0, 1, 2 or 3"),
        ("torchtitan", "[training", "is neither TOML"),
        ("nanotron", "parallelism: {pp_engine: other}", "is 'other'; it is 1f1b or afab"),
        ("fsdp", "x = 1", "has no REPLICAS"),
        ("fsdp", "REPLICAS, SHARDS = 1, 8\nRECOMPUTED = ran(4)", r"RECOMPUTED is ran\(4\); it is"),
        ("fsdp", "REPLICAS, SHARDS = 1, 8\nRECOMPUTED = range(10**12)", r"RECOMPUTED is range\(10"),
        (
            "fsdp",
            "REPLICAS, SHARDS = 1, 8\nRECOMPUTED = range(1000000000000000000000000000000)",
            "RECOMPUTED is",
        ),
        ("fsdp", "REPLICAS, SHARDS = 1, 8\nRECOMPUTED = ('a', 1)", "RECOMPUTED is"),
        ("accelerate", "distributed_type: TPU", "is 'TPU', which is not read"),
        ("slurm", "echo hello", "runs no command that is known"),
        ("megatrn", "", "megatron"),
    ],
)
def test_what_is_no_configuration_is_refused_in_words(of: str, text: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        import_plan(text, of, resolve_cluster("8xh100-sxm-80gb"), model=MODEL)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(READERS)), st.text(max_size=200), st.integers(0, 40))
def test_any_text_is_read_or_refused(of: str, text: str, at: int) -> None:
    rows = {kind: row.text for kind, row in PUBLISHED}
    base = rows.get(of, "")
    for one in (text, base[: at * 10] + text + base[at * 10 :]):
        try:
            import_plan(one, of, resolve_cluster("8xh100-sxm-80gb"), model=MODEL)
        except DocumentError as error:
            assert str(error)


@pytest.mark.matrix
def test_compare_says_what_each_change_is_worth(tmp_path: Path) -> None:
    row = next(one for one in public.MEGATRON if one.model == "llama-3-8b")
    file = tmp_path / "plan.yaml"
    machine, model = resolve_cluster(row.cluster), resolve_model(row.model or "")
    own = import_plan(row.text, "slurm", machine, model=model, called=row.cluster)
    write(own.plan, file)

    told = commands.compare_best(str(file))

    steps = [told.prediction.step_time_s, *(one.prediction.step_time_s for one in told.changes)]
    saved = [one.saved_s for one in told.changes]
    assert saved == pytest.approx([a - b for a, b in pairwise(steps)])
    assert sum(saved) == pytest.approx(
        told.prediction.step_time_s - told.best.prediction.step_time_s
    )
    for change in told.changes:  # each is a plan of the same job, priced as any other
        assert change.plan.job == told.mine.job
        again = predict(change.plan, model, machine)
        assert again.step_time_s == pytest.approx(change.prediction.step_time_s)
