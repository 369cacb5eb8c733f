"""Campaigns: many trials of struck training runs, their controls, and what they come to."""
