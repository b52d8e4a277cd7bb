"""Conversations from file to weights: as transformers and peft train them, and resumed alike."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

from meshwright.planner.errors import LaunchError
from meshwright.runtime.launch import launch as launching
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.launch_options import LaunchRun
from tests.runtime.library_rows import OnCrew
from tests.runtime.ranks import Crew

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat_fine_tuning.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chat_fine_tuning", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: ModuleType) -> Iterator[None]:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    example.make_model(tmp_path / "model")
    example.plain(tmp_path / "model")  # so that ranks are forked from a process that has it loaded
    with Crew(2) as crew:
        monkeypatch.setattr(launching, "supervise", OnCrew(crew))
        yield
    torch.set_num_threads(threads)


@pytest.mark.matrix
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.usefixtures("ranks")
def test_the_example_trains_like_peft_and_goes_on_where_it_stopped(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = example.compare(tmp_path / "example")

    assert set(found) == {"replicated", "ZeRO-3", "two stages"}
    assert max(found.values()) < 1e-5, found
    told = capsys.readouterr().err
    assert "16 conversations in 8 samples of 96 tokens" in told
    assert "<|assistant|>[[No, it does not.<|end|>]]<|user|>" in told

    # The adapters' folder has the tokenizer and its template beside them.
    exported = tmp_path / "example" / "1" / "adapters"
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    original = transformers.AutoTokenizer.from_pretrained(tmp_path / "example" / "model")
    talk = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]
    assert tokenizer.apply_chat_template(talk) == original.apply_chat_template(talk)

    (tmp_path / "text.txt").write_text("All happy families are alike.")
    with pytest.raises(LaunchError, match="has text, and training is on conversations"):
        launching.launch(
            Launch(
                tmp_path / "example" / "0" / "plan.yaml",
                LaunchRun(
                    data=tmp_path / "example" / "model" / "chat.jsonl",
                    evaluate=tmp_path / "text.txt",
                    output=tmp_path / "refused",
                ),
                device="cpu",
                quiet=True,
            )
        )

    # Resumed under another plan, the last step is that of the run that did not stop.
    model, home = tmp_path / "example" / "model", tmp_path / "example"
    losses = []
    for plan, steps in (("0", 2), ("2", 3)):
        launching.launch(
            Launch(
                home / plan / "plan.yaml",
                LaunchRun(
                    data=model / "chat.jsonl",
                    weights=model,
                    steps=steps,
                    checkpoint=tmp_path / "stopped",
                    output=tmp_path / "out",
                    training=tuple(f"{key}={value}" for key, value in example.SETTINGS.items()),
                    resume=steps == 3,
                ),
                device="cpu",
                quiet=True,
            )
        )
        losses = [one.loss for one in run.read_records(run.metrics_file(tmp_path / "out"))]
    straight = [one.loss for one in run.read_records(run.metrics_file(home / "0" / "run"))]
    assert losses == pytest.approx(straight, rel=1e-6)
