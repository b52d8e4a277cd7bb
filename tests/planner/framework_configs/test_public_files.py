"""Kinds of files that the repositories of frameworks have, retyped as short equivalents."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meshwright.api import commands
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents import document
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ways
from meshwright.planner.framework_configs.readers import shell
from meshwright.planner.framework_configs.readers.adapter_targets import modules_of

MEGATRON_SFT = """
NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --save_safetensors true \\
    --tensor_model_parallel_size 2 --sequence_parallel true --max_length 4096 {more}
"""


def imported(tmp_path: Path, text: str, of: str, name: str = "run.sh", **options: object):  # type: ignore[no-untyped-def]
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    options = {"cluster": "8xh100-sxm-80gb"} | options
    return commands.import_plan(str(file), of=of, **options)  # type: ignore[arg-type]


def test_a_trainer_on_megatron_has_its_own_defaults(tmp_path: Path) -> None:
    plan = imported(tmp_path, MEGATRON_SFT.format(more=""), "ms-swift").plan

    assert plan.model.name == "qwen3-8b"
    assert (plan.zero, plan.precision, plan.stages[0].layers[1].recompute) == (
        1,
        "bf16",
        "selective",
    )
    assert (plan.micro_batch, plan.global_batch, plan.seq_len) == (1, 16, 4096)
    assert {"fa2", "fused-cross-entropy"} <= set(plan.framework.split("+"))


def test_what_such_a_trainer_is_given_goes_before_its_defaults(tmp_path: Path) -> None:
    more = (
        "--tuner_type lora --lora_rank 16 --target_modules all-linear --micro_batch_size 2 "
        "--use_distributed_optimizer false --recompute_granularity none --attention_backend auto"
    )
    plan = imported(tmp_path, MEGATRON_SFT.format(more=more), "slurm").plan

    assert plan.training.lora is not None
    assert (plan.training.lora.rank, plan.training.lora.alpha) == (16, 32.0)
    assert (plan.zero, plan.stages[0].layers[1].recompute, plan.micro_batch) == (0, "none", 2)
    assert "fa2" not in plan.framework
    assert "adapter-dropout" in plan.framework  # 0.05 by default


@pytest.mark.parametrize("of", ["ms-swift", "llama-factory", "axolotl", "trl"])
def test_a_script_is_read_by_its_command_whatever_the_framework_is(tmp_path: Path, of: str) -> None:
    text = """#!/bin/bash
swift sft --model Qwen/Qwen3-8B --tuner_type full --torch_dtype bfloat16 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps $(expr 16 / 8) --deepspeed zero3
"""

    plan = imported(tmp_path, text, of).plan

    assert (plan.zero, plan.micro_batch, plan.micro_batches) == (3, 2, 2)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("swift infer --model Qwen/Qwen3-8B --stream true", "swift infer"),
        ("megatron export --model Qwen/Qwen3-8B --to_mcore true", "megatron export"),
        ("llamafactory-cli chat examples/qwen3.yaml", "llamafactory-cli chat"),
        ("python -m axolotl.cli.preprocess config.yml", "axolotl.cli.preprocess"),
        ("torchrun --nproc_per_node 8 run_text_generation.py --tp 8", "run_text_generation.py"),
    ],
)
def test_a_command_that_trains_nothing_is_refused_by_its_words(
    tmp_path: Path, command: str, shown: str
) -> None:
    with pytest.raises(DocumentError, match=f"runs '{shown}', which trains nothing"):
        imported(tmp_path, f"#!/bin/sh\n{command}\n", "slurm")


def test_a_script_that_serves_what_it_has_trained_is_its_training(tmp_path: Path) -> None:
    text = "swift sft --model Qwen/Qwen3-8B --max_length 2048\nswift infer --adapters output\n"

    assert imported(tmp_path, text, "slurm").plan.seq_len == 2048


def test_a_command_of_a_package_is_known_by_its_path(tmp_path: Path) -> None:
    text = "accelerate launch --num_processes 8 src/swift/cli/sft.py --model Qwen/Qwen3-8B --x 1"

    plan = imported(tmp_path, f"#!/bin/bash\n{text}\n", "slurm").plan

    assert plan.training.lora is not None  # by default
    assert plan.not_understood == ("x",)


@pytest.mark.parametrize(
    "words", ["16 / 3", "3 + 4 * 2", "( 3 + 4 ) * 2", "7 % 4 - 5", "-7 / 2", "0 + 0"]
)
def test_whole_numbers_are_computed_as_expr_does(words: str) -> None:
    quoted = words.replace("*", "\\*").replace("(", "\\(").replace(")", "\\)")
    theirs = subprocess.run(
        ["bash", "-c", f"expr {quoted}"], capture_output=True, text=True, check=False
    )

    [way] = ways(f"python train.py --n $(expr {quoted})")

    assert way.commands[0][-1] == theirs.stdout.strip()


def test_a_trainer_beside_megatron_is_megatron(tmp_path: Path) -> None:
    text = """
