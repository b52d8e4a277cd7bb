"""The other peers' problems, invented and tiny, against everything that can be listed."""

from __future__ import annotations

import json
import random
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import (
    dnn_partitioning,
    galvatron,
    sailor,
    sailor_mixed,
    sailor_search,
    sailor_validation,
)


def assignment_problem(seed: int, layers: int = 4, strategies: int = 4) -> dict[str, Any]:
    """Strategies 0, 1 and 2, 3 follow each other free of charge one way; other changes cost.

    In every other problem only staying with a strategy is free.
    """
    rng = random.Random(seed)
    apart_s, kin = rng.choice([0.02, 0.1, 0.5]), 2 - seed % 2
    change = [
        [0.0 if a // kin == b // kin and a <= b else apart_s for b in range(strategies)]
        for a in range(strategies)
    ]
    for a in range(0, strategies, 2) if kin == 2 else ():
        change[a + 1][a] = 0.001
    sizes = [rng.randint(1, 9) for _ in range(strategies)]
    return {
        "layers": layers,
        "mem_cap_mb": rng.randint(10, 30),
        "layer_mem_mb": [sizes] * layers,
        "layer_time_s": [[rng.uniform(1, 2) + (9 - size) / 9 for size in sizes]] * layers,
        "transition_time_s_first": change,
        "other_mem_mb": {"x": 2.0},
        "other_time_s": {"x": 0.5},
        "embed_option": "x",
    }


@pytest.mark.parametrize("seed", range(30))
def test_galvatron_no_assignment_undercuts_the_bound(seed: int) -> None:
    case = assignment_problem(seed)

    answer = galvatron.best_assignment(case)

    listed = [
        galvatron.cost_s(case, strategies)
        for strategies in product(range(4), repeat=4)
        if galvatron.needed_mb(case, strategies) <= case["mem_cap_mb"]
    ]
    if answer is None:
        assert not listed
        return
    assert galvatron.needed_mb(case, answer.strategies) <= case["mem_cap_mb"]
    assert answer.cost_s == pytest.approx(galvatron.cost_s(case, answer.strategies))
    assert answer.lower_bound_s <= min(listed) * (1 + 1e-12)
    assert answer.cost_s >= min(listed) * (1 - 1e-12)
    assert not answer.optimal or answer.cost_s == pytest.approx(min(listed))


def test_galvatron_most_of_the_invented_problems_are_proven() -> None:
    answers = [galvatron.best_assignment(assignment_problem(seed)) for seed in range(30)]

    assert sum(answer is not None and answer.optimal for answer in answers) >= 20


def test_galvatron_what_is_not_the_best_is_not_called_so() -> None:
    case = {
        "layers": 4,
        "mem_cap_mb": 14,
        "layer_mem_mb": [[5, 3, 1]] * 4,
        "layer_time_s": [[1.0, 2.1, 3.0]] * 4,
        "transition_time_s_first": [[0.3 * (a != b) for b in range(3)] for a in range(3)],
        "other_mem_mb": {"x": 0.0},
        "other_time_s": {"x": 0.0},
        "embed_option": "x",
    }

    answer = galvatron.best_assignment(case)

    # All three strategies take 7.1 s and two changes; one and three layers 7.3 s and one change.
    assert answer is not None
    assert answer.cost_s == pytest.approx(7.7)
    assert galvatron.cost_s(case, [0, 1, 1, 1]) == pytest.approx(7.6)
    assert answer.lower_bound_s == pytest.approx(7.4)
    assert not answer.optimal


def test_galvatron_layers_that_differ_are_refused() -> None:
    case = assignment_problem(0)
    case["layer_time_s"] = [*case["layer_time_s"][:-1], [1.0] * 4]

    with pytest.raises(ValueError, match="layers differ"):
        galvatron.best_assignment(case)


def training_graph(seed: int, edges: list[tuple[int, int]], layers: int) -> dict[str, Any]:
    rng = random.Random(seed)
    nodes, both = [], []
    sent = [rng.uniform(0, 0.4) for _ in range(2 * layers)]
    for node in range(2 * layers):
        acc_ms = rng.uniform(0, 3)
        nodes.append(
            {
                "id": node,
                "acc_ms": acc_ms,
                "cpu_ms": 4 * acc_ms,
                "bytes": rng.uniform(1, 3),
                "backward": int(node >= layers),
                "colocate": node % layers,
            }
        )
    for half in (0, layers):
        both += [
            {"src": a + half, "dst": b + half, "transfer_ms": sent[a + half]} for a, b in edges
        ]
    devices = {"accelerators": 3, "cpus": 1, "accelerator_mem_bytes": 16.0}
    return {"devices": devices, "nodes": nodes, "edges": both}


def least_load_ms(case: dict[str, Any], edges: list[tuple[int, int]], layers: int) -> float:
    """Least over all placements whose devices can be put in the order of the graph."""
    best = float("inf")
    for device in product(range(4), repeat=layers):
        held = [
            [n["id"] for n in case["nodes"] if device[n["id"] % layers] == on] for on in range(4)
        ]
        room = case["devices"]["accelerator_mem_bytes"]
        if any(sum(case["nodes"][n]["bytes"] for n in nodes) > room for nodes in held[:3]):
            continue
        # Number 3 is the CPU, which may stand anywhere among the accelerators.
        for cpu_at in range(4):
            place = {0: 0, 1: 1, 2: 2, 3: cpu_at - 0.5}
            if all(place[device[a]] <= place[device[b]] for a, b in edges):
                best = min(best, dnn_partitioning.max_load_ms(case, held[:3], held[3:]))
    return best


CHAIN = [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("seed", range(6))
def test_dnn_partitioning_no_split_of_a_chain_has_a_lower_largest_load(seed: int) -> None:
    case = training_graph(seed, CHAIN, 5)
    for node in case["nodes"]:
        node["cpu_ms"] *= 1e3  # so slow that it is of no use, and may pay for transfers

    load_ms, accelerators, cpus = dnn_partitioning.best_split(case)

    assert load_ms == pytest.approx(least_load_ms(case, CHAIN, 5))
    assert load_ms == dnn_partitioning.max_load_ms(case, accelerators, cpus)


@pytest.mark.parametrize("seed", range(6))
def test_dnn_partitioning_a_useful_cpu_and_branches_are_solved_from_above(seed: int) -> None:
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3), (3, 4)]
    case = training_graph(seed, edges, 5)

    load_ms, accelerators, cpus = dnn_partitioning.best_split(case)

    best_ms = least_load_ms(case, edges, 5)
    assert dnn_partitioning.least_load_ms(case) == pytest.approx(best_ms)
    most_sent = sum(edge["transfer_ms"] for edge in case["edges"])
    assert best_ms * (1 - 1e-12) <= load_ms <= best_ms + 2 * most_sent
    assert load_ms == dnn_partitioning.max_load_ms(case, accelerators, cpus)


