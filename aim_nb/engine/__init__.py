"""What runs an experiment: records, checkpoints, the training loop, trainers, tests, sweeps."""
