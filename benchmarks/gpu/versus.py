"""One device, six ways to train the same model: tokens per second, peak memory, first step.

    PYTHONPATH=$PWD python benchmarks/gpu/versus.py --out DIR
    PYTHONPATH=$PWD python benchmarks/gpu/versus.py --tiny --out DIR      a dry run, on any machine

Contestants take turns (A B C A B C), each in a process of its own: `plain` is a loop over
transformers' class as an expert writes it (autocast to bf16 over fp32 weights, compiled blocks,
fused AdamW, the largest micro-batch that fits), `torchtitan` its own Trainer (titan.py) and
`trainer` transformers' with the same settings, `launch` is the plan that `meshwright plan` answers,
run by `meshwright launch`, `launch graphs` the plan with captured micro-batches, and `launch eager`
the one without compiled blocks.  Model, samples, sequence and optimizer are the same; weights are
drawn and tokens are random, or text for `launch`.  torchtitan and peft may be missing, or lie in a
folder named by PYTHONPATH; a row says what is not installed.

A measurement takes half a minute on a device, so that ten minutes are worth the first turn of all
rows, without eager blocks.  Every line goes to DIR/versus.jsonl as it comes, and a further call
measures what lacks.  Writes DIR/versus.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.suite import Line, read_lines  # noqa: E402
from meshwright.planner.catalog.expressions import resolve_model  # noqa: E402
from meshwright.planner.documents.document import write_text  # noqa: E402
from meshwright.planner.documents.units import bytes_text, seconds_text  # noqa: E402
from meshwright.runtime.core.memory_tracker import LiveMemory  # noqa: E402
from meshwright.runtime.models.families import configuration  # noqa: E402

LORA_RANK = 16
LONGEST_S = 150.0
"""Of one measurement; one that takes longer has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every contestant of a row trains."""

    model: str
    seq_len: int
    samples: int
    """Of a step."""
    recompute: bool = False
    """Every block is recomputed, because its activations do not fit."""
    lora: bool = False

    @property
    def key(self) -> str:
        """The row's name.

        >>> Work(model="gpt2", seq_len=1024, samples=16).key
        'gpt2, 16 x 1024'
        """
        words = f"{self.model}, {self.samples} x {self.seq_len}"
        return words + ", recompute full" * self.recompute + f", LoRA {LORA_RANK}" * self.lora


WORKS = (
    Work(model="llama-3.2-1b", seq_len=2048, samples=16),
    Work(model="gpt2", seq_len=1024, samples=16),
    Work(model="llama-3.2-1b", seq_len=8192, samples=4),
    Work(model="qwen3-0.6b", seq_len=2048, samples=16, lora=True),
    Work(model="llama-3.2-3b", seq_len=2048, samples=8, recompute=True),
)
"""Most valuable first."""
TINY_WORKS = (
    Work(model="demo-4m", seq_len=64, samples=4),
    Work(model="demo-4m", seq_len=64, samples=4, recompute=True),
    Work(model="demo-4m", seq_len=64, samples=4, lora=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how long contestants run."""

    steps: int
    """After the first, which compiles."""
    on_cuda: bool
    begin_s: float
    """When the contestant's command began, in seconds of Unix time."""

    @property
    def device(self) -> torch.device:
        """The device of loops in this process."""
        return torch.device("cuda", 0) if self.on_cuda else torch.device("cpu")


