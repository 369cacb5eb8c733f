"""flipper: flip bits in deep-learning checkpoints and measure what they do to training."""

__version__ = "0.1.0"
