"""Reports, charts, inspection of checkpoints, routing forecasts and id samples."""
