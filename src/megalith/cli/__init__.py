"""The commands, one thin file each. `main.app` is all of them."""
