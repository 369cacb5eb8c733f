"""Which bits are struck: the draw, the population, the fault model and the plan."""
