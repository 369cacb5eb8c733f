"""Fail-stop: ranks that die in the midst of training, and how the others go on."""
