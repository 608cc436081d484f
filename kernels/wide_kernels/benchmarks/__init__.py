"""Parts of the benchmark: shapes, awkward cases that must be right, timed cases, timing, tuning."""
