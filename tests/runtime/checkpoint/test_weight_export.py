"""What is exported, transformers loads; and it computes what was trained, to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from meshwright.cli import main
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError
from meshwright.runtime.checkpoint.checkpoint import Progress, load
from meshwright.runtime.checkpoint.tokenizer_files import tokenizer_files
from meshwright.runtime.checkpoint.weight_export import to_huggingface
from meshwright.runtime.checkpoint.writer import Saver
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.tracing.stage import MicroBatch
from tests.runtime import cases, chats
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
TIED = {"tied_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, zero 3": ("llama", {}, {"data_shard": 2, "zero": 3}),
    "qwen3, tied, pipeline": ("qwen3", TIED, {"pipeline": 2}),
    "gpt2, tied, pipeline": ("gpt2", {}, {"pipeline": 2}),
    "mixtral, tensor": ("mixtral", {}, {"tensor": 2}),
    "qwen3_moe, pipeline": ("qwen3_moe", {}, {"pipeline": 2}),
}


def progress(plan: Plan, model: ModelGraph) -> Progress:
    return Progress(
        step=2,
        sample=2 * plan.global_batch,
        epoch=0,
        seq_len=plan.seq_len,
        seed=plan.training.seed,
        model=model.name,
        model_digest=model.digest,
        plan_digest=plan.digest,
        corpus="none",
        corpus_digest="none",
        loss=0.0,
    )


def train_and_save(plan: Plan, model: ModelGraph, folder: str) -> float:
    """Return the loss after two steps on a batch that was not trained on."""
    engine = token_engine(plan, model, device=CPU)
    for step in range(2):
        engine.step(own(engine, step))
    saver = Saver(Path(folder), plan=plan, model=model, run="r", config=engine.configuration())
    saver.begin(engine.state(), progress(plan, model))
    saver.finish()
    return engine.evaluate(own(engine, 7)).loss


def own(engine: Engine, step: int) -> torch.Tensor:
    return cases.global_tokens(step).chunk(engine.slices)[engine.slice_rank]


def first_loss(plan: Plan, model: ModelGraph, weights: Path) -> float:
    engine = token_engine(plan, model, device=CPU, weights=weights)
    return engine.evaluate(own(engine, 7)).loss


@pytest.mark.spread(1)
@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_the_library_computes_what_was_trained(name: str, tmp_path: Path) -> None:
    family, changes, layout = CASES[name]
    model = cases.transformer(family, **changes)
    plan = cases.plan(model, **layout)

    trained = on_ranks(2, train_and_save, plan, model, str(tmp_path / "saved"))
    exported = to_huggingface(tmp_path / "saved", tmp_path / "out", file_bytes=40_000)

    library = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    alone = token_engine(cases.plan(model), model, device=CPU)
    load(tmp_path / "saved" / "step-000002", alone.state())
    tokens = cases.global_tokens(7)
    with torch.no_grad():
        logits = library(tokens[:, :-1]).logits
        ours = alone._parts[0].module(micro=MicroBatch((tokens[:, :-1], tokens[:, 1:])))
    assert type(library).__name__ == exported_class(family)
    assert torch.allclose(logits, ours, rtol=1e-4, atol=1e-5)
    assert cases.library_loss(library, tokens).item() == pytest.approx(trained[0], rel=1e-5)
    assert exported.parameters == model.parameters
    assert len([file for file in exported.files if file.endswith(".safetensors")]) > 1


@pytest.mark.long("mixtral, tensor")
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["mixtral, tensor", "qwen3_moe, pipeline"])
@pytest.mark.matrix
def test_published_experts_are_read_part_by_part(name: str, tmp_path: Path) -> None:
    family, changes, layout = CASES[name]
    model = cases.transformer(family, **changes)
    trained = on_ranks(
        2, train_and_save, cases.plan(model, **layout), model, str(tmp_path / "saved")
    )
    to_huggingface(tmp_path / "saved", tmp_path / "out", file_bytes=40_000)
    library = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    library.save_pretrained(tmp_path / "library", max_shard_size="40KB")

    for folder in (tmp_path / "out", tmp_path / "library"):
        for again in ({"tensor": 2}, {"data_shard": 2, "zero": 3}):
            losses = on_ranks(2, first_loss, cases.plan(model, **again), model, folder)
            assert losses == pytest.approx(trained, rel=1e-5), (folder.name, again)


def exported_class(family: str) -> str:
    names = {"llama": "Llama", "qwen3": "Qwen3", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
    return "GPT2LMHeadModel" if family == "gpt2" else f"{names[family]}ForCausalLM"


def saved_alone(family: str, folder: Path) -> ModelGraph:
    model = cases.transformer(family)
    on_ranks(1, train_and_save, cases.plan(model), model, str(folder))
    return model


def test_sixteen_bits_take_half_the_room(tmp_path: Path) -> None:
    saved_alone("llama", tmp_path / "saved")

    exported = to_huggingface(tmp_path / "saved", tmp_path / "out", dtype="bf16")

    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as opened:
        tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors) == exported.parameters
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    saved_alone("reference", tmp_path / "reference")
    saved_alone("llama", tmp_path / "llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").touch()

    with pytest.raises(LaunchError, match="which transformers does not have"):
        to_huggingface(tmp_path / "reference", tmp_path / "out")
    with pytest.raises(LaunchError, match="nowhere: is no complete checkpoint"):
        to_huggingface(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(LaunchError, match="full: is no complete checkpoint"):
        to_huggingface(tmp_path / "full", tmp_path / "out")
    with pytest.raises(LaunchError, match="full: is there already"):
        to_huggingface(tmp_path / "llama", tmp_path / "full")
    (file,) = (tmp_path / "llama" / "step-000002").glob("*.bin")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(LaunchError, match=r"rank-00000\.bin: has \d+ bytes, and \d+ were written"):
        to_huggingface(tmp_path / "llama" / "step-000002", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved_alone("gpt2", tmp_path / "saved")
    source, target = str(tmp_path / "saved"), str(tmp_path / "out")

    assert main(["export", source, "--to", "huggingface", "-o", target, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    assert (told["step"], told["parameters"]) == (2, model.parameters)
    assert sorted(told["files"]) == sorted(path.name for path in Path(target).iterdir())
    assert main(["export", source, "--to", "onnx", "-o", target]) == 1
    assert (
        "to is 'onnx'; a checkpoint is exported to huggingface, its adapters to peft"
        in capsys.readouterr().err
    )


def test_tokenizer_and_generation_config_are_exported_as_the_library_reads_them(
    tmp_path: Path,
) -> None:
    """From the folder that made the tokens, wherever the model is from; weights give the rest."""
    chats.save_tokenizer(tmp_path / "tokenizer")
    weights = tmp_path / "weights"
    GenerationConfig(max_new_tokens=7, temperature=0.5, do_sample=True).save_pretrained(weights)
    chats.save_tokenizer(weights, template="{{ 'another' }}")
    graph = cases.transformer("llama")
    beside = tokenizer_files(tmp_path / "tokenizer", weights)
    on_ranks(1, save_with_companions, graph, str(tmp_path / "saved"), beside)

    result = to_huggingface(tmp_path / "saved", tmp_path / "out")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == chats.TEMPLATE
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 7
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= set(result.files)
    (tmp_path / "saved" / "step-000002" / "tokenizer.json").write_text("{}")
    with pytest.raises(LaunchError, match=r"tokenizer\.json"):
        to_huggingface(tmp_path / "saved", tmp_path / "again")


def save_with_companions(graph: ModelGraph, folder: str, companions: dict[str, Path]) -> None:
    made = cases.plan(graph)
    engine = token_engine(made, graph, device=CPU)
    saver = Saver(
        Path(folder),
        plan=made,
        model=graph,
        run="test",
        config=engine.configuration(),
        companions=companions,
    )
    saver.begin(engine.state(), progress(made, graph))
    saver.finish()