def test_dnn_partitioning_only_the_least_load_is_called_proven() -> None:
    told = [dnn_partitioning.proven_split(training_graph(seed, CHAIN, 5)) for seed in range(6)]

    for seed, (load_ms, proven) in enumerate(told):
        best_ms = least_load_ms(training_graph(seed, CHAIN, 5), CHAIN, 5)
        assert proven == (load_ms == pytest.approx(best_ms, rel=1e-9))
    assert any(proven for _, proven in told)


def test_dnn_partitioning_a_transfer_counts_once_on_each_device_and_never_on_a_cpu() -> None:
    times = {"acc_ms": 1.0, "cpu_ms": 2.5, "bytes": 0.0}
    case = {
        "nodes": [times | {"id": at} for at in range(3)],
        "edges": [
            {"src": 0, "dst": 1, "transfer_ms": 10.0},
            {"src": 0, "dst": 2, "transfer_ms": 10.0},
        ],
    }

    assert dnn_partitioning.max_load_ms(case, [[0], [1, 2]], []) == 12.0
    assert dnn_partitioning.max_load_ms(case, [[0], [1], [2]], []) == 11.0
    assert dnn_partitioning.max_load_ms(case, [[1, 2]], [[0]]) == 12.0
    assert dnn_partitioning.max_load_ms(case, [[0, 1]], [[2]]) == 12.0
    assert dnn_partitioning.max_load_ms(case, [], [[0], [1, 2]]) == 5.0


