"""Training under a parallel layout: recipes, layouts, the loop, the canonical state, and its checkpoints.

The launching side (spec, launch, run, control) never imports torch; the ranks do.
"""
