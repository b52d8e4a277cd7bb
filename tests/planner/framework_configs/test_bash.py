"""Scripts are followed as bash follows them: its own words are the oracle."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.api import commands
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment, ways
from meshwright.planner.framework_configs.import_plan import (
    Imported,
    import_plan,
    read_batch_script,
)
from tests.planner.framework_configs.bash_scripts import Script
from tests.planner.framework_configs.wider_bash_scripts import WiderScript

LAUNCHER = """#!/bin/sh
[ $# = 0 ] || printf '%s\\0' "$@" >&3
printf '\\1\\0' >&3
"""
MARKS = ("${", "$(", "$?", "$@", "`", "$!", "$$", "$-", "~")
"""Parts of the words that stand for what is not known."""
BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="there is no bash")


def words_of_bash(text: str, folder: Path) -> list[tuple[str, ...]]:
    """Return the words of each `launch`, as a restricted bash in an empty folder runs it."""
    script, written = folder / "script.sh", folder / "words"
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    script.write_text(text)
    launcher = folder / "bin" / "launch"
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o700)
    with written.open("wb") as words:
        subprocess.run(
            ["bash", "-c", 'exec 3>&1 >/dev/null; exec bash -r "$1"', "bash", str(script)],
            cwd=empty,
            env={"PATH": f"{launcher.parent}:/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )
    assert not list(empty.iterdir())
    launches = written.read_text().split("\1\0")[:-1]
    return [tuple(launch.split("\0")[:-1]) for launch in launches]


def followed(text: str) -> list[tuple[str, ...]] | None:
    """Return the same as it is followed here; None where that is refused or unknown."""
    try:
        every = ways(text)
    except DocumentError:
        return None
    if len(every) > 1:
        return None
    launches = [words[words.index("launch") :] for words in every[0].commands if "launch" in words]
    if any(mark in word for words in launches for word in words for mark in MARKS):
        return None
    return list(dict.fromkeys(words[1:] for words in launches))


def compare(seeds: range, folder: Path, of: type[Script] = Script) -> int:
    """Compare scripts; return how many were followed to the end."""
    count = 0
    for seed in seeds:
        text = of(random.Random(seed)).text()
        ours = followed(text)
        if ours is None:
            continue
        count += 1
        assert ours == list(dict.fromkeys(words_of_bash(text, folder))), f"{seed}:\n{text}"
    return count


@needs_bash
def test_words_are_those_of_bash(tmp_path: Path) -> None:
    assert compare(range(40), tmp_path) > 20


@needs_bash
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(5))
def test_words_of_a_thousand_scripts_are_those_of_bash(part: int, tmp_path: Path) -> None:
    assert compare(range(1000 + 200 * part, 1200 + 200 * part), tmp_path) > 100


@needs_bash
@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(1000, 2000), marks=pytest.mark.matrix)]
)
def test_words_of_rarer_constructs_are_those_of_bash(seeds: range, tmp_path: Path) -> None:
    assert compare(seeds, tmp_path, WiderScript) > len(seeds) // 4


TRAINS = "torchrun --nproc-per-node 8 pretrain_gpt.py"
REST = "--bf16 --seq-length 1024 --micro-batch-size 1 --global-batch-size 64"
GPT = resolve_model("gpt2")


def read(
    text: str, surroundings: ScriptEnvironment | None = None, of: str = "megatron"
) -> Imported:
    machine = resolve_cluster("8xh100-sxm-80gb")
    return import_plan(text, of, machine, model=GPT, surroundings=surroundings)


@pytest.mark.parametrize("of", ["megatron", "slurm"])
@pytest.mark.parametrize(
    "text",
    [
        f'srun -N 1 bash -c "{TRAINS} {REST} --tensor-model-parallel-size 4"',
        f'CMD="{TRAINS} {REST} --tensor-model-parallel-size 4"\nbash -c "$CMD"',
        f"docker exec -it X bash -lc '{TRAINS} {REST} --tensor-model-parallel-size 4'",
        f"ssh -p 22 host 'cd a; {TRAINS} {REST} --tensor-model-parallel-size 4'",
        f"TP=4\neval {TRAINS} {REST} --tensor-model-parallel-size '$TP'",
        f"A=$(cat <<EOF\n{REST} --tensor-model-parallel-size 4\nEOF\n)\n{TRAINS} $A",
        f"ssh host <<'EOF'\nTP=4\n{TRAINS} {REST} --tensor-model-parallel-size $TP\nEOF",
        f"TP=4; MBS=1; if true; then {TRAINS} {REST} --tensor-model-parallel-size $TP; fi",
        f'f() {{ {TRAINS} {REST} "$@"; }}\nf --tensor-model-parallel-size 4',
        f"uv run --frozen {TRAINS} {REST} --tensor-model-parallel-size 4",
        f"conda run -n a bash -c '{TRAINS} {REST} --tensor-model-parallel-size 4'",
        f'tmux new-session -d -s a "{TRAINS} {REST} --tensor-model-parallel-size 4"',
    ],
)
def test_commands_inside_of_others_are_followed(text: str, of: str) -> None:
    plan = read(text, of=of).plan

    assert (plan.mesh.tensor, plan.seq_len, plan.precision) == (4, 1024, "bf16")


def test_a_word_of_an_array_is_split_where_bash_splits_it() -> None:
    script = 'A+=("--fp8-format hybrid")\n' + TRAINS + f" {REST} "

    assert read(script + "${A[@]}").plan.precision == "fp8"
    quoted = read(script + '"${A[@]}"')
    assert quoted.plan.precision == "bf16"
    assert quoted.not_understood == ("--fp8-format hybrid",)


BRANCHES = f"""
if [ "$SIZE" = 7 ]; then TP=2; elif [[ $SIZE -eq 13 ]]; then TP=4; else echo no; exit 1; fi
[ -f debug ] && echo debugging
{TRAINS} {REST} --tensor-model-parallel-size $TP
"""


def test_a_branch_that_nothing_decides_is_asked_for_by_its_variable() -> None:
    with pytest.raises(DocumentError, match=r"SIZE\} = 7.*--set SIZE=VALUE"):
        read(BRANCHES)

    for size, tensor in (("7", 2), ("13", 4)):
        assert read(BRANCHES, ScriptEnvironment(values={"SIZE": size})).plan.mesh.tensor == tensor
    with pytest.raises(DocumentError, match="runs no command that is known to train"):
        read(BRANCHES, ScriptEnvironment(values={"SIZE": "8"}))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "runs no command"),
        (f"{TRAINS} {REST} --tensor-model-parallel-size $1", "add --set 1=VALUE"),
        (f"{TRAINS} {REST} --micro-batch-size ${{MBS}}", "add --set MBS=VALUE"),
        ("python train.py --hello 1", "no setting was understood"),
        (f"{TRAINS} {REST}\n{TRAINS} {REST} --fp16", "starts 2 commands"),
        ("curl x | bash", "reads a script from a pipe"),
        (f"{TRAINS} {REST} --tensor-model-parallel-size ${{TP:?}}", "add --set TP=VALUE"),
        (f"echo --fp16 | xargs {TRAINS} {REST}", "words that xargs reads"),
        (f"if [ -f x ]; then A=--fp16; fi\n{TRAINS} {REST} $A", r"--set '\[ -f x \]=yes'"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(script: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        read(script)


def test_an_unknown_word_behind_a_switch_is_named() -> None:
    imported = read(f"{TRAINS} {REST} --use-distributed-optimizer $EXTRA")

    assert imported.plan.zero == 1
    assert imported.not_understood == ("${EXTRA}",)


def test_another_file_that_is_named_is_read_or_the_import_is_refused() -> None:
    text = "{per_device_train_batch_size: 1, bf16: true, deepspeed: ds.json}"
    files = {"ds.json": '{"zero_optimization": {"stage": 3}}'}

    assert read(text, ScriptEnvironment(files=files.get), "transformers").plan.zero == 3
    with pytest.raises(DocumentError, match=r"names 'ds\.json', which is not beside"):
        read(text, of="transformers")
    launched = "accelerate launch --config_file a.yaml train.py --per_device_train_batch_size 1"
    files["a.yaml"] = "{distributed_type: FSDP, num_processes: 8, fsdp_config: {fsdp_version: 2}}"
    assert read(launched, ScriptEnvironment(files=files.get), "slurm").plan.zero == 3
    with pytest.raises(DocumentError, match=r"names 'a\.yaml'"):
        read(launched, of="slurm")


def test_words_that_are_not_understood_widen_the_answer(tmp_path: Path) -> None:
    plain, odd = tmp_path / "plain.sh", tmp_path / "odd.sh"
    plain.write_text(f"{TRAINS} {REST} --log-interval 1")
    odd.write_text(f"{TRAINS} {REST} --log-interval 1 --foo-fusion --cpu-things-offload")

    sure, bounded = (
        commands.import_plan(str(file), of="megatron", cluster="8xh100-sxm-80gb", model="gpt2")
        for file in (plain, odd)
    )

    assert sure.not_understood == () and sure.unknown == ("--log-interval",)
    assert bounded.not_understood == ("--cpu-things-offload", "--foo-fusion")
    assert bounded.prediction.step_time_low_s < sure.prediction.step_time_low_s
    assert bounded.prediction.step_time_high_s > sure.prediction.step_time_high_s
    assert 0.1 < (bounded.prediction.fit_probability or 0) < 0.9
    assert "--cpu-things-offload" in " ".join(bounded.prediction.notes)


def test_words_that_are_not_understood_stay_in_the_plan(tmp_path: Path) -> None:
    script, file = tmp_path / "run.sh", str(tmp_path / "mine.yaml")
    script.write_text(f"{TRAINS} {REST} --cpu-things-offload")
    imported = commands.import_plan(
        str(script), of="megatron", cluster="8xh100-sxm-80gb", model="gpt2", output=file
    )

    predicted, improved = commands.predict(file), commands.compare_best(file)

    assert predicted == imported.prediction
    for prediction in (predicted, improved.prediction, improved.best.prediction):
        assert 0.1 < (prediction.fit_probability or 0) < 0.9
    assert improved.best.plan.not_understood == ("--cpu-things-offload",)
    assert "no plan is called the best" in " ".join(improved.warnings)


def test_arguments_in_a_file_are_read_and_other_outputs_are_named() -> None:
    files = {"args.txt": "--seq-length 512\n--bf16\n"}
    script = "torchrun pretrain_gpt.py --micro-batch-size 2 {}\n"

    def found(words: str) -> tuple[list[str], list[str]]:
        surroundings = ScriptEnvironment(files=files.get)
        parsed = read_batch_script(script.format(words), surroundings)
        return [str(parsed.seq_len), str(parsed.micro_batch)], parsed.unknown

    assert found("$(cat args.txt)")[0] == ["512", "2"]
    # Blanks inside of a command's name do not make several words of its output.
    assert found("$(sed 's/a b/c/' args.txt)")[1] == ["$(sed 's/a b/c/' args.txt)"]
    assert found("$(cat other.txt args.txt)")[1] == ["$(cat other.txt args.txt)"]


def test_functions_reach_a_shell_that_is_started_where_they_are_exported() -> None:
    body = "go() { torchrun pretrain_gpt.py --micro-batch-size 4; }\n"
    for start in ("bash -euo pipefail -c go", "srun --ntasks-per-node=1 bash -c go"):
        parsed = read_batch_script(f"{body}export -f go\n{start}\n")
        assert parsed.micro_batch == 4
        with pytest.raises(DocumentError, match="runs no command"):
            read_batch_script(f"{body}{start}\n")
