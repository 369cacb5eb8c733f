"""Studies: what checkpoints cost, measured on the machine that asks."""
