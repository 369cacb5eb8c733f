"""Striking: altered copies, patches in place, checksum repair, manifest, undo, and live tensors."""
