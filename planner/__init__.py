"""planner decides: documents, costs, solver, prediction. It never imports torch."""
