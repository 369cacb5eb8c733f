"""The report of a campaign: what it found in one page, and its figures for a paper."""