model_name_or_path: Qwen/Qwen3-30B-A3B-Instruct-2507
do_train: true
stage: sft
finetuning_type: full
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
tensor_model_parallel_size: 1
pipeline_model_parallel_size: 2
expert_model_parallel_size: 4
use_distributed_optimizer: true
recompute_granularity: full
recompute_method: uniform
recompute_num_layers: 1
moe_grouped_gemm: true
moe_token_dispatcher_type: alltoall
"""
    plan = imported(tmp_path, text, "llama-factory", "run.yaml").plan

    assert plan.framework.startswith("megatron")
    assert (plan.mesh.pipeline, plan.mesh.expert, plan.zero) == (2, 4, 1)
    assert (plan.micro_batch, plan.micro_batches, plan.seq_len) == (1, 8, 4096)


def test_settings_of_the_next_trainer_are_read(tmp_path: Path) -> None:
    text = """
model: Qwen/Qwen3-4B
model_class: llm
peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all}
kernel_config: {name: auto}
dist_config: {name: fsdp2, dcp_path: null}
train_dataset: data/demo.yaml
micro_batch_size: 2
cutoff_len: 2048
"""
    imported_plan = imported(tmp_path, text, "llama-factory", "v1.yaml")
    plan = imported_plan.plan

    assert (plan.model.name, plan.zero, plan.micro_batch) == ("qwen3-4b", 3, 2)
    assert plan.training.lora is not None and plan.training.lora.rank == 16
    assert "adapter-dropout" in plan.framework
    assert [word.partition("=")[0] for word in imported_plan.not_understood] == ["kernel_config"]


def test_a_file_that_is_named_from_the_root_of_a_repository_is_found(tmp_path: Path) -> None:
    (tmp_path / "examples/deepspeed").mkdir(parents=True)
    zero = tmp_path / "examples/deepspeed/ds_z3.json"
    zero.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}')
    text = (
        "{model_name_or_path: Qwen/Qwen3-8B, do_train: true, finetuning_type: full, bf16: true, "
        "deepspeed: examples/deepspeed/ds_z3.json}"
    )

    assert imported(tmp_path, text, "llama-factory", "examples/full/run.yaml").plan.zero == 3

    zero.unlink()
    with pytest.raises(DocumentError, match="is not beside this file"):
        imported(tmp_path, text, "llama-factory", "examples/full/run.yaml")


def test_all_arguments_of_a_script_are_set_at_once(tmp_path: Path) -> None:
    text = """#!/bin/bash
if [ $2 = 8B ]; then SHAPE="--num-layers 32 --hidden-size 4096 --num-attention-heads 32"; fi
if [ $2 = 1B ]; then SHAPE="--num-layers 16 --hidden-size 2048 --num-attention-heads 32"; fi
torchrun --nproc_per_node $1 pretrain_gpt.py $SHAPE --group-query-attention --swiglu \\
    --num-query-groups 8 --micro-batch-size 1 --global-batch-size 64 --seq-length $3 --bf16
"""
    plan = imported(tmp_path, text, "megatron", values=["@=8 8B 2048"], model="llama-3.1-8b").plan

    assert plan.seq_len == 2048

    with pytest.raises(DocumentError, match="close the quote"):
        imported(tmp_path, text, "megatron", values=["@=8 '8B"])


OWN = """#!/bin/bash
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers {layers} --hidden-size 4096 --swiglu \\
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 \\
    --ffn-hidden-size 14336 --disable-bias-linear --normalization RMSNorm \\
    --position-embedding-type rope --untie-embeddings-and-output-weights \\
    --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16 \\
    --use-distributed-optimizer {more}
"""


def test_a_model_of_arguments_alone_is_planned_and_kept(tmp_path: Path) -> None:
    """Against the same blocks as Hugging Face's configuration describes them."""
    llama = resolve_model("llama-3.1-8b")
    block = next(layer.parameters for layer in llama.layers if layer.kind == "block")
    more = "--tokenizer-type NullTokenizer --vocab-size 128256"
    answer = imported(tmp_path, OWN.format(layers=20, more=more), "megatron", output=None)
    file = tmp_path / "plan.yaml"
    document.write(answer.plan, str(file))

    graph = answer.plan.model.graph

    assert graph is not None
    assert graph.parameters == llama.parameters - 12 * block
    assert any("by the figures of this file" in text for text in answer.assumed)
    again = commands.predict(str(file))
    assert again.step_time_s == answer.prediction.step_time_s
    assert document.read(Plan, file).model == answer.plan.model


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ("", "add --vocab-size"),
        ("--vocab-size 128256 --hybrid-override-pattern MMM*", "name it with --model"),
        ("--vocab-size 128256 --spec a b", "name it with --model"),
    ],
)
def test_figures_that_leave_a_model_open_are_no_model(
    tmp_path: Path, more: str, match: str
) -> None:
    with pytest.raises(DocumentError, match=match):
        imported(tmp_path, OWN.format(layers=20, more=more), "megatron")


