"""Hardware compared before it is bought or rented: studies, candidates, cost, energy, ranking."""
