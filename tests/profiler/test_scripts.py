"""A module that a script builds is measured from its file, planned with that, and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.api import commands
from meshwright.api.inputs import model_of
from meshwright.planner.documents.document import write
from meshwright.planner.documents.profile import Birth, Profile
from meshwright.planner.errors import DocumentError
from meshwright.profiler import layers
from meshwright.profiler.chain import Case, Chain
from meshwright.runtime.engine.script_module import OwnScript
from meshwright.runtime.engine.user_code import trains_in_script

CPU = torch.device("cpu")
SCRIPT = """
import meshwright
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(12, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, pixels):
        x = self.frozen(pixels.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch():
    return torch.randn(6, 3, 4), torch.arange(6) %% 5


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def optimizer(groups):
    return torch.optim.SGD(groups, lr=0.1)


def main():
    meshwright.Engine(Net, loss=loss, optimizer=optimizer, batch=batch())


%s
"""
GUARD = 'if __name__ == "__main__":\n    main()'


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT % GUARD)
    return f"{tmp_path}/train.py:Net"


def test_each_kind_of_layer_is_measured_and_the_plan_is_made_with_that(
    source: str, tmp_path: Path
) -> None:
    script = OwnScript.of_file(source)
    model = script.graph()
    chain = Chain(model, seq_len=1, precision="fp32", device=CPU, script=script)
    case = Case(tensor=1, micro_batch=2, recompute="none")

    rows = layers.measurements([chain], [case], budget_s=0.0)

    traces = {layer.kind: layer.trace for layer in model.layers}
    assert {row.kind for row in rows} == traces.keys()
    for row in rows:
        trace = traces[row.kind]
        assert row.forward_s > 0
        assert trace is not None
        # Autograd saves the inputs of Linears, which measured layers share with those before.
        assert 0 <= row.stored_bytes <= 2 * trace.stored_bytes
    birth = Birth(
        command="c", date="d", host="h", device="cpu", ranks=1, threads_per_rank=1, software={}
    )
    profile = Profile(model=model.name, model_digest=model.digest, birth=birth, layers=tuple(rows))
    write(profile, tmp_path / "profile.yaml")
    answer = commands.plan(
        source, "local:1", profile=f"{tmp_path}/profile.yaml", fix=["micro_batch=2"]
    )
    origins = {
        one.provenance
        for one in answer.prediction.assumptions
        if one.what.startswith("seconds and bytes of")
    }
    assert origins == {"fitted"}  # other ways to recompute than the measured one
    assert answer.plan.global_batch == 6
    assert answer.plan.batch is not None


@pytest.mark.matrix
def test_a_file_says_the_same_as_the_function(source: str) -> None:
    script = OwnScript.of_file(source)

    named = commands.plan(source, "local:2").plan
    given = meshwright.plan(
        script.build, "local:2", batch=script.batch, loss=script.loss, optimizer=script.optimizer
    )

    assert named.digest == given.digest
    assert named.model.source == "script:Net"
    assert model_of(source).optimizer_bytes == 0  # of plain SGD


@pytest.mark.matrix
def test_samples_of_ranks_and_of_large_micro_batches_are_those_of_the_example(source: str) -> None:
    script = OwnScript.of_file(source)
    chain = Chain(script.graph(), seq_len=1, precision="bf16", device=CPU, script=script)

    _, given = chain.batch(8)

    assert given[0].dtype == torch.bfloat16
    assert torch.equal(given[0][6], given[0][0])
    assert given[1].tolist() == [0, 1, 2, 3, 4, 0, 0, 1]


@pytest.mark.parametrize(
    ("text", "trains"),
    [
        ("batch = 1", True),
        ("def batch(): ...", True),
        ("batch: object = 1", True),
        ("a, (batch, c) = 1, (2, 3)", True),
        ("from data import example as batch", True),
        ("def f():\n    batch = 1", False),
        ("print(batch)", False),
        ("batch = (", False),
    ],
)
def test_a_batch_of_the_file_makes_it_a_script(tmp_path: Path, text: str, trains: bool) -> None:
    (tmp_path / "mine.py").write_text(text)

    assert trains_in_script(f"{tmp_path}/mine.py:build") is trains


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("main()", r"makes an Engine when it is imported; put what trains under if __name__"),
        ("del loss", "has no function 'loss'"),
        ("raise ValueError('x')", "raised ValueError: x"),
        ("def batch(): raise KeyError('k')", "raised KeyError: 'k'"),
    ],
)
def test_a_file_that_does_not_say_what_it_must_is_refused(
    tmp_path: Path, wrong: str, said: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT % wrong)

    with pytest.raises(DocumentError, match=said):
        OwnScript.of_file(f"{tmp_path}/train.py:Net")


def test_what_is_not_of_a_script_is_refused(source: str) -> None:
    with pytest.raises(DocumentError, match="seq-len: is given by the shapes"):
        commands.plan(source, "local:1", seq_len=8)
    with pytest.raises(DocumentError, match="framework: is megatron"):
        commands.plan(source, "local:1", framework="megatron")
    with pytest.raises(DocumentError, match="batch: goes with a function"):
        meshwright.plan("gpt2-small", batch=torch.zeros(2))