def test_figures_are_no_name_of_a_model() -> None:
    with pytest.raises(DocumentError, match="give the plan of its import"):
        commands.plan("figures:megatron-20x4096", "8xh100-sxm-80gb")


def test_a_pattern_of_modules_is_what_peft_takes_it_for() -> None:
    assert modules_of(r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|q)_proj") == [
        "q_proj",
        "up_proj",
    ]
    assert modules_of(r"model.layers.(0|1).mlp.up_proj") is None  # some blocks alone
    assert modules_of("(a+)+$") is None  # what would match for very long
    assert modules_of("[") is None


@pytest.mark.parametrize(
    ("text", "is_script"),
    [
        ("CUDA_VISIBLE_DEVICES=0 \\\nswift sft \\\n    --model x\n", True),
        ("#!/usr/bin/env bash\nset -e\n", True),
        ("swift sft config.yaml\n", True),
        ("# a comment\nmodel: x\n", False),
        ('{"train": "--x"}', False),
        ("from x import y\nparser.add_argument('--a') \\\n", False),
        ("[project]\nrun = 'python -m x --y'\n", False),
    ],
)
def test_scripts_are_told_from_documents(text: str, is_script: bool) -> None:
    assert shell.is_script(text) is is_script


VERL = {
    "ppo.yaml": """
defaults: [actor@actor_rollout_ref.actor: megatron_actor, _self_]
actor_rollout_ref: {model: {path: Qwen/Qwen3-8B}}
data: {train_batch_size: 64, max_prompt_length: 512, max_response_length: 512}
trainer: {n_gpus_per_node: 8, nnodes: 1}
""",
    "actor/megatron_actor.yaml": """
defaults: [../engine@megatron: megatron, actor, _self_]
strategy: megatron
""",
    "actor/actor.yaml": "{ppo_mini_batch_size: 64, ppo_micro_batch_size_per_gpu: 2}",
    "engine/megatron.yaml": "{tensor_model_parallel_size: 4, pipeline_model_parallel_size: 1}",
}


def test_files_that_complete_a_configuration_are_read_or_asked_for(tmp_path: Path) -> None:
    for name, text in VERL.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    plan = imported(tmp_path, VERL["ppo.yaml"], "verl", "ppo.yaml").plan

    assert plan.framework.startswith("megatron")
    assert (plan.mesh.tensor, plan.micro_batch) == (4, 2)

    (tmp_path / "engine/megatron.yaml").unlink()
    with pytest.raises(DocumentError, match=r"names 'engine/megatron.yaml', which is not beside"):
        imported(tmp_path, VERL["ppo.yaml"], "verl", "ppo.yaml")


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ("{override /actor: dp_actor}", "is not followed; give the composed configuration"),
        ("{actor: 7}", "an entry is GROUP: NAME"),
    ],
)
def test_what_completes_a_configuration_otherwise_is_refused(
    tmp_path: Path, entry: str, match: str
) -> None:
    with pytest.raises(DocumentError, match=match):
        imported(tmp_path, f"defaults: [{entry}]\n", "verl", "ppo.yaml")


@pytest.mark.parametrize("choice", ["--config-name=ppo_megatron_trainer", "model_engine=megatron"])
def test_a_set_of_settings_decides_how_an_actor_is_trained(tmp_path: Path, choice: str) -> None:
    text = f"""#!/bin/bash
python3 -m verl.trainer.main_ppo {choice} \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B data.train_batch_size=64 trainer.nnodes=1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.n_gpus_per_node=8 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
"""
    plan = imported(tmp_path, text, "verl").plan

    assert plan.framework.startswith("megatron") and plan.mesh.tensor == 2


def test_settings_of_another_trainer_are_no_actor(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="has no section actor_rollout_ref"):
        imported(tmp_path, "data: {train_batch_size: 8}", "verl", "sft.yaml")


@pytest.mark.parametrize(
    "source",
    [
        'source "$(dirname "$0")/conf/sizes.sh"',
        'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"; . "$HERE/conf/sizes.sh"',
        "source `pwd`/conf/sizes.sh",
        "source ${BASH_SOURCE%/*}/conf/sizes.sh",
    ],
)
def test_a_script_finds_what_stands_beside_it(tmp_path: Path, source: str) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/sizes.sh").write_text("LENGTH=2048\n")
    text = f"#!/bin/bash\n{source}\nswift sft --model Qwen/Qwen3-8B --max_length $LENGTH\n"

    assert imported(tmp_path, text, "slurm").plan.seq_len == 2048


def test_a_folder_that_is_not_the_script_s_is_not_looked_into(tmp_path: Path) -> None:
    (tmp_path / "sizes.sh").write_text("LENGTH=2048\n")
    text = (
        "#!/bin/bash\nsource $WHERE/sizes.sh\nswift sft --model Qwen/Qwen3-8B --max_length 1024\n"
    )

    assert "sizes.sh" in " ".join(imported(tmp_path, text, "slurm").not_understood)
