"""The log of what a server has written, and how one that was started again gets its rows back."""
