"""Data prepared and checked, and what the ranks of a launch read: the same on all nodes."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from meshwright.planner.documents.document import read, write
from meshwright.planner.documents.units import count_text
from meshwright.planner.errors import LaunchError
from meshwright.planner.report.terminal import Terminal
from meshwright.planner.system.safe_files import folder_within, open_below
from meshwright.runtime.checkpoint import checkpoint, object_store
from meshwright.runtime.checkpoint.checkpoint import Progress
from meshwright.runtime.data import corpus as data
from meshwright.runtime.data.corpus import Corpus
from meshwright.runtime.engine.unsupported import documents_refused
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.launch.preflight import Preflight
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.rendezvous import Rendezvous
from meshwright.runtime.run.run_folder import RankOrders


def _agree(ready: Preflight, rendezvous: Rendezvous, corpus: str) -> str:
    """Refuse nodes that would do different things; return the run's token, the same on all."""
    rendezvous.agree(
        {
            "plan": ready.plan.digest,
            "steps": ready.run.steps,
            "text": corpus,
            "resumed checkpoint": object_store.shown(str(ready.resumed)),
            "folder of checkpoints": object_store.shown(str(ready.run.checkpoint)),
            "steps between checkpoints": str(ready.run.checkpoint_every),
        }
    )
    token = str(rendezvous.all_gather(secrets.token_hex(8))[0])
    is_shared = ready.run.checkpoint is None or object_store.store_of(ready.run.checkpoint) is None
    if ready.run.checkpoint is not None and rendezvous.node_rank.nodes > 1 and is_shared:
        _check_shared(ready.run.checkpoint, rendezvous, token=token)
    return token


def _check_shared(folder: Path, rendezvous: Rendezvous, *, token: str) -> None:
    """Refuse a folder that is not one and the same on all nodes."""
    mark = folder / f".seen-{token}"
    if rendezvous.node_rank.node == 0:
        folder.mkdir(parents=True, exist_ok=True)
        open_below(mark, within=folder).close()
    rendezvous.all_gather("marked")
    # A network file system may show a listing that is seconds old.
    with contextlib.suppress(OSError):
        list(folder.iterdir())
    seen = rendezvous.all_gather(mark.exists())
    if rendezvous.node_rank.node == 0:
        mark.unlink()
    if not all(seen):
        raise LaunchError(
            f"{folder}: is not the same folder on node {seen.index(False)}; checkpoints of several "
            "nodes need one that all of them share"
        )


