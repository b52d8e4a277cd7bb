"""What the attack asks: requests of different kinds, small enough for thousands of plans each."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.documents.plan import Job
from meshwright.planner.documents.training import Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a user asks, and what the plans of the attack have to do."""

    name: str
    model: str
    cluster: str
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    lora: int | None = None
    allow: str = ""
    document_len: int | None = None

    @property
    def job(self) -> Job:
        lora = Lora(rank=self.lora) if self.lora else None
        return Job(
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            precision=self.precision,  # type: ignore[arg-type]
            lora=lora,
            document_len=self.document_len,
        )

    @property
    def text(self) -> str:
        more = [f"lora rank {self.lora}"] * bool(self.lora) + [f"allow {self.allow}"] * bool(
            self.allow
        )
        more += [f"documents of {self.document_len}"] * bool(self.document_len)
        figures = f"seq {self.seq_len}, batch {self.global_batch}, {self.precision}"
        return ", ".join([f"{self.model} on {self.cluster}", figures, *more])


REQUESTS = {
    request.name: request
    for request in (
        Target(
            name="8b-8",
            model="llama-3.1-8b",
            cluster="8xh100-sxm-80gb",
            seq_len=4096,
            global_batch=64,
        ),
        Target(
            name="70b-64",
            model="llama-3.1-70b",
            cluster="8x8xh100-sxm-80gb",
            seq_len=4096,
            global_batch=256,
        ),
        Target(
            name="mixtral-16",
            model="mixtral-8x7b",
            cluster="2x8xh100-sxm-80gb",
            seq_len=4096,
            global_batch=128,
        ),
        Target(
            name="qwen3-moe-16",
            model="qwen3-30b-a3b",
            cluster="2x8xh100-sxm-80gb",
            seq_len=4096,
            global_batch=128,
        ),
        Target(
            name="gpt2-xl-4090",
            model="gpt2-xl",
            cluster="4xrtx-4090",
            seq_len=1024,
            global_batch=64,
        ),
        Target(
            name="13b-v100",
            model="llama-2-13b",
            cluster="4x8xv100-sxm-32gb",
            seq_len=2048,
            global_batch=128,
            precision="fp16",
        ),
        Target(
            name="gemma2-a100",
            model="gemma-2-9b",
            cluster="8xa100-sxm-40gb",
            seq_len=4096,
            global_batch=64,
        ),
        Target(
            name="unequal",
            model="llama-3.1-8b",
            cluster="8xh100-sxm-80gb+8xa100-sxm-80gb",
            seq_len=4096,
            global_batch=64,
        ),
        Target(
            name="unequal-v100",
            model="llama-3.2-3b",
            cluster="4xa100-sxm-80gb+4xv100-sxm-32gb",
            seq_len=2048,
            global_batch=64,
            precision="fp16",
        ),
        Target(
            name="unequal-l40s",
            model="llama-3.1-8b",
            cluster="8xh100-sxm-80gb+2x8xl40s",
            seq_len=4096,
            global_batch=96,
        ),
        Target(
            name="ethernet",
            model="llama-3.2-3b",
            cluster="8x1xrtx-4090,network=1.25GB/s",
            seq_len=4096,
            global_batch=96,
        ),
        Target(
            name="pcie-l40s",
            model="qwen2.5-7b",
            cluster="8xl40s",
            seq_len=4096,
            global_batch=64,
        ),
        Target(
            name="lora-72b",
            model="qwen2.5-72b",
            cluster="8xa100-sxm-40gb",
            seq_len=2048,
            global_batch=32,
            lora=16,
        ),
        Target(
            name="long-context",
            model="llama-3.1-8b",
            cluster="2x8xh100-sxm-80gb",
            seq_len=131072,
            global_batch=16,
        ),
        Target(
            name="offload-13b",
            model="llama-2-13b",
            cluster="4xa100-sxm-40gb",
            seq_len=4096,
            global_batch=32,
            allow="offload,compress",
        ),
        Target(
            name="fp8-documents",
            model="llama-3.1-8b",
            cluster="2x8xh100-sxm-80gb",
            seq_len=8192,
            global_batch=64,
            precision="fp8",
            document_len=1024,
        ),
        Target(
            name="deep-3b",
            model="llama-3.2-3b",
            cluster="8xrtx-3090",
            seq_len=2048,
            global_batch=96,
        ),
        Target(
            name="qwen-4090",
            model="qwen2.5-7b",
            cluster="8xrtx-4090",
            seq_len=2048,
            global_batch=64,
        ),
        Target(
            name="8b-3090",
            model="llama-3.1-8b",
            cluster="2x8xrtx-3090",
            seq_len=2048,
            global_batch=64,
        ),
        Target(
            name="gemma2-4090",
            model="gemma-2-2b",
            cluster="4xrtx-4090",
            seq_len=4096,
            global_batch=32,
        ),
        Target(
            name="neox-a100",
            model="gpt-neox-20b",
            cluster="3x8xa100-sxm-40gb",
            seq_len=2048,
            global_batch=96,
        ),
        Target(
            name="neox-offload",
            model="gpt-neox-20b",
            cluster="8xa100-sxm-40gb",
            seq_len=2048,
            global_batch=64,
            allow="offload",
        ),
        Target(
            name="unlike-7b",
            model="qwen2.5-7b",
            cluster="8xa100-sxm-80gb+7xl40s",
            seq_len=4096,
            global_batch=60,
        ),
        Target(
            name="unlike-3b",
            model="llama-3.2-3b",
            cluster="4xa100-sxm-80gb+3xl40s",
            seq_len=2048,
            global_batch=56,
        ),
        Target(
            name="unlike-lora",
            model="llama-3.2-1b",
            cluster="3xl40s+5xrtx-3090",
            seq_len=2048,
            global_batch=64,
            lora=16,
        ),
        Target(
            name="unlike-three",
            model="llama-3.2-1b",
            cluster="2xa100-sxm-40gb+3xrtx-4090+1xl40s",
            seq_len=2048,
            global_batch=30,
        ),
        Target(
            name="unequal-ethernet",
            model="llama-3.2-3b",
            cluster="2x1xa100-sxm-40gb+4x1xrtx-4090,network=1.25GB/s",
            seq_len=2048,
            global_batch=48,
        ),
        Target(
            name="8b-limited",
            model="llama-3.1-8b",
            cluster="8xh100-sxm-80gb,power_limit=0.7",
            seq_len=4096,
            global_batch=64,
        ),
        Target(
            name="1b-l40s",
            model="llama-3.2-1b",
            cluster="4xl40s",
            seq_len=4096,
            global_batch=32,
        ),
    )
}
