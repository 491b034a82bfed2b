"""Benchmarks: every method on the same prompts in one shuffled schedule, and what follows from the measurements.

`schedule.run` measures, `summary.summarise` turns raw records into figures, `report` and `plots` show them,
`scaling` asks what longer blocks would bring.
"""
