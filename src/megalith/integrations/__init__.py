"""Other frameworks over the core: Lightning, accelerate, torch.distributed.checkpoint, experiment trackers.

Nothing in the core imports this package; runs load trackers from it by name.
"""
