"""Configurations of others are read within limits, whatever they say and in whatever language."""

from __future__ import annotations

import contextlib
import random
import time
import tracemalloc

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.import_plan import READERS, import_plan
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers import shell
from tests.meshwright import hostile, hostile_configurations

MODEL = resolve_model("gpt2")
CLUSTER = resolve_cluster("8xh100-sxm-80gb")
FSDP = "REPLICAS, SHARDS = 1, 8\n"


@pytest.mark.parametrize(
    "script",
    [
        "A=1234567890\n" + 'A+="$A$A"\n' * 60 + "torchrun pretrain_gpt.py $A",
        "A=xxxxxxxxxx\n" + 'A="$A$A$A$A"\n' * 40 + 'echo "$A"',
        "A=(a b)\n" + 'A+=("${A[@]}")\n' * 50,
        "A=x\n" + "A=${B:-$A$A$A}\n" * 60,
    ],
)
@pytest.mark.long("script2")
def test_variables_that_multiply_are_refused_within_their_budget(script: str) -> None:
    tracemalloc.start()
    with pytest.raises(DocumentError, match="once it is written out; shorten it"):
        shell.words(script)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most_bytes < 100 * 2**20


@pytest.mark.parametrize(
    ("of", "text", "message"),
    [
        ("fsdp", FSDP + "CLIP_NORM = 1" + "0" * 400, "more than 18 digits"),
        ("fsdp", FSDP + "SEQ_LEN = 'a'", "SEQ_LEN: is 'a'; it is a whole number"),
        ("fsdp", FSDP + "AdamW(betas=(1, 2, 3))", "betas: is .*; it is two numbers"),
        ("fsdp", FSDP + "x = a" + ".a" * 900, "is no Python module|nested more than"),
        ("fsdp", FSDP + "x = " + "-" * 90 + "1", "nested more than 60 deep"),
        ("fsdp", "# " + "x" * limits.MOST_CHARACTERS, "give at most 250,000"),
        ("torchtitan", "steps = 0x" + "f" * 9000, "more than 18 digits"),
        ("torchtitan", "steps = " + "9" * 9000, "is TOML that cannot be read"),
        ("torchtitan", "x = " + "[" * 200 + "]" * 200, "nested more than 60 deep"),
        ("torchtitan", "[optimizer]\nbetas = 7", "betas: is 7; it is two numbers"),
        ("torchtitan", "[optimizer]\nname = [1]", r"name: is \[1\]; it is one word"),
        ("torchtitan", "[training]\nlocal_batch_size = true", "is True; it is a whole number"),
        ("deepspeed", '{"train_batch_size": ' + "9" * 400 + "}", "more than 18 digits"),
        ("deepspeed", '{"gradient_clipping": Infinity}', "is infinite; it is a number"),
        ("transformers", "lr_scheduler_kwargs: '{broken'", "lr_scheduler_kwargs: is no JSON"),
        ("transformers", "{max_steps: 9, warmup_ratio: 1e300}", "it is a share from 0 to 1"),
        ("megatron", "--micro-batch-size", "is True; it is a whole number"),
        ("accelerate", "distributed_type: [1]", "it is one word"),
        ("nanotron", "parallelism: {dp: 1e999}", "it is a whole number"),
    ],
)
def test_what_no_configuration_says_is_refused_at_its_place(
    of: str, text: str, message: str
) -> None:
    with pytest.raises(DocumentError, match=message):
        import_plan(text, of, CLUSTER, model=MODEL)


def test_every_reader_is_attacked() -> None:
    assert set(hostile_configurations.PUBLISHED) == set(READERS)


@pytest.mark.parametrize("key", ["a" + ".a" * 100_000, '"a"' + ' . "b"' * 40_000])
@pytest.mark.parametrize("line", ["{} = 1", "[{}]", "x = {{{} = 1}}"])
def test_names_with_many_dots_are_refused_within_their_budget(line: str, key: str) -> None:
    tracemalloc.start()
    with pytest.raises(DocumentError, match="nested more than 60 deep"):
        import_plan(line.format(key), "torchtitan", CLUSTER, model=MODEL)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most_bytes < 20 * 2**20


UNITS = (" ", "\\\n", "\n", "\t", "-", "--a ", "a.", "$A", "${A:-", "$((", "(", "[", "{", '"', "'",
         "a ", "#", "a=", "a: ", "- ", ",", "A=$A$A\n", "#SBATCH --a\n")  # fmt: skip
"""What a reader of text may look at again from every place that it comes to."""


@pytest.mark.spread(1)
@pytest.mark.parametrize("of", READERS)
def test_no_reader_takes_longer_than_its_text(of: str) -> None:
    for unit in UNITS:
        text = (unit * 40_000)[:40_000]
        began_s = time.process_time()
        with contextlib.suppress(DocumentError):
            READERS[of](text)
        # About 0.1 s; where every place looks at the rest, 5 s and more.
        assert time.process_time() - began_s < 3, f"{len(text)} characters of {unit!r}"


@pytest.mark.parametrize(
    "numbers", [range(60), pytest.param(range(60, 300), marks=pytest.mark.matrix)]
)
def test_mutated_configurations_are_read_or_refused(numbers: range) -> None:
    for number in numbers:
        rng = random.Random(f"configurations/{number}")
        of, text, row, _ = hostile_configurations.drawn(rng, hostile.mutated, hostile=True)
        with contextlib.suppress(DocumentError):
            import_plan(text, of, resolve_cluster(row.cluster), model=MODEL)
