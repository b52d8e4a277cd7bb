"""Each command answers on stdout, talks on stderr, and its JSON holds what is promised."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright import cli
from meshwright.__main__ import main as run_command
from meshwright.api import commands
from meshwright.launch import launch as launches
from meshwright.planner.catalog import machine_figures
from meshwright.planner.documents import document
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError
from meshwright.runtime.run.launch_options import LaunchRun, Where
from tests.limits import PATIENCE_S

DEMO = ("demo-4m", "--cluster", "local:2", "--seq-len", "64", "--global-batch", "8")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return what a command prints with --json, and nothing else."""
    assert cli.main([*arguments, "--json"]) == 0
    output = capfd.readouterr()
    assert output.err == ""
    return json.loads(output.out)


def test_plan_answers_with_plan_figures_and_proof(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Figures of the catalogue: `local` has this machine's, and a gap that goes with them.
    sizes = DEMO[DEMO.index("--seq-len") :]
    asked = ("demo-4m", "--cluster", "2xv100-sxm-16gb", *sizes)
    result = answer(capfd, "plan", *asked, "-o", "plan.yaml")

    assert Plan.of(result["plan"]) == document.read(Plan, "plan.yaml")
    certificate = result["certificate"]
    assert certificate["optimal"] and certificate["gap"] == 0
    assert certificate["lower_bound_s"] <= certificate["objective_s"]
    assert sum(certificate["counts"].values()) == certificate["configurations"]
    assert result["step_time_s"] > 0 and result["tokens_per_s"] > 0 and 0 < result["mfu"] < 1
    assert result["search_s"] < 10
    for stage in result["peak_memory_bytes"]:
        assert sum(stage["parts"].values()) == pytest.approx(stage["total"])


def test_a_pin_is_kept(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = answer(capfd, "plan", *DEMO, "--fix", "pp=2,recompute=full", "--fix", "schedule=gpipe")

    plan = Plan.of(result["plan"])
    assert plan.mesh.pipeline == 2 and plan.schedule == "gpipe"
    assert {item.recompute for stage in plan.stages for item in stage.layers} == {"full"}


@pytest.mark.matrix
def test_the_integer_program_finds_the_same_objective(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    exact = answer(capfd, "plan", "gpt2", "--cluster", "4xv100-sxm-16gb", "--fix", "pp=2")
    program = answer(
        capfd, "plan", "gpt2", "--cluster", "4xv100-sxm-16gb", "--fix", "pp=2", "--solver", "ilp"
    )

    assert program["certificate"]["objective_s"] == pytest.approx(
        exact["certificate"]["objective_s"], rel=1e-6
    )


def test_top_plans_lie_on_different_meshes_fastest_first(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = answer(
        capfd, "plan", "gpt2", "--cluster", "4xv100-sxm-16gb", "--top", "3", "--prefer", "fastest"
    )

    top = result["top"]
    meshes = {
        tuple(ranked["plan"]["mesh"][axis] for axis in ("pipeline", "tensor", "context"))
        for ranked in top
    }
    assert len(meshes) == len(top) == 3
    assert top[0]["plan"] == result["plan"]
    assert top[0]["step_time_s"] == result["certificate"]["objective_s"]
    assert [ranked["step_time_s"] for ranked in top] == sorted(r["step_time_s"] for r in top)


def test_planning_loads_only_what_it_uses() -> None:
    script = (
        "import sys; from meshwright import cli; "
        "cli.main(['plan', 'gpt2', '--cluster', '8xa100-sxm-80gb', '--json']); "
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )

    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )

    assert not {"torch", "networkx", "jinja2", "highspy", "pulp"} & {*run.stderr.split()}


def test_help_loads_no_planner() -> None:
    """0.3 CPU s: typer, rich and pydantic; a second more where a command's work is loaded too."""
    code = (
        "import sys\n"
        "from meshwright.cli import main\n"
        "for words in ['--help'], ['plan', '--help'], ['--version']:\n"
        "    assert main(words) == 0\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(loaded & {'numpy', 'networkx', 'torch', 'pulp', 'highspy', 'profiler'},"
        " [name for name in sys.modules"
        " if name.startswith(('meshwright.planner.search', 'meshwright.planner.whatif',"
        " 'rich.prog'))])\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "set() []"


def test_predict_of_a_plan_is_the_prediction_it_came_with(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    planned = answer(capfd, "plan", "gpt2", "--cluster", "8xa100-sxm-80gb", "-o", "plan.yaml")

    predicted = answer(capfd, "predict", "plan.yaml")

    assert predicted["step_time_s"] == planned["step_time_s"]
    assert predicted["fits"] and "assumptions" in predicted


def test_commands_that_run_one_after_the_other_predict_the_same_seconds_here(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(here / "cache"))
    launched: list[float] = []
    monkeypatch.setattr(
        "meshwright.runtime.launch.launch.launch",
        lambda asked: launched.append(asked.predicted_step_s),
    )

    def anew(*arguments: str) -> Any:
        machine_figures.machine_figures.cache_clear()  # as another process
        return answer(capfd, *arguments)

    planned = anew("plan", *DEMO, "-o", "plan.yaml")["step_time_s"]
    again = [
        anew(*command)["step_time_s"]
        for command in (("predict", "plan.yaml"), ("predict", "plan.yaml", "--cluster", "local:2"))
    ]
    shown = anew("show", "plan.yaml")["prediction"]["step_time_s"]
    machine_figures.machine_figures.cache_clear()
    assert cli.main(["launch", "plan.yaml"]) == 0

    assert [*again, shown, *launched] == [planned] * 4


def test_predict_prices_a_layout(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    layout = ("--layout", "tp=2,pp=2,micro_batch=1,recompute=full")

    predicted = answer(capfd, "predict", "llama-3.2-1b", "--cluster", "8xa100-sxm-80gb", *layout)

    assert predicted["layout"].startswith("tp=2 pp=2 dp=2 zero=1 1f1b micro_batch=1x")
    assert len(predicted["stages"]) == 2


TUNED = ("llama-3.1-8b", "--cluster", "1xrtx-4090", "--lora", "rank=16", "--seq-len", "2048")


def test_adapters_mean_the_same_to_predict_and_to_plan(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = "recompute=full,loss=chunked-recompute,micro_batch=1,compile=none"
    planned = answer(capfd, "plan", *TUNED, "--fix", layout, "-o", "plan.yaml")

    predicted = answer(capfd, "predict", *TUNED, "--layout", layout)

    assert predicted["fits"]
    assert predicted["step_time_s"] == planned["step_time_s"]
    # 8.03e9 frozen weights of two bytes once, and 42e6 of adapters with master, copy and moments.
    parameters = predicted["stages"][0]["memory_parts"]["parameters"]
    assert parameters == pytest.approx(2 * 8.03e9 + 6 * 42e6, rel=0.005)
    assert document.read(Plan, "plan.yaml").global_batch == 16


def test_a_plan_has_its_own_adapters(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer(capfd, "plan", "gpt2", "--cluster", "8xa100-sxm-80gb", "-o", "plan.yaml")

    for option, value in (("--lora", "rank=4"), ("--seq-len", "64"), ("--precision", "fp32")):
        code = cli.main(["predict", "plan.yaml", option, value])

        assert code == 1
        assert f"{option[2:]}: a plan has its own already" in capfd.readouterr().err


def test_a_layout_says_which_devices_are_idle(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ("predict", "gpt2", "--cluster", "8xa100-sxm-80gb", "--layout")

    code = cli.main([*asked, "tp=1,dp=4"])
    refused = capfd.readouterr()
    named = answer(capfd, *asked, "tp=1,dp=4,idle=4")
    whole = answer(capfd, *asked, "tp=1,dp=8")

    assert code == 1 and "leaves 4 of 8 devices idle; add idle=4" in refused.err
    assert named["idle_devices"] == 4 and named["notes"] == ["4 of 8 devices are idle"]
    assert whole["idle_devices"] == 0 and whole["notes"] == []


@pytest.mark.matrix
def test_a_plan_on_a_larger_cluster_says_which_devices_are_idle(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer(capfd, "plan", "gpt2", "--cluster", "4xa100-sxm-80gb", "-o", "plan.yaml")

    assert cli.main(["predict", "plan.yaml", "--cluster", "8xa100-sxm-80gb"]) == 0

    assert "note      4 of 8 devices are idle" in capfd.readouterr().out


@pytest.mark.matrix
def test_a_plan_that_leaves_a_kind_of_device_out_says_so(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ("--seq-len", "1024", "--global-batch", "8", "--precision", "fp32")

    result = answer(capfd, "plan", "gpt2", "--cluster", "2xh100-sxm-80gb+1xp100", *asked)

    assert result["plan"]["mesh"]["data_replicate"] * result["plan"]["mesh"]["data_shard"] == 2
    assert "idle: the plan uses all of h100-sxm-80gb, none of p100" in result["notes"][0]


@pytest.mark.matrix
def test_a_pin_without_effect_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "gpt2", "--cluster", "4xa100-sxm-80gb", "--fix", "schedule=1f1b,pp=1")

    result = answer(capfd, *asked)
    assert cli.main([*asked]) == 0

    said = "schedule=1f1b has no effect: pp=1, there is no pipeline"
    assert result["notes"] == [said]
    assert said in capfd.readouterr().out


def test_nothing_fits_is_told_with_the_closest_miss(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["plan", "llama-3.2-1b", "--cluster", "1xv100-sxm-16gb"])

    output = capfd.readouterr()
    assert code == 1 and output.out == ""
    assert "no plan of llama-3.2-1b fits 1 x v100-sxm-16gb" in output.err
    assert "The closest" in output.err and "optimizer" in output.err


def test_show_writes_a_page_that_needs_no_network_and_a_trace(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer(capfd, "plan", *DEMO, "--fix", "pp=2,schedule=1f1b", "-o", "plan.yaml")

    answer(capfd, "show", "plan.yaml", "--html", "page.html", "--trace", "trace.json")

    page = Path("page.html").read_text()
    assert "demo-4m on local:2" in page and 'src="http' not in page
    assert "<h2>Alternatives</h2>" in page and "<summary>Proof</summary>" in page
    assert "the best plan of the search" in page and "<td>this plan</td>" in page
    trace = json.loads(Path("trace.json").read_text())["traceEvents"]
    plan = document.read(Plan, "plan.yaml")
    computed = [event for event in trace if event["ph"] == "X"]
    assert len(computed) == 2 * 2 * plan.micro_batches
    assert {event["pid"] for event in computed} == {0, 1}


def test_solve_splits_what_a_person_wrote(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("problem.yaml").write_text(
        "format: 1\nmicro_batches: 4\n"
        "kinds:\n  block:\n    options: [{name: keep, forward_s: 1.0, backward_s: 2.0}]\n"
        "layers:\n- {layers: [block], count: 4}\n"
        "stages:\n- {capacity_bytes: 1.0, count: 2}\n"
    )

    result = answer(capfd, "solve", "problem.yaml")

    assert result["cuts"] == [0, 2, 4] and result["optimal"]
    assert result["objective_s"] == pytest.approx((4 - 1) * 6 + 12)


def test_the_problem_of_the_docs_is_solved_as_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs/reference/problem.md").read_text()
    chain, chain_shown, graph, graph_shown = re.findall(
        r"```(?:yaml)?\n(.*?)```", text, flags=re.DOTALL
    )
    monkeypatch.chdir(tmp_path)

    for problem, shown in ((graph, graph_shown), (chain, chain_shown)):
        Path("problem.yaml").write_text(problem)
        assert cli.main(["solve", "problem.yaml"]) == 0
        printed = capfd.readouterr().out.splitlines()
        assert shown.splitlines()[1:] == [line.rstrip() for line in printed]
    exact = answer(capfd, "solve", "problem.yaml")
    program = answer(capfd, "solve", "problem.yaml", "--solver", "ilp")
    assert program["objective_s"] == pytest.approx(exact["objective_s"])
    assert exact["stages"][3]["options"] == ["keep"] * 5
    assert [stage["bytes"] for stage in exact["stages"]] == exact["stage_bytes"]


@pytest.mark.parametrize("shelf", ["accelerators", "nodes", "models", "prices"])
def test_the_catalogue_lists(shelf: str, capfd: pytest.CaptureFixture[str]) -> None:
    least = {"accelerators": 20, "nodes": 15, "models": 25, "prices": 20}[shelf]

    rows = answer(capfd, "catalog", shelf)

    assert len(rows) >= least


@pytest.mark.parametrize("command", ["plan", "predict", "solve", "show", "launch", "profile"])
def test_every_option_of_a_command_is_an_argument_of_its_function(command: str) -> None:
    shown = {"json", "explain", "model", "plan", "solver"}  # rendering, and positional arguments

    # An option that chooses another function: commands.profile_agenda.
    shown |= {"profile": {"dry_run"}}.get(command, set())

    options = set(inspect.signature(cli.command_of(command)).parameters) - shown
    function = launches.launch if command == "launch" else getattr(commands, command)

    records = {*LaunchRun.model_fields, *Where.model_fields} if command == "launch" else set()
    assert options <= {*inspect.signature(function).parameters, *records}


def test_wrong_usage_exits_with_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan"]) == 2
    assert cli.main(["no-such-command"]) == 2
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "kind", "status", "said"),
    [
        (["plan"], "UsageError", 2, "Missing argument"),
        (["predict", "gpt2", "--seq-len", "x"], "UsageError", 2, "'--seq-len'"),
        (["show", "none.yaml"], "DocumentError", 1, "none.yaml"),
        (["solve", "bad.yaml"], "DocumentError", 1, "bad.yaml"),
        (["plan", "llama-3.2-1b", "--cluster", "1xv100-sxm-16gb"], "NoPlanFits", 1, "GiB"),
        (["launch", "none.yaml"], "DocumentError", 1, "none.yaml"),
    ],
)
def test_with_json_a_failure_is_one_object_too(
    words: list[str],
    kind: str,
    status: int,
    said: str,
    here: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (here / "bad.yaml").write_text("format: [")

    assert cli.main([*words, "--json"]) == status
    output = capfd.readouterr()
    error = json.loads(output.out)["error"]
    assert (error["kind"], error["status"]) == (kind, status)
    assert said in error["message"] and said in output.err
    if kind == "DocumentError":
        assert error["file"] == words[1]


def test_a_bug_and_an_interruption_are_objects_as_well(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object, **named: object) -> None:
        raise ZeroDivisionError("nothing to divide by")

    def stopped(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "solve", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["solve", "problem.yaml", "--json"])
    assert json.loads(capfd.readouterr().out)["error"] == {
        "kind": "Bug",
        "message": "ZeroDivisionError: nothing to divide by",
        "status": 1,
    }

    monkeypatch.setattr(commands, "solve", stopped)
    assert cli.main(["solve", "problem.yaml", "--json"]) == 130
    assert json.loads(capfd.readouterr().out)["error"]["kind"] == "Interrupted"


def test_ctrl_c_while_a_command_loads_leaves_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Stopped:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stopped())\n"
        "from meshwright.__main__ import main\n"
        "sys.exit(main())\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (130, "meshwright: interrupted\n")


def test_a_part_of_an_answer_is_no_success(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: object) -> Iterator[object]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("meshwright.planner.whatif.run_study._evaluate_tasks", stopped)

    words = ["--model", "gpt2", "--clusters", "8xa10g", "--tokens", "1e9"]
    assert cli.main(["whatif", *words]) == 1
    assert "Interrupted: 0 done, 1 not looked at." in capfd.readouterr().out


@pytest.mark.matrix
def test_plans_are_compared_with_the_fastest_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / f"{name}.yaml") for name in ("free", "divided")]
    wanted = ["plan", "llama-3.2-1b", "--cluster", "8xh100-sxm-80gb", "--global-batch", "64"]
    assert cli.main([*wanted, "-o", paths[0]]) == 0
    assert cli.main([*wanted, "--fix", "tp=8", "-o", paths[1]]) == 0
    capsys.readouterr()

    assert cli.main(["compare", *paths, "--json"]) == 0

    free, divided = json.loads(capsys.readouterr().out)["plans"]
    assert (free["what"], divided["what"]) == tuple(paths)
    assert free["more"] == 0.0
    assert divided["more"] == pytest.approx(divided["step_time_s"] / free["step_time_s"] - 1)
    assert "tensor communication +" in divided["why"]
    assert cli.main(["compare", paths[0]]) == 1
    assert "fewer than two" in capsys.readouterr().err


def test_plans_of_other_batches_and_devices_are_compared_by_time_of_as_much_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {}
    for devices, batch in ((1, 16), (1, 64), (4, 64)):
        paths[devices, batch] = str(tmp_path / f"{devices}-{batch}.yaml")
        job = ["--cluster", f"{devices}xh100-sxm-80gb", "--global-batch", str(batch)]
        assert cli.main(["plan", "gpt2-small", *job, "-o", paths[devices, batch]]) == 0
    capsys.readouterr()

    assert cli.main(["compare", paths[1, 16], paths[1, 64], "--json"]) == 0
    few, many = json.loads(capsys.readouterr().out)["plans"]
    each = [one["step_time_s"] / batch for one, batch in ((few, 16), (many, 64))]
    assert many["more"] == 0.0  # its step is the longer one
    assert few["more"] == pytest.approx(each[0] / each[1] - 1)

    assert cli.main(["compare", paths[1, 16], paths[1, 64]]) == 0
    assert "cost" in capsys.readouterr().out
    assert cli.main(["compare", paths[1, 64], paths[4, 64]]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "time memory" in said and "less time may cost more" in said


def test_the_version_is_that_of_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import version

    assert cli.main(["--version"]) == 0
    monkeypatch.setattr("sys.argv", ["meshwright", "--version"])
    monkeypatch.setitem(sys.modules, "meshwright.cli", None)  # alone it loads no command
    assert run_command() == 0

    assert capsys.readouterr().out == 2 * f"meshwright {version('meshwright')}\n"


def test_a_configuration_is_imported_and_improved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, plan = tmp_path / "run.sh", tmp_path / "plan.yaml"
    script.write_text(
        "python pretrain_gpt.py --micro-batch-size 1 --global-batch-size 16 --seq-length 1024 "
        "--bf16 --tensor-model-parallel-size 2 --log-interval 5\n"
    )
    where = ["--from", "slurm", "--cluster", "2xa100-sxm-80gb", "--model", "gpt2", "--json"]

    assert cli.main(["import", str(script), *where, "-o", str(plan)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["unknown"] == ["--log-interval"]
    assert cli.main(["compare", str(plan), "--best", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    saved = sum(change["saved_s"] for change in found["changes"])
    assert saved == pytest.approx(found["mine"]["step_time_s"] - found["best"]["step_time_s"])
    assert any(change["what"].startswith("tp 2 -> 1") for change in found["changes"])
    assert cli.main(["compare", str(plan), "--best", "--explain"]) == 0
    assert "change, one after the other" in capsys.readouterr().out
    assert cli.main(["compare", str(plan), str(plan), "--best"]) == 1
    assert "compares one plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--version"], pytest.param(["catalog"], marks=pytest.mark.matrix), ["catalog", "--json"]],
)
def test_a_stdout_without_room_ends_a_command_quietly(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "meshwright", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
            timeout=PATIENCE_S,
        )

    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_number_that_no_record_takes_is_refused_in_our_words(
    capsys: pytest.CaptureFixture[str], value: str
) -> None:
    plan = str(Path(__file__).parents[2] / "plans/demo-4m-on-local/plan.yaml")

    assert cli.main(["launch", plan, "--dry-run", "--scale-up-after", value]) == 1

    said = capsys.readouterr().err
    assert said.startswith("meshwright: scale-up-after is ")
    assert "Traceback" not in said


def test_a_command_ends_without_a_search_for_cycles() -> None:
    code = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "from meshwright.__main__ import main\n"
        "sys.argv = ['meshwright', '--version']\n"
        "main()"
    )

    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert ended.stdout.splitlines()[-1] == "True"


@pytest.mark.parametrize("is_printed", [True, False])
def test_what_was_printed_when_it_came_is_not_printed_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *, is_printed: bool
) -> None:
    error = LaunchError("node 0: interrupted")
    error.is_printed = is_printed

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)

    assert cli.main(["launch"]) == 1
    assert capfd.readouterr().err.count("node 0: interrupted") == (not is_printed)
