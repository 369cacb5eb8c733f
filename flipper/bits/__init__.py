"""What a bit means: the layout of every dtype, and the language of `--bits`."""

from flipper.bits.layout import BitLayout, dtype_names, layout
from flipper.bits.spec import BitSpec

__all__ = ["BitLayout", "BitSpec", "dtype_names", "layout"]
