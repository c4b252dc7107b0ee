"""Side-by-side timings of the project's path and the plain reference: `python -m benchmarks`."""
