"""What frameworks print while they train, line for line as they print it, is read as seconds."""

import pytest

from meshwright.planner.documents.plan import Job
from meshwright.planner.framework_configs.logs import READERS, LoggedWork, Said, out_of_memory

WORK = LoggedWork(job=Job(seq_len=4096, global_batch=64), devices=16)

MEGATRON = """\
> building train, validation, and test datasets ...
 [2025-09-05 16:08:12] iteration        1/    2000 | consumed samples:          128 | \
elapsed time per iteration (ms): 78531.9 | throughput per GPU (TFLOP/s/GPU): 18.0 | \
learning rate: 2.999998E-05 | global batch size:   128 | lm loss: 2.605958E+00 | loss scale: 1.0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 26222.7236328125 | max allocated: \
63359.77001953125 | reserved: 66802.0 | max reserved: 66802.0
 [2025-09-05 16:08:25] iteration        2/    2000 | consumed samples:          256 | \
elapsed time per iteration (ms): 11182.0 | throughput per GPU (TFLOP/s/GPU): 128.2 |
 [2025-09-05 16:10:04] iteration       10/    2000 | consumed samples:         1280 | \
elapsed time per iteration (ms): 11040.5/11050.0 | throughput per GPU (TFLOP/s/GPU): 129.8 |
"""
TORCHTITAN = """\
[rank0]:[titan] 2025-06-21 10:50:42,011 - root - INFO - Training starts at step 1
[rank0]:[titan] 2025-06-21 10:50:50,200 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2551  \
\x1b[38;2;180;60;0mgrad_norm:  4.1087  \x1b[38;2;54;234;195mmemory: 51.24GiB(64.72%)  \
\x1b[34mtps: 1,024  \x1b[36mtflops: 50.11  \x1b[35mmfu: 5.07%\x1b[39m
[rank0]:[titan] 2025-06-21 10:51:30,418 - root - INFO - step: 10  loss: 10.1  memory: \
52.00GiB(65.7%)  tps: 8,192  tflops: 401.00  mfu: 40.55%
"""
DEEPSPEED = """\
[2023-11-07 01:55:23,711] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=4, lr=[4e-05]
[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step=10, \
RunningAvgSamplesPerSec=25.025771473496132, CurrSamplesPerSec=25.6, MemAllocated=4.32GB, \
MaxMemAllocated=38.49GB
"""
ACCELERATE = """\
  0%|          | 0/30 [00:00<?, ?it/s]\r  3%|3         | 1/30 [00:09<04:35,  9.50s/it]\r\
 17%|#6        | 5/30 [00:17<01:10,  2.00s/it]\r 17%|#6        | 5/30 [00:18<01:10,  2.00s/it]
{'loss': 2.3, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1}
100%|##########| 30/30 [00:30<00:00,  4.00it/s]
{'train_runtime': 31.2, 'train_samples_per_second': 61.5, 'train_steps_per_second': 0.96}
"""


def read(framework: str, text: str) -> list[Said]:
    return list(READERS[framework](text.splitlines(keepends=True), WORK))


def test_megatron_prints_milliseconds_and_megabytes() -> None:
    first, memory, second, last = read("megatron", MEGATRON)

    assert (first.step_s, second.step_s, last.step_s) == (78.5319, 11.182, 11.0405)
    assert last.steps == 8  # the mean of iterations 3 to 10
    assert memory.peak_bytes == 66802 * 2**20


def test_torchtitan_prints_tokens_a_second_of_one_device_in_colours() -> None:
    first, last = read("torchtitan", TORCHTITAN)

    assert first.step_s == 4096 * 64 / 16 / 1024
    assert last.step_s == 2.0
    assert last.steps == 9
    assert last.peak_bytes == 52 * 2**30


def test_deepspeed_prints_samples_a_second_of_the_whole_job() -> None:
    [said] = read("deepspeed", DEEPSPEED)

    assert said.step_s == pytest.approx(2.5)
    assert said.peak_bytes == pytest.approx(38.49 * 2**30)


def test_lines_that_every_rank_prints_count_once() -> None:
    """As torchtitan's log looks where all ranks' output is shown (its pull request 2389)."""
    lines = [
        f"[titan] 2026-02-24 19:46:{step:02},508 - root - INFO - step:  {step}  loss:  7.62  "
        f"grad_norm: 26.62  memory: 66.91GiB(37.51%)  tps: {16_384 + rank:,}  tflops: 314.7  "
        "mfu: 13.99%\n"
        for step in (1, 2, 3)
        for rank in range(8)
    ]

    said = read("torchtitan", "".join(lines))

    assert [one.steps for one in said] == [1, 1, 1]
    assert [one.step_s for one in said] == [1.0, 1.0, 1.0]