def library_model(work: Work, setting: Setting) -> nn.Module:
    """Return transformers' own class of the model, with drawn weights in fp32."""
    import transformers  # noqa: PLC0415 - takes seconds to import

    architecture = resolve_model(work.model).architecture
    assert architecture is not None
    with setting.device:
        model = transformers.AutoModelForCausalLM.from_config(configuration(architecture, None))
    model.config.use_cache = False
    if work.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if work.lora:
        import peft  # noqa: PLC0415

        adapters = peft.LoraConfig(r=LORA_RANK, target_modules="all-linear")
        model = peft.get_peft_model(model, adapters)
    trained: nn.Module = model.train()
    return trained


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of a model in place."""
    largest = max(
        (module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len
    )
    for block in largest:
        block.compile()


def random_tokens(work: Work) -> Tensor:
    """Return token numbers, [sample, position], of a step."""
    vocabulary = resolve_model(work.model).architecture.vocab_size  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (work.samples, work.seq_len + 1), generator=generator)


def plain(work: Work, setting: Setting, micro_batch: int) -> Line:
    """Train by a loop as an expert writes it."""
    model = library_model(work, setting)
    if setting.on_cuda:
        compile_blocks(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=setting.on_cuda)
    tokens = random_tokens(work)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    loss_of = torch.compile(loss) if setting.on_cuda else loss

    def step() -> None:
        for part in torch.split(tokens, micro_batch):
            ids = part.to(setting.device, non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=setting.on_cuda):
                logits = model(input_ids=ids[:, :-1]).logits
                value = loss_of(logits, ids[:, 1:]) * (len(part) / work.samples)
            torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return measured(step, model, optimizer, setting)


def measured(step: Callable[[], None], model: nn.Module, optimizer: Any, setting: Setting) -> Line:
    """Return seconds of each step and the most bytes of tensors at once."""

    def step_s() -> float:
        begin_s = time.perf_counter()
        step()
        if setting.on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    step()
    if setting.on_cuda:
        torch.cuda.synchronize()
    first_s = time.time() - setting.begin_s
    seconds = [step_s() for _ in range(setting.steps)]
    line = {"first_s": first_s, "seconds": seconds} | counts(model)
    return line | peak(step, model, optimizer, setting)


def counts(model: nn.Module) -> Line:
    """Return how many parameters a model has and trains: contestants of a row must agree."""
    every = {id(p): p for p in model.parameters()}.values()
    return {
        "parameters": sum(p.numel() for p in every),
        "trained": sum(p.numel() for p in every if p.requires_grad),
    }


def peak(step: Callable[[], None], model: nn.Module, optimizer: Any, setting: Setting) -> Line:
    """Return the most bytes of tensors at once; on a CPU those of one more step."""
    if setting.on_cuda:
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    with LiveMemory([*model.parameters(), *model.buffers(), *states]) as live:
        step()
    return {"peak_bytes": live.peak_bytes}


def trainer(work: Work, setting: Setting, micro_batch: int) -> Line:
    """Train by transformers' Trainer."""
    import transformers  # noqa: PLC0415 - takes seconds to import

    model = library_model(work, setting)
    ends_s: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if setting.on_cuda:
                torch.cuda.synchronize()
            ends_s.append(time.time())

    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in random_tokens(work)]
    settings = transformers.TrainingArguments(
        "trainer",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.samples // micro_batch,
        max_steps=setting.steps + 1,
        bf16=setting.on_cuda,
        optim="adamw_torch_fused" if setting.on_cuda else "adamw_torch",
        torch_compile=setting.on_cuda,
        gradient_checkpointing=work.recompute,
        max_grad_norm=1.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=not setting.on_cuda,
    )
    run = transformers.Trainer(model, settings, train_dataset=rows, callbacks=[Clock()])
    if setting.on_cuda:
        run.train()
        peaks = peak(lambda: None, model, run.optimizer, setting)
    else:
        with LiveMemory([*model.parameters(), *model.buffers()]) as live:
            run.train()
        peaks = {"peak_bytes": live.peak_bytes}
    seconds = [end - begin for begin, end in itertools.pairwise(ends_s)]
    return {"first_s": ends_s[0] - setting.begin_s, "seconds": seconds, **counts(model), **peaks}


def torchtitan(work: Work, setting: Setting, micro_batch: int) -> Line:
    """Train by torchtitan's Trainer."""
    from benchmarks.gpu.titan import trainer_of  # noqa: PLC0415 - may be missing

    step, model, optimizer = trainer_of(
        work.model,
        random_tokens(work),
        micro_batch=micro_batch,
        recompute=work.recompute,
        lora_rank=LORA_RANK if work.lora else None,
        on_cuda=setting.on_cuda,
    )
    return measured(step, model, optimizer, setting)


