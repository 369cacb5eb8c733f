"""Allreduce on a 2-D mesh of chips some of which have failed: schedules, their proof, their cost, their picture."""