def test_older_deepspeed_counts_steps_otherwise_and_tells_the_mean() -> None:
    """As of DeepSpeed 0.5 (its issue 1825) and 0.7 (2629)."""
    old = "[2022-03-11 02:06:58,985] [INFO] [timer.py:189:stop] 0/{}, SamplesPerSec=32.0, "
    newer = "[INFO] [timer.py:197:stop] 0/{}, RunningAvgSamplesPerSec=158.3, CurrSamplesPerSec=64, "
    memory = "MemAllocated=0.26GB, MaxMemAllocated=9.02GB\n"

    mean = read("deepspeed", old.format(40) + memory + old.format(50) + memory)
    newest = read("deepspeed", newer.format(17) + memory + newer.format(18) + memory)

    assert [(one.step_s, one.steps) for one in mean] == [(2.0, 1), (2.0, 10)]
    assert [(one.step_s, one.steps) for one in newest] == [(1.0, 1), (1.0, 1)]
    assert mean[0].peak_bytes == pytest.approx(9.02 * 2**30)


def test_megatron_with_deepspeed_prints_both() -> None:
    """As of Megatron-DeepSpeed (DeepSpeed's issue 3742)."""
    log = (
        "[2023-07-25 21:03:17,269] [INFO] [timer.py:215:stop] epoch=0/micro_step=34/global_step=34,"
        " RunningAvgSamplesPerSec=7.86, CurrSamplesPerSec=8.0, MaxMemAllocated=63.31GB\n"
        " samples/sec: 7.799 | iteration       34/   10000 | elapsed time per iteration (ms): "
        "4103.1 | learning rate: 2.111E-06 | approx flops per GPU: 112.9TFLOPS |\n"
    )

    assert [one.step_s for one in read("megatron-deepspeed", log)] == [4.1031]
    assert [one.step_s for one in read("deepspeed", log)] == [8.0]


def test_bars_before_and_beside_training_are_no_steps() -> None:
    """As transformers shows them while it loads and evaluates, and behind DeepSpeed's lines."""
    log = (
        "Loading checkpoint shards: 100%|##########| 4/4 [00:06<00:00,  1.62s/it]\n"
        "Map: 100%|##########| 1000/1000 [00:01<00:00, 812.01 examples/s]\n"
        "  0%|          | 1/24 [00:03<01:09,  3.00s/it]\r"
        "  8%|8         | 2/24 [00:05<01:02,  2.50s/it][2021-11-26 03:07:16] [INFO] lr=[0.001]\n"
        "100%|##########| 50/50 [00:10<00:00,  4.90it/s]\n"
        "[rank0]: 12%|#2        | 3/24 [00:08<00:52,  2.25s/it]\n"
    )

    said = read("accelerate", log)

    assert [(one.step_s, one.steps) for one in said] == [(3.0, 1), (2.5, 1), (2.25, 1)]
    assert read("accelerate", "Steps:  40%|####  | 4/10 [00:08<00:12,  2.00s/it]\n")


@pytest.mark.parametrize("framework", sorted(READERS))
@pytest.mark.parametrize(
    "text", [MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE, "step: x tps: \n", "tps: 0 step: 3\n"]
)
def test_no_log_of_another_framework_is_an_error(framework: str, text: str) -> None:
    assert all(one.step_s is None or one.step_s > 0 for one in read(framework, text))


def test_a_lack_of_memory_is_told_from_other_ends() -> None:
    assert out_of_memory("RuntimeError: HIP out of memory. Tried to allocate 1.00 GiB")
    assert out_of_memory("rank 3 ran out of device memory (plan again ...)")
    assert not out_of_memory("RuntimeError: CUDA error: device-side assert triggered")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("figure", ["0.0", "9e400", "0", "1e-400", "1,0e9999"])
def test_seconds_that_no_clock_gives_are_left_out(name: str, figure: str) -> None:
    work = LoggedWork(job=Job(seq_len=64, global_batch=8), devices=2)
    lines = [
        f" iteration  20/ 50 | elapsed time per iteration (ms): {figure} |",
        f"memory (MB) | max allocated: 1.0 | max reserved: {figure}",
        f"step: 10  loss:  7.1  memory: {figure}GiB(50.5%)  tps: {figure}",
        f"global_step=10, CurrSamplesPerSec={figure}, MaxMemAllocated={figure}GB",
        f" 40%|####  | 4/10 [00:08<00:12,  {figure}s/it]",
        f" 60%|####  | 6/10 [00:08<00:12,  {figure}it/s]",
        f"'train_steps_per_second': {figure}",
    ]

    assert list(READERS[name](lines, work)) == []