def largest_that_fits(
    contestant: Callable[[Work, Setting, int], Line], work: Work, setting: Setting
) -> Line:
    """Return a contestant's line with the largest micro-batch that does not run out of memory."""
    micro_batch = work.samples
    while True:
        try:
            return contestant(work, setting, micro_batch) | {"micro_batch": micro_batch}
        except torch.OutOfMemoryError:
            if micro_batch == 1:
                raise
            micro_batch //= 2
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def launch(work: Work, setting: Setting, *fixed: str) -> Line:
    """Plan, then train with the plan; both by the command line."""
    command = [sys.executable, "-m", "meshwright"]
    request = ["plan", work.model, "--cluster", "local:1", "-o", "plan.yaml", "--json"]
    request += ["--seq-len", str(work.seq_len), "--global-batch", str(work.samples)]
    request += ["--precision", "bf16" if setting.on_cuda else "fp32"]
    request += ["--lora", f"rank={LORA_RANK}"] if work.lora else []
    request += [word for choice in fixed for word in ("--fix", choice)]
    planned = subprocess.run([*command, *request], check=True, stdout=subprocess.PIPE)
    answer = json.loads(planned.stdout)
    steps = str(setting.steps + 1)
    subprocess.run(
        [*command, "launch", "plan.yaml", "--steps", steps, "-o", "run"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    report = json.loads(Path("run/report.json").read_text())
    return {
        "first_s": first_step_s(Path("run/events.jsonl"), setting.begin_s),
        "seconds": report["step_s"][1:],
        "peak_bytes": max(stage["peak_memory_bytes"] for stage in report["stages"]),
        "predicted_s": answer["step_time_s"],
        "predicted_bytes": max(stage["total"] for stage in answer["peak_memory_bytes"]),
        "mfu": answer["mfu"],
        "layout": report["layout"],
    }


def first_step_s(events: Path, begin_s: float) -> float:
    """Return seconds from the start of a command to the end of its first step."""
    for text in events.read_text().splitlines():
        event = json.loads(text)
        if event["event"] == "step":
            return float(event["at_unix_s"]) - begin_s
    raise ValueError(f"{events}: has no step")


EAGER = "launch eager"
GRAPHS = "launch graphs"
CONTESTANTS: dict[str, Callable[[Work, Setting], Line]] = {
    "plain": functools.partial(largest_that_fits, plain),
    "launch": launch,
    "torchtitan": functools.partial(largest_that_fits, torchtitan),
    "trainer": functools.partial(largest_that_fits, trainer),
    GRAPHS: lambda work, setting: launch(work, setting, "graphs=micro_batch"),
    EAGER: lambda work, setting: launch(work, setting, "compile=none"),
}


def measure(name: str, work: Work, setting: Setting) -> Line:
    """Measure a contestant in a process of its own, in an empty folder."""
    import tempfile  # noqa: PLC0415

    command = [sys.executable, str(Path(__file__).resolve()), "--contestant", name]
    command += ["--work", json.dumps(vars_of(work)), "--steps", str(setting.steps)]
    command += ["--begin-s", str(time.time())]
    command += ["--tiny"] if not setting.on_cuda else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            child = subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd=folder,
                env=environment,
                timeout=LONGEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"ended after {LONGEST_S:.0f} s"}
    if child.returncode:
        return {"failed": child.stderr.strip()[-1500:] or f"ended with {child.returncode}"}
    line: Line = json.loads(child.stdout.strip().splitlines()[-1])
    return line


def vars_of(work: Work) -> dict[str, Any]:
    """Return a row's fields."""
    return {name: getattr(work, name) for name in Work.__dataclass_fields__}


def turns(works: Sequence[Work], rounds: int) -> Iterator[tuple[Work, int, str]]:
    """Yield what is measured, in order: every row's contestants once, then all again.

    Captured micro-batches wait until all rows have the others, and eager blocks, nobody's best,
    until all have those.

    >>> [name for _, turn, name in turns(TINY_WORKS[:1], 2) if turn == 1][:2]
    ['plain', 'launch']
    """
    compared = [name for name in CONTESTANTS if name not in (GRAPHS, EAGER)]
    for turn in range(rounds):
        for names in (compared, [GRAPHS], [EAGER]):
            for work, name in itertools.product(works, names):
                yield work, turn, name


HEADINGS = (
    "model, samples", "contestant", "step", "tokens/s", "of peak", "of the best other", "peak",
    "first step, again",
)  # fmt: skip


def table(lines: Sequence[Line], works: Sequence[Work]) -> str:
    """Return the results as Markdown; a row's seconds are medians of all its turns."""
    text = [f"| {' | '.join(HEADINGS)} |", "|---|---|---:|---:|---:|---:|---:|---:|"]
    for work in works:
        text += [f"| {' | '.join(row)} |" for row in table_rows(lines, work)]
    return "\n".join([*text, ""])


def table_rows(lines: Sequence[Line], work: Work) -> Iterator[list[str]]:
    """Yield the cells of a row's contestants, each prediction below what it predicts."""
    rows = {name: [x for x in lines if (x["key"], x["case"]) == (work.key, name)]
            for name in CONTESTANTS}  # fmt: skip
    steps_s = {
        name: statistics.median([s for x in measured for s in x["seconds"]])
        for name, measured in rows.items()
        if measured and all("seconds" in x for x in measured)
    }
    others_s = [s for name, s in steps_s.items() if not name.startswith("launch")]
    # Seconds in which a device at its peak would do the arithmetic of the model.
    ideal_s = [x["predicted_s"] * x["mfu"] for x in rows["launch"] if x.get("mfu")]
    sizes = {name: rows[name][0].get("trained") for name in steps_s}
    for name, measured in rows.items():
        if name not in steps_s:
            reasons = [x["failed"].splitlines()[-1][:80] for x in measured if "failed" in x]
            yield [work.key, name, "".join(reasons[:1]) or "not run", *[""] * (len(HEADINGS) - 3)]
            continue
        step_s = steps_s[name]
        called = name
        if name != "plain" and None not in (sizes[name], sizes.get("plain")):
            other = sizes[name] != sizes["plain"]
            called += f" (trains {sizes[name] / 1e6:.3g} M parameters)" * other
        first_s = [seconds_text(x["first_s"]) for x in measured]
        yield [
            work.key,
            called,
            seconds_text(step_s),
            f"{work.samples * work.seq_len / step_s:,.0f}",
            f"{100 * ideal_s[0] / step_s:.1f} %" if ideal_s else "",
            f"{min(others_s) / step_s:.2f}" if others_s else "",
            bytes_text(max(x["peak_bytes"] for x in measured)),
            ", ".join(first_s),
        ]
        if "predicted_s" in measured[0]:
            predicted = measured[0]
            error = 100 * (predicted["predicted_s"] / step_s - 1)
            cells = ["", "predicted", f"{seconds_text(predicted['predicted_s'])} ({error:+.0f} %)"]
            cells += ["", f"{100 * predicted.get('mfu', 0):.1f} %", ""]
            yield [*cells, bytes_text(predicted["predicted_bytes"]), ""]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("versus"))
    parser.add_argument("--seconds", type=float, default=540.0, help="begin nothing after these")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any machine")
    parser.add_argument("--contestant", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--begin-s", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("versus.py: no CUDA device; --tiny is a dry run on the CPU")
    setting = Setting(steps=args.steps, on_cuda=not args.tiny, begin_s=args.begin_s)
    if args.contestant:
        work = Work(**json.loads(args.work))
        print(json.dumps(CONTESTANTS[args.contestant](work, setting)))
        return
    deadline_s = time.monotonic() + args.seconds
    works = TINY_WORKS if args.tiny else WORKS
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "versus.jsonl"
    for work, turn, name in turns(works, args.rounds):
        done = {(x["key"], x["turn"], x["case"]) for x in read_lines(file)}
        if (work.key, turn, name) in done or time.monotonic() > deadline_s:
            continue
        line = {"key": work.key, "turn": turn, "case": name} | measure(name, work, setting)
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(f"{work.key}: {name}: {json.dumps(line)[:160]}", flush=True)
    write_text(table(read_lines(file), works), args.out / "versus.md")
    print((args.out / "versus.md").read_text())


if __name__ == "__main__":
    main()