def iteration_problem(seed: int) -> dict[str, Any]:
    """Five layers, four GPUs; the output of the last layer is larger than the others'."""
    rng = random.Random(seed)
    of_degree: dict[str, Any] = {
        str(t): {
            "params": [rng.uniform(1e6, 4e6) / t for _ in range(5)],
            "act_floats": [rng.uniform(1e6, 2e6) / t for _ in range(5)],
        }
        for t in (1, 2)
    }
    profile: dict[str, Any] = {
        str(b): {
            str(t): {
                "fwd_s": [b * rng.uniform(0.001, 0.003) / t for _ in range(5)],
                "bwd_s": [b * rng.uniform(0.002, 0.006) / t for _ in range(5)],
                "update_s": [0.004 / t] * 5,
            }
            for t in (1, 2)
        }
        for b in (1, 2)
    }
    link = [0.1, 1.0]
    return {
        "global_batch_size": 8,
        "gpus": {"G": 4},
        "gpus_per_node": {"G": 4},
        "model": {
            "act_output_bytes_tp1": [*[rng.choice([3e5, 2e6])] * 4, rng.choice([9e6, 9e8])],
            "param_bytes_tp1": [rng.uniform(5e6, 4e7) for _ in range(5)],
        },
        "memory": {
            "bytes_per_param": 16,
            "bytes_per_float": 4,
            "framework_bytes_tp1": 1e7,
            "framework_bytes_tp_gt1": 2e7,
            "capacity_bytes": {"G": rng.choice([8e7, 1.2e8, 5e8])},
            "per_tp": of_degree,
        },
        "network": {
            "p2p_poly": {"G": {a: {"G": dict.fromkeys(("1", "2"), link)} for a in ("1", "2")}}
        },
        "profile": {"G": profile},
    }


def every_layout_plan(raw: dict[str, Any]) -> list[dict[str, Any]]:
    plans = []
    for micro_batch, tensor, replicas, pipelines in product((1, 2), (1, 2), (1, 2, 3, 4), (1, 2)):
        for inner in product((False, True), repeat=4):
            cuts = [0, *(at + 1 for at, cut in enumerate(inner) if cut), 5]
            if tensor * replicas * pipelines * (len(cuts) - 1) > 4:
                continue
            pipeline = {
                "layers_per_stage": [list(range(a, b)) for a, b in pairwise(cuts)],
                "stages": [[{"gpu": "G", "tp": tensor}] * replicas] * (len(cuts) - 1),
            }
            plans.append({"mbs": micro_batch, "pipelines": [pipeline] * pipelines})
    return plans


@pytest.mark.spread(6)
@pytest.mark.parametrize("seed", range(12))
def test_sailor_no_listed_layout_undercuts_the_bound(seed: int) -> None:
    raw = iteration_problem(seed)

    found = sailor_search.Search(raw).best()

    scores = [sailor.score(sailor.Case(raw), plan) for plan in every_layout_plan(raw)]
    listed = [one.iteration_s for one in scores if one.fits]
    if found is None:
        assert not listed
        return
    assert found.lower_bound_s <= min(listed) * (1 + 1e-12)
    assert min(listed) * (1 - 1e-12) <= found.iteration_s <= 1.05 * min(listed)
    if found.lower_bound_s >= found.iteration_s * (1 - 1e-9):
        assert found.iteration_s == pytest.approx(min(listed))


def test_sailor_some_searches_end_with_a_proof() -> None:
    found = [sailor_search.Search(iteration_problem(seed)).best() for seed in range(12)]

    assert any(f and f.lower_bound_s >= f.iteration_s * (1 - 1e-9) for f in found)


def mixed_problem(seed: int) -> dict[str, Any]:
    """The same with two GPUs of another type, slower and smaller, over slower links."""
    raw, rng = iteration_problem(seed), random.Random(seed + 99)
    raw["gpus"] = {"G": 2, "H": 2}
    raw["gpus_per_node"] = {"G": 2, "H": 2}
    capacity_bytes = raw["memory"]["capacity_bytes"]
    capacity_bytes["H"] = capacity_bytes["G"] * rng.choice([0.7, 1.0])
    slower = rng.uniform(1.1, 2.5)
    raw["profile"]["H"] = {
        b: {
            t: {what: [slower * one for one in values] for what, values in parts.items()}
            for t, parts in degrees.items()
        }
        for b, degrees in raw["profile"]["G"].items()
    }
    rates = {("G", "G"): 1.0, ("H", "H"): 0.8, ("G", "H"): 0.5, ("H", "G"): 0.4}
    raw["network"]["p2p_poly"] = {
        one: {
            a: {other: {b: [0.1, rates[one, other]] for b in ("1", "2")} for other in "GH"}
            for a in ("1", "2")
        }
        for one in "GH"
    }
    return raw


