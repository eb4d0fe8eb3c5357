"""The embedded data set of digits and tones."""