def write_orders(
    ready: Preflight,
    rendezvous: Rendezvous,
    asked: Launch,
    say: Terminal,
    *,
    started_unix_s: float,
) -> RankOrders | None:
    """Prepare the data, check it against the model, and write what the ranks will read.

    None where the checkpoint is of this training, and nothing is left to do: nothing is written.
    """
    if not asked.again:
        say.print(f"preparing {len(ready.files.paths)} files of {ready.files.source}")
    corpus = data.prepare(ready.files, tokenizer=ready.tokenizer)
    if asked.again:
        _refuse_other_data(ready, corpus)
    left_out = f" ({corpus.skipped} files are not UTF-8 text)" if corpus.skipped else ""
    here = (
        ""
        if rendezvous.node_rank.nodes == 1
        else f", {len(ready.ranks.devices)} of them on this node"
    )
    if corpus.kind == "conversations":
        if reason := documents_refused(ready.plan, ready.model):
            raise LaunchError(reason)
        _tell_conversations(corpus, ready, say)
        left_out = f", of which {count_text(corpus.counted)} count"
    say.print(
        f"{count_text(corpus.tokens)} tokens by {corpus.tokenizer}{left_out}; "
        f"{ready.ranks.world} ranks on {ready.ranks.device}{here}, {ready.plan.layout_text}; "
        f"in {ready.output}"
    )
    held_out = data.prepare(ready.held_out, tokenizer=ready.tokenizer) if ready.held_out else None
    for text in (corpus, held_out):
        if text is not None and ready.model.architecture is not None:
            text.check_vocabulary(ready.model.architecture.vocab_size)
    if held_out is not None and held_out.kind != corpus.kind:
        raise LaunchError(
            f"evaluate: {held_out.source} has {held_out.kind}, and training is on {corpus.kind}; "
            "give held-out data of the same kind"
        )
    if held_out is not None and held_out.digest == corpus.digest:
        raise LaunchError(f"evaluate: {held_out.source} is what is trained on; hold other text out")
    if ready.resumed is not None:
        progress: Progress = checkpoint.progress(ready.resumed)
        progress.check(
            plan=ready.plan,
            model=ready.model,
            corpus=corpus,
            folder=ready.resumed,
            frozen=checkpoint.frozen_weights(ready.plan, ready.run.weights),
        )
        if ready.nothing_left is not None:
            say.print(ready.nothing_left)
            return None
        say.print(f"going on from {object_store.shown(ready.resumed)}")
    orders = RankOrders(
        **{
            **ready.run.model_dump(),
            "tokenizer": ready.tokenizer and ready.tokenizer.resolve(),
            "evaluate": held_out and held_out.folder.resolve(),
            "output": ready.output,
        },
        started_unix_s=started_unix_s,
        peak_step_s=asked.peak_step_s,
        predicted_step_s=asked.predicted_step_s,
        saves=asked.saves,
        copies=asked.copies,
        token=_agree(ready, rendezvous, corpus.digest),
        corpus=corpus.folder.resolve(),
        device=ready.ranks.device,
        resumed=ready.resumed,
    )
    for left_behind in ("logs", "ranks", "flight"):
        folder_within(ready.output, left_behind, emptied_of="rank-*")
    run.forget_steps_after(
        checkpoint.progress(ready.resumed).step if ready.resumed else 0,
        run.metrics_file(ready.output),
    )
    write(ready.plan, run.plan_file(ready.output))
    write(ready.model, run.model_file(ready.output))
    if asked.prediction is not None:
        write(asked.prediction, run.prediction_file(ready.output))
    write(orders, run.orders_file(ready.output))
    return orders


def _refuse_other_data(ready: Preflight, corpus: Corpus) -> None:
    """Refuse data that have changed since the attempt before of the same run."""
    file = run.orders_file(ready.output)
    if not file.exists():
        return
    before = Corpus.open(read(RankOrders, file).corpus)
    if before.digest != corpus.digest:
        raise LaunchError(
            f"{corpus.source}: has changed since the run began: it had {count_text(before.tokens)} "
            f"tokens ({before.digest}) and has {count_text(corpus.tokens)} ({corpus.digest}); put "
            "back what it was, and start the run again with --resume"
        )


def _tell_conversations(corpus: Corpus, ready: Preflight, say: Terminal) -> None:
    """Print how conversations are laid into samples, and the first of them with what counts."""
    from meshwright.runtime.data.chat import Conversations  # noqa: PLC0415 - imports transformers
    from meshwright.runtime.data.packing import PackedSamples  # noqa: PLC0415

    assert ready.tokenizer is not None
    plan = ready.plan
    samples = PackedSamples(corpus, seq_len=plan.seq_len, seed=plan.training.seed)
    rows = len(samples.rows)
    notes = [f"{corpus.documents} conversations in {rows} samples of {plan.seq_len} tokens"]
    lengths = [length for row in range(rows) for _, length in samples.places(row)]
    span = round(sum(length**2 for length in lengths) / sum(lengths))
    planned = plan.document_len or plan.seq_len
    notes.append(f"the conversation of a token has {span} on average")
    if not planned / 2 < span < 2 * planned:
        notes.append(f"the plan counts on {planned}: plan with --document-len {span}")
    if samples.cut:
        notes.append(f"{samples.cut} are longer and cut off")
    if corpus.skipped:
        notes.append(f"{corpus.skipped} say nothing that counts and are left out")
    say.print("; ".join(notes))
    first = samples.batch(0, 1)
    assert first.counts is not None
    places = samples.places(0)
    length = sum(length for _, length in places)
    say.print(
        f"the first sample has {len(places)} of them, and the loss counts "
        f"{int(first.counts.sum())} of its {plan.seq_len} targets, which stand in [[ ]]:"
    )
    marks = [False, *first.counts[0].tolist()]
    shown = Conversations(ready.tokenizer).marked_text(first.tokens[0].tolist()[:length], marks)
    say.print(shown)
