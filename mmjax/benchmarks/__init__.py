"""What `python -m mmjax.bench NAME` measures, one file a benchmark; every figure a ratio of one run or a count."""
