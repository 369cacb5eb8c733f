"""The figures of a report, one file each: `draw(material)` gives a Picture, or None where there is nothing to show."""
