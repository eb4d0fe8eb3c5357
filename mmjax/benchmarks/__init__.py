"""Measure what `python -m mmjax.bench NAME` names, one file a benchmark; every figure a ratio of one run or a count."""
