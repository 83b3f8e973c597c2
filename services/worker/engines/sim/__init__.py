"""A simulated engine: blocks, batches and times of a real one, without a model.

`core` is pure and has its own clock; `engine` puts it behind the port. Whatever it answers is no
model's text, and it says "simulator" wherever it shows.
"""
