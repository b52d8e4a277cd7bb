"""Chat fine-tuning with LoRA: what `meshwright launch` trains, and the same in a plain loop.

The data are conversations, one a line of JSON.  The tokenizer's chat template writes them, the loss
counts what the assistant says, and several share a sample without seeing one another.

    python examples/chat_fine_tuning.py       trains under three plans of two ranks, then compares

`plain` is the same job with transformers and peft in one process: no packing, each conversation by
itself, the mean over all that the assistant says.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from meshwright.cli import main
from meshwright.runtime.core.seeds import seed_of
from meshwright.runtime.launch.launch import launch
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.techniques import lora

STEPS, LENGTH, SAMPLES = 3, 96, 8
PLANS = {
    "replicated": ["dp=2", "zero=0"],
    "ZeRO-3": ["dp=2", "zero=3"],
    "two stages": ["pp=2"],
}
SETTINGS = {
    "learning_rate": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-4,
    "weight_decay": 0.01,
    "clip_norm": 0.0,
}
RANK, ALPHA = 4, 8.0
ANSWERS = ("Yes.", "No, it does not.", "Two, I think.", "Ask again later, please.")


def conversations() -> list[list[dict[str, str]]]:
    """Return as many as fill one step, so that it is the same in any order: two to a sample."""
    made = []
    for number in range(2 * SAMPLES):
        answer = ANSWERS[number % 4]
        question = f"Question {number:02}? ".ljust(40 - len(answer), "?")
        made.append(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        )
    return made


def make_model(folder: Path) -> None:
    """Write a small Llama with random weights, its tokenizer and the conversations."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=272,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = (json.dumps({"messages": messages}) + "\n" for messages in conversations())
    (folder / "chat.jsonl").write_text("".join(rows))


def with_meshwright(folder: Path, name: str, output: Path) -> dict[str, Any]:
    """Plan, launch on two ranks and export; return losses and adapters."""
    plan = output / "plan.yaml"
    output.mkdir(parents=True)
    sizes = ["--seq-len", str(LENGTH), "--global-batch", str(SAMPLES), "--precision", "fp32"]
    fixed = [part for fix in PLANS[name] for part in ("--fix", fix)]
    adapters = ["--lora", f"rank={RANK}", "--lora", f"alpha={ALPHA}"]
    planned = ["plan", str(folder), "--cluster", "local:2", *sizes, *fixed, *adapters]
    if main([*planned, "-o", str(plan)]):
        raise SystemExit(1)
    launch(
        Launch(
            plan,
            LaunchRun(
                data=folder / "chat.jsonl",
                weights=folder,
                steps=STEPS,
                checkpoint=output / "saved",
                output=output / "run",
                training=tuple(f"{key}={value}" for key, value in SETTINGS.items()),
            ),
            device="cpu",
        )
    )
    if main(["export", str(output / "saved"), "--to", "peft", "-o", str(output / "adapters")]):
        raise SystemExit(1)
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return {
        "losses": [json.loads(line)["loss"] for line in lines],
        "adapters": load_file(output / "adapters" / "adapter_model.safetensors"),
    }


def plain(folder: Path) -> dict[str, Any]:
    """Train with transformers and peft in one process; return the same."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config)
    named = {
        name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(first_values(name, parameter))
    adamw = torch.optim.AdamW(
        named.values(),
        lr=SETTINGS["learning_rate"],
        betas=(SETTINGS["beta1"], SETTINGS["beta2"]),
        eps=SETTINGS["epsilon"],
        weight_decay=SETTINGS["weight_decay"],
    )
    losses = []
    for _ in range(STEPS):
        total, count = torch.zeros(()), 0
        for messages in conversations():
            asked = tokenizer.apply_chat_template(
                messages[:1], add_generation_prompt=True, return_dict=True
            )
            whole = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
            tokens, prompt = whole["input_ids"], len(asked["input_ids"])
            logits = model(tokens).logits[0, prompt - 1 : -1]
            total = total + functional.cross_entropy(logits, tokens[0, prompt:], reduction="sum")
            count += tokens.shape[1] - prompt
        loss = total / count
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return {"losses": losses, "adapters": {name: p.detach() for name, p in named.items()}}


def first_values(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return what Meshwright draws for an adapter from the seed and the matrix's name."""
    own = name.removeprefix("base_model.model.").removesuffix(".weight")
    own = own.replace("lora_A", "lora_a").replace("lora_B", "lora_b")
    value = torch.empty(like.shape)
    lora.fill(own, value, torch.Generator().manual_seed(seed_of(0, own)))
    return value


def distance(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """Return the largest relative distance of losses and of adapters."""
    pairs = list(zip(found["losses"], wanted["losses"], strict=True))
    far = [abs(a - b) / abs(b) for a, b in pairs]
    assert found["adapters"].keys() == wanted["adapters"].keys()
    for name, value in wanted["adapters"].items():
        far.append(float((found["adapters"][name] - value).norm() / value.norm()))
    return max(far)


def compare(folder: Path) -> dict[str, float]:
    """Return how far each plan's run lies from the plain loop."""
    make_model(folder / "model")
    wanted = plain(folder / "model")
    return {
        name: distance(with_meshwright(folder / "model", name, folder / str(at)), wanted)
        for at, name in enumerate(PLANS)
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        found = compare(Path(home))
    for name, far in found.items():
        print(f"{name}: {far:.1e} from transformers and peft in a plain loop")
    sys.exit(max(found.values()) > 1e-5)
