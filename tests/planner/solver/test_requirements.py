"""What people write for a requirement, and what it asks of a split."""

import pytest

from planner.errors import DocumentError
from planner.solver.requirements import Requirement, read_requirements
from planner.solver.sides import Tie

CHAIN = ["embedding", "block.0", "block.1", "block.2", "head"]


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("layers 0-2 together", Tie(layers=(0, 1, 2), together=True)),
        ("layer embedding on stage 0", Tie(layers=(0,), stages=(0,))),
        ("layers block.1..head on stages 1-2", Tie(layers=(2, 3, 4), stages=(1, 2))),
        ("layers 1-2 on stages 0,2", Tie(layers=(1, 2), stages=(0, 2))),
        ("at most 2 layers on stage 1", Tie(at_most=2, stages=(1,))),
        ("at most  2 layers on each stage", Tie(at_most=2)),
        (
            "layers 1-3 recompute full or selective",
            Tie(
                layers=(1, 2, 3),
                options=(
                    "full",
                    "full, offload",
                    "full, compress",
                    "selective",
                    "selective, offload",
                    "selective, compress",
                ),
            ),
        ),
        (
            "layer 4 activations keep",
            Tie(layers=(4,), options=("none", "selective", "full")),
        ),
    ],
)
def test_words_become_a_side(text: str, side: object) -> None:
    (asked,) = read_requirements([text], CHAIN)

    assert asked.tie(range(5), 3) == side


def test_stages_that_a_layout_lacks_leave_a_layer_without_a_place() -> None:
    (asked,) = read_requirements(["layers 0-1 on stage 3"], CHAIN)

    assert asked.tie(range(5), 2) is None
    assert asked.tie(range(5), 4) == Tie(layers=(0, 1), stages=(3,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("put it anywhere", "write 'layers 0-3 together'"),
        ("layers 0-9 together", "numbered 0 to 4"),
        ("layers 3-1 together", "write the lower one first"),
        ("layer blok.1 on stage 0", "did you mean 'block.1'"),
        ("layers 0-1 recompute some", "some"),
        ("layers 0-1 on floor 3", "write stages as"),
        ("at most 0 layers on stage 0", "at least 1 layer"),
    ],
)
def test_words_that_cannot_be_read_say_what_can(text: str, message: str) -> None:
    with pytest.raises(DocumentError) as refused:
        read_requirements([text], CHAIN)

    assert message in str(refused.value)


def test_a_requirement_asks_for_one_thing() -> None:
    with pytest.raises(ValueError, match="ask for one of"):
        Requirement(layers=(0, 1), together=True, stages=(0,))
