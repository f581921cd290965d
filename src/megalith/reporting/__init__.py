"""Reports, charts, inspection of checkpoints, routing forecasts and samples of ids."""
