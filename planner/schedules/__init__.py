"""The orders that papers publish, by how stages lie on ranks.

single  stage s on rank s: GPipe, 1F1B, and 1F1B without flush (PipeDream-2BW)
looped  stages go round the ranks: interleaved 1F1B, zero bubble (ZB-H1, interleaved)
folded  stages go down the ranks and up again, in a V: ZBV, DualPipe-V

Each function returns the order of one rank; `planner.schedule` checks what they require.
"""
