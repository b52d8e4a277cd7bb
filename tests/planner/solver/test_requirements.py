"""What people write for a requirement, and what it asks of a split."""

import pytest

from meshwright.planner.errors import DocumentError
from meshwright.planner.solver.requirements import read_requirements
from meshwright.planner.solver.side_constraints import SideConstraint

CHAIN = ["embedding", "block.0", "block.1", "block.2", "head"]


def test_stages_that_a_layout_lacks_leave_a_layer_without_a_place() -> None:
    (asked,) = read_requirements(["layers 0-1 on stage 3"], CHAIN)

    assert asked.tie(range(5), 2) is None
    assert asked.tie(range(5), 4) == SideConstraint(layers=(0, 1), stages=(3,))


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