def every_mixed_plan(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Pipelines whose stages have as many replicas, each of any type and width, in any order."""
    plans = []
    members = [{"gpu": gpu, "tp": tensor} for gpu in "GH" for tensor in (1, 2)]
    for micro_batch, replicas in product((1, 2), (1, 2, 3, 4)):
        for inner in product((False, True), repeat=4):
            cuts = [0, *(at + 1 for at, cut in enumerate(inner) if cut), 5]
            stages = len(cuts) - 1
            if stages * replicas > 4:
                continue
            contents = [list(range(a, b)) for a, b in pairwise(cuts)]
            for row in product(members, repeat=stages * replicas):
                if all(
                    sum(one["tp"] for one in row if one["gpu"] == gpu) <= most
                    for gpu, most in raw["gpus"].items()
                ):
                    held = [list(row[s * replicas : (s + 1) * replicas]) for s in range(stages)]
                    pipeline = {"layers_per_stage": contents, "stages": held}
                    plans.append({"mbs": micro_batch, "pipelines": [pipeline]})
    return plans


@pytest.mark.spread(4)
@pytest.mark.parametrize("seed", range(8))
def test_sailor_no_listed_plan_of_two_gpu_types_undercuts_the_bound(seed: int) -> None:
    raw = mixed_problem(seed)

    found = sailor_mixed.MixedSearch(raw).best()

    case = sailor.Case(raw)
    scores = [sailor.score(case, plan) for plan in every_mixed_plan(raw)]
    listed = [one.iteration_s for one in scores if one.fits]
    if found is None:
        assert not listed
        return
    assert found.iteration_s == pytest.approx(sailor.score(case, found.plan).iteration_s)
    assert found.lower_bound_s <= min(listed) * (1 + 1e-12)
    assert min(listed) * (1 - 1e-12) <= found.iteration_s <= 1.1 * min(listed)


def test_sailor_a_search_that_ends_early_has_the_bound_of_what_is_left() -> None:
    raw = mixed_problem(1)
    case = sailor.Case(raw)
    scores = [sailor.score(case, plan) for plan in every_mixed_plan(raw)]
    least_s = min(one.iteration_s for one in scores if one.fits)
    whole = sailor_mixed.MixedSearch(raw).best()

    found = sailor_mixed.MixedSearch(raw | {"most_multisets": 12}).best()

    assert whole is not None
    assert found is not None
    assert found.solved < whole.solved
    assert found.lower_bound_s < whole.lower_bound_s <= least_s * (1 + 1e-12)
    assert found.iteration_s >= least_s * (1 - 1e-12)


def test_sailor_replicas_of_two_types_share_a_stage_where_cuts_are_dear() -> None:
    raw = mixed_problem(0) | {"gpus": {"G": 1, "H": 2}}
    raw["memory"]["capacity_bytes"] = {"G": 5e9, "H": 5e9}
    raw["model"] |= {"act_output_bytes_tp1": [9e7] * 5, "param_bytes_tp1": [5e6] * 5}
    for b, degrees in raw["profile"]["H"].items():  # two of them are as fast as one of the other
        degrees["2"] = raw["profile"]["G"][b]["1"]

    found = sailor_mixed.MixedSearch(raw).best()

    assert found is not None
    [pipeline] = found.plan["pipelines"]
    assert pipeline["stages"] == [[{"gpu": "G", "tp": 1}, {"gpu": "H", "tp": 2}]]
    case = sailor.Case(raw)
    listed = [sailor.score(case, plan).iteration_s for plan in every_mixed_plan(raw)]
    assert found.iteration_s == pytest.approx(min(listed))
    assert found.lower_bound_s == pytest.approx(found.iteration_s)


def test_sailor_a_step_is_its_slowest_stage_times_all_but_one_micro_batch() -> None:
    raw = iteration_problem(0)
    layers_s = {"fwd_s": [0.01] * 5, "bwd_s": [0.02] * 5, "update_s": [0.5] * 5}
    raw["profile"]["G"]["1"]["1"] = layers_s
    raw["model"]["act_output_bytes_tp1"] = [2e6] * 5
    raw["network"]["p2p_poly"]["G"]["1"]["G"]["1"] = [2.0]  # 2 GB/s whatever the size
    plan = {
        "mbs": 1,
        "pipelines": [
            {
                "layers_per_stage": [[0, 1], [2, 3, 4]],
                "stages": [[{"gpu": "G", "tp": 1}] * 2] * 2,
            }
        ],
    }

    scored = sailor.score(sailor.Case(raw), plan)

    # 8 samples on 2 replicas; a transfer takes 1 ms, the last stage pays it twice.
    assert scored.micro_batches == 4
    assert scored.pipeline_s == pytest.approx(3 * 0.092 + 0.061 + 0.092 + 0.5)
    weights = raw["model"]["param_bytes_tp1"]
    largest = max(sum(weights[:2]), sum(weights[2:]))
    assert scored.all_reduce_s == pytest.approx(2 * largest / 2 / 2e9)


def test_sailor_an_all_reduce_goes_bucket_by_bucket() -> None:
    assert sailor.all_reduce_s(1.2e9, 4, [2.0]) == pytest.approx(2 * 3 / 4 * 1.2e9 / 2e9)
    assert sailor.all_reduce_s(1e9, 1, [2.0]) == 0.0
    # Half a bucket is 250 MB, half of what is left 2 MB: at log2(MB) + 1 GB/s that is 2 GB/s.
    two_rings_s = 2 * sailor.send_s(2.5e8, [1.0, 1.0]) + 2 * 0.002 / 2
    assert sailor.all_reduce_s(5.04e8, 2, [1.0, 1.0]) == pytest.approx(two_rings_s)


def grid(cuts: list[int], replicas: int) -> dict[str, Any]:
    pipeline = {
        "layers_per_stage": [list(range(a, b)) for a, b in pairwise(cuts)],
        "stages": [[{"gpu": "G", "tp": 1}] * replicas] * (len(cuts) - 1),
    }
    return {"mbs": 1, "pipelines": [pipeline]}


def test_sailor_one_stage_simulates_as_it_scores() -> None:
    case = sailor.Case(iteration_problem(3))

    simulated_s = sailor_validation.simulated_s(case, grid([0, 5], 2), 8)

    assert simulated_s == pytest.approx(sailor.score(case, grid([0, 5], 2)).iteration_s)


def test_sailor_a_transfer_keeps_both_ends_of_it_busy() -> None:
    raw = iteration_problem(3)
    layers_s = {"fwd_s": [0.01] * 5, "bwd_s": [0.02] * 5, "update_s": [0.5] * 5}
    raw["profile"]["G"]["1"]["1"] = layers_s
    raw["model"]["act_output_bytes_tp1"] = [2e6] * 5
    raw["network"]["p2p_poly"]["G"]["1"]["G"]["1"] = [2.0]  # 2 MB take 1 ms

    simulated_s = sailor_validation.simulated_s(sailor.Case(raw), grid([0, 2, 5], 1), 6)

    # Six micro-batches through the longer stage, one through the other, 2 ms in each for passing.
    assert simulated_s == pytest.approx(6 * 0.092 + 0.062 + 0.5)


def test_sailor_errors_are_means_over_the_runs(tmp_path: Path) -> None:
    raw = iteration_problem(3)
    raw["model"]["config"] = {
        "hidden_size": 128,
        "num_layers": 4,
        "heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 64,
        "sequence_length": 64,
    }
    iteration_s = sailor.score(sailor.Case(raw), grid([0, 5], 2), batch=8).iteration_s
    stored = {"theirs": {"iter_s": 0.0, "peak_mem_bytes": 5.0}, "blind": {"iter_s": 1.0}}
    raw["measurements"] = [
        {
            "file": "invented",
            "gbs": 8,
            "plan": grid([0, 5], 2),
            "measured_iter_s": iteration_s / factor,
            "measured_peak_mem_bytes": 10.0,
            "sailor_formula_pred_s": iteration_s,
            "predictions_by_ported_simulators": stored,
        }
        for factor in (1.1, 0.7)
    ]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(raw))

    rows = {row.model: row for row in sailor_validation.errors(path)}

    assert rows["ours, simulated"].time == pytest.approx(0.2)
    assert rows["theirs"].time == 1.0
    assert rows["theirs"].memory == 0.5
    assert rows["blind"].memory is None
    assert rows["ours, data sheets"].memory is not None


def test_memory_counts_micro_batches_in_flight_fragments_and_logits() -> None:
    raw = {
        "model": {"config": {"sequence_length": 10, "vocab_size": 100}},
        "memory": {
            "bytes_per_param": 24,
            "bytes_per_float": 4,
            "framework_bytes_tp1": 1000.0,
            "framework_bytes_tp_gt1": 2000.0,
            "per_tp": {"1": {"params": [1, 1], "act_floats": [50, 5]}},
        },
    }
    one = {"tp": 1}
    plan = {"mbs": 3, "pipelines": [{"layers_per_stage": [[0], [1]], "stages": [[one], [one]]}]}

    size = sailor_validation.reserved_bytes(raw, plan, 12)

    first = 24 + 2 * 3 * 50 * 4
    last = 24 + 3 * 5 * 4 + 2 * 3 * 10 * 100 * 4
    assert size == pytest.approx(1000 + 1.1 * max(first, last))
    assert sailor_validation.reserved_bytes(raw, plan, 3) == size  # the loss is on the last stage
