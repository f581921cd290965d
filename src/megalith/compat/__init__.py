"""Other systems' names and formats over the core. Nothing in the core imports this package."""
