"""Statistics of fault injection: plain numbers in and out."""
